"""Worker processes: crashes, interrupts and queues, with stand-ins for the compiler's processes."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from hatch_cuda_aot.compile import pool as pool_module
from hatch_cuda_aot.compile import starter as starter_module
from hatch_cuda_aot.compile.pool import WorkerPool
from hatch_cuda_aot.compile.starter import Starter, default_jobs
from hatch_cuda_aot.compile.tasks import AssembleTask, Compiler, FrontTask, ProbeTask, Result, Task
from hatch_cuda_aot.compile.worker import receive, send
from hatch_cuda_aot.errors import BuildError, NoCompilerError, WorkerCrashError
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.sources import SourceTree
from hatch_cuda_aot.toolchain import Needs, line_named, requirements

REPOSITORY = Path(__file__).parents[3]
PROBE = ProbeTask(Compiler("12.9"))
ASSEMBLE = AssembleTask(Compiler("12.9"), "k", Arch(90), b"", ())

posix_only = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")

#: The start of a stand-in: receives tasks and answers as `answer` says.
PREAMBLE = """\
import json, os, sys, time
sys.path[:] = json.loads(sys.argv.pop())
from hatch_cuda_aot.compile.worker import receive, send
from hatch_cuda_aot.errors import BuildError
while True:
    task = receive(sys.stdin.buffer)
"""


def front(name: str = "k", *nvrtc: str) -> FrontTask:
    """Return a front-end task with NVRTC options."""
    tree = SourceTree.of_texts({f"{name}.cu": ""})
    return FrontTask(Compiler("12.9"), name, Arch(90, virtual=True), tree, (f"{name}.cu",), (), nvrtc, (), prune=True)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets what every worker does with each `task`."""

    def use(body: str) -> None:
        monkeypatch.setattr(pool_module, "Starter", lambda *, fork: starter_module.Starter(fork=False))  # noqa: ARG005
        monkeypatch.setattr(starter_module, "_START", PREAMBLE + "".join(f"    {line}\n" for line in body.splitlines()))

    return use


@pytest.fixture
def one_worker() -> Iterator[WorkerPool]:
    """A pool of one."""
    with WorkerPool(1) as pool:
        yield pool


def run(pool: WorkerPool, task: Task) -> Any:
    """Return the result of a task, whatever a stand-in makes of it."""
    return pool.submit(task).result(timeout=60)


def is_running(pid: int) -> bool:
    """Tell whether a process is alive; one that died and was not yet waited for is not."""
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


def test_a_real_worker_without_a_compiler(monkeypatch: pytest.MonkeyPatch, one_worker: WorkerPool) -> None:
    """In an environment without CUDA packages a real worker raises `NoCompilerError`, which arrives here whole."""
    site = [path for path in sys.path if "site-packages" not in path and "dist-packages" not in path and path]
    monkeypatch.setattr(sys, "path", [str(REPOSITORY), *site])
    hide = "import sys; sys.modules.update(dict.fromkeys(['cuda', 'cuda.bindings', 'cuda.pathfinder']))\n"
    monkeypatch.setattr(starter_module, "_START", hide + starter_module._START)
    with pytest.raises(NoCompilerError) as caught:
        run(one_worker, ProbeTask(Compiler("12.9", Needs(curand=True))))
    assert list(caught.value.requirements) == requirements(line_named("12.9"), Needs(curand=True))
    assert "  - cuda-bindings" in str(caught.value).splitlines()


def test_results_and_reuse(workers: Callable[[str], None], one_worker: WorkerPool) -> None:
    """A worker serves one task after the other, and each future gets its own result."""
    workers('send(sys.stdout.buffer, ("result", (os.getpid(), task.ptx)))')
    tasks = [AssembleTask(Compiler("12.9"), "k", Arch(90), bytes([number]) * 100_000, ()) for number in range(3)]
    results: list[Any] = [future.result(timeout=60) for future in [one_worker.submit(task) for task in tasks]]
    assert [ptx for _, ptx in results] == [task.ptx for task in tasks]
    assert len({pid for pid, _ in results}) == 1


def test_errors_of_the_user(workers: Callable[[str], None], one_worker: WorkerPool) -> None:
    """What a worker says is the user's to mend is raised as it is, and the worker lives on."""
    workers('send(sys.stdout.buffer, ("error", BuildError(f"wrong: {task.module} {os.getpid()}")))')
    messages = []
    for _ in range(2):
        with pytest.raises(BuildError, match="wrong: k ") as caught:
            run(one_worker, ASSEMBLE)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_crash_over_a_precompiled_header(workers: Callable[[str], None]) -> None:
    """A compiler that crashes over a precompiled header compiles without it, and its slot does not try it again."""
    workers(
        "if task.start:\n    open(os.environ['TMPDIR'] + '/tried', 'a').write('x')\n    os.kill(os.getpid(), 9)\n"
        "tried = os.environ['TMPDIR'] + '/tried'\n"
        'send(sys.stdout.buffer, ("result", len(open(tried).read()) if os.path.exists(tried) else 0))'
    )
    slot = pool_module._Slot(starter_module.Starter(fork=False))
    try:
        assert slot.run(front(), "a start") == slot.run(front(), "a start") == slot.run(front()) == 1  # type: ignore[comparison-overlap]
        assert slot.start == ""
    finally:
        slot.close()


def test_defects(workers: Callable[[str], None], one_worker: WorkerPool) -> None:
    """Any other exception in a worker is a defect, shown with the worker's own traceback."""
    workers('send(sys.stdout.buffer, ("defect", "Traceback: ZeroDivisionError"))')
    with pytest.raises(
        RuntimeError, match="a worker failed in a way that it should not:\nTraceback: ZeroDivisionError"
    ):
        run(one_worker, ASSEMBLE)


@posix_only
@pytest.mark.parametrize(
    ("task", "words", "stage", "arch"),
    [
        (
            front("noise"),
            "NVRTC crashed on module 'noise' (noise.cu) for compute_90, with SIGSEGV. ",
            "NVRTC",
            "compute_90",
        ),
        (ASSEMBLE, "ptxas crashed on module 'k' for sm_90, with SIGSEGV. ", "ptxas", "sm_90"),
        (PROBE, "the compiler of CUDA 12.9 crashed while it was loaded, with SIGSEGV", "NVRTC", ""),
    ],
)
def test_crash(
    workers: Callable[[str], None], one_worker: WorkerPool, task: Task, words: str, stage: str, arch: str
) -> None:
    """A compiler that crashes ends its worker alone: the error names module, architecture and signal."""
    workers("os.kill(os.getpid(), 11)")
    with pytest.raises(WorkerCrashError) as caught:
        run(one_worker, task)
    assert str(caught.value).startswith(words)
    assert (caught.value.stage, caught.value.arch, caught.value.log) == (stage, arch, "SIGSEGV")
    if not isinstance(task, ProbeTask):
        assert "Try another `cuda` line" in str(caught.value)


@pytest.mark.parametrize("body", ["sys.exit(3)", "sys.stdout.buffer.write(bytes(4)); sys.stdout.flush(); sys.exit(3)"])
def test_worker_that_ends(workers: Callable[[str], None], one_worker: WorkerPool, body: str) -> None:
    """A worker that leaves, even in the middle of an answer, is told by its exit status."""
    workers(body)
    with pytest.raises(WorkerCrashError, match="with exit status 3"):
        run(one_worker, ASSEMBLE)


@posix_only
def test_the_next_task_gets_a_new_worker(workers: Callable[[str], None], one_worker: WorkerPool) -> None:
    """After a crash the other tasks are done as if nothing had happened."""
    workers('os.kill(os.getpid(), 11) if task.module == "bad" else send(sys.stdout.buffer, ("result", task.module))')
    tasks = [AssembleTask(Compiler("12.9"), name, Arch(90), b"", ()) for name in ("a", "bad", "b")]
    first, second, third = [one_worker.submit(task) for task in tasks]
    assert first.result(timeout=60) == "a"  # type: ignore[comparison-overlap]
    with pytest.raises(WorkerCrashError):
        second.result(timeout=60)
    assert third.result(timeout=60) == "b"  # type: ignore[comparison-overlap]


def test_affinity(workers: Callable[[str], None], one_worker: WorkerPool) -> None:
    """Front ends of other options get a fresh process, as NVRTC remembers some; those of the same, and ptxas, do not."""
    workers('send(sys.stdout.buffer, ("result", os.getpid()))')
    tasks: list[Task] = [
        PROBE,
        front("a", "--restrict"),
        front("b", "--restrict"),
        ASSEMBLE,
        front("a", "--restrict"),
        front("a"),
        ASSEMBLE,
        front("b"),
    ]
    pids = [run(one_worker, task) for task in tasks]
    assert len(set(pids[:5])) == 1
    assert len(set(pids[5:])) == 1
    assert pids[4] != pids[5]


@posix_only
def test_affinity_after_a_crash(workers: Callable[[str], None], one_worker: WorkerPool) -> None:
    """A process that replaces a crashed one has no history."""
    workers('os.kill(os.getpid(), 11) if task.module == "bad" else send(sys.stdout.buffer, ("result", os.getpid()))')
    with pytest.raises(WorkerCrashError):
        run(one_worker, front("bad", "--restrict"))
    assert run(one_worker, ASSEMBLE) == run(one_worker, front("a"))


@posix_only
def test_replaced_workers_are_gone(workers: Callable[[str], None], one_worker: WorkerPool) -> None:
    """A process that is replaced does not stay behind."""
    workers('send(sys.stdout.buffer, ("result", os.getpid()))')
    first = run(one_worker, front("a", "--restrict"))
    run(one_worker, front("a"))
    assert not is_running(first)


@posix_only
def test_leaving_kills_the_workers(workers: Callable[[str], None], tmp_path: Path) -> None:
    """Ctrl-C never waits for a compiler: on leaving, workers that are busy die at once, and with them their ptxas."""
    workers(
        "import subprocess\n"
        'child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])\n'
        'temporary = task.module + ".tmp"\n'
        'open(temporary, "w").write(f"{os.getpid()} {child.pid}")\n'
        "os.rename(temporary, task.module)\n"
        "time.sleep(600)"
    )
    marks = [tmp_path / "one", tmp_path / "two"]
    tasks = [AssembleTask(Compiler("12.9"), str(mark), Arch(90), b"", ()) for mark in marks]
    futures: list[Future[Result]] = []

    def build() -> None:
        with WorkerPool(2) as pool:
            futures.extend(pool.submit(task) for task in tasks)
            futures.append(pool.submit(ASSEMBLE))
            while not all(mark.exists() for mark in marks):
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build()
    pids = [int(pid) for mark in marks for pid in mark.read_text(encoding="utf-8").split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 30  # orphaned children are reaped by another process
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in pids if is_running(pid)] == []
    done, _ = wait(futures[:2], timeout=60)
    assert all(isinstance(future.exception(), WorkerCrashError) for future in done)
    assert len(done) == 2
    assert not futures[2].done()


def test_closed_pool_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that was killed starts no further process."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    slot = pool_module._Slot(starter_module.Starter(fork=False))
    slot.kill()
    with pytest.raises(WorkerCrashError, match="the build was stopped"):
        slot.run(ASSEMBLE)


class StubSlot:
    """Stands in for a place of a worker: notes what it runs, and waits for a sign before it ends the first task."""

    def __init__(self) -> None:
        self.affinity: tuple[str, ...] | None = None
        self.start = ""
        self.started = threading.Event()
        self.go = threading.Event()
        self.ran: list[str] = []

    def run(self, task: AssembleTask, start: str) -> str:  # noqa: ARG002
        self.ran.append(task.module)
        self.started.set()
        if not self.go.wait(60):
            raise TimeoutError
        return task.module

    def kill(self) -> None:
        self.go.set()

    def close(self) -> None:
        pass


def test_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tasks that wait, those of lower priority go first, and of equals the one that came first."""
    slot = StubSlot()
    monkeypatch.setattr(pool_module, "_Slot", lambda _: slot)
    tasks = {name: AssembleTask(Compiler("12.9"), name, Arch(90), b"", ()) for name in ("first", "a", "b", "c", "d")}
    with WorkerPool(1) as pool:
        futures = [pool.submit(tasks["first"])]
        assert slot.started.wait(60)
        futures += [
            pool.submit(tasks[name], priority=priority) for name, priority in zip("abcd", (0, -1, 0, -1), strict=True)
        ]
        slot.go.set()
        wait(futures, timeout=60)
    assert slot.ran == ["first", "b", "d", "a", "c"]


def test_no_more_workers_than_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads, and with them processes, are started as tasks come in, up to the number of jobs."""
    slots: list[StubSlot] = []

    def make(_: str) -> StubSlot:
        slots.append(StubSlot())
        slots[-1].go.set()
        return slots[-1]

    monkeypatch.setattr(pool_module, "_Slot", make)
    before = threading.active_count()
    with WorkerPool(4) as pool:
        assert threading.active_count() == before
        pool.submit(ASSEMBLE).result(timeout=60)
        assert threading.active_count() == before + 1
        wait([pool.submit(ASSEMBLE) for _ in range(8)], timeout=60)
        assert threading.active_count() == before + 4
    assert threading.active_count() == before
    assert len(slots) == 4


def test_all_workers_start_while_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a worker says what the compiler is, the others load theirs; nobody waits for them."""
    asked: list[ProbeTask] = []
    all_at_once = threading.Barrier(3)

    class Slot:
        affinity = None
        start = ""

        def __init__(self, temporary: str) -> None:
            pass

        def run(self, task: ProbeTask, start: str) -> str:  # noqa: ARG002
            asked.append(task)
            all_at_once.wait(60)
            if not task.archs:
                raise NoCompilerError("none here")
            return "the answer"

        def kill(self) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(pool_module, "_Slot", Slot)
    with WorkerPool(3, starter=Starter(fork=False)) as pool:
        answer = pool.submit(ProbeTask(Compiler("12.9"), (Arch(90),)))
        pool.warm_up(Compiler("12.9"))
        assert str(answer.result(60)) == "the answer"
    assert sorted(len(task.archs) for task in asked) == [0, 0, 1]


def test_default_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as CPUs that this process may use; where that is not known, as many as there are, and never none."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert default_jobs() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert default_jobs() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_jobs() == 1


def test_messages() -> None:
    """Messages follow one another on a stream, of any size."""
    stream = io.BytesIO()
    for message in ("one", b"x" * 100_000, ("result", front())):
        send(stream, message)
    stream.seek(0)
    assert [receive(stream), receive(stream), receive(stream)] == ["one", b"x" * 100_000, ("result", front())]
    with pytest.raises(EOFError):
        receive(stream)


@pytest.mark.parametrize("length", [0, 4, 8, 12])
def test_message_that_breaks_off(length: int) -> None:
    """Half a message is the end of the other side."""
    stream = io.BytesIO()
    send(stream, "a message")
    with pytest.raises(EOFError):
        receive(io.BytesIO(stream.getvalue()[:length]))


def real_worker(*, cwd: Path) -> subprocess.Popen[bytes]:
    """Start the worker as a program of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "hatch_cuda_aot.compile.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
    )


def test_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """When the build is gone, its workers end by themselves."""
    with real_worker(cwd=tmp_path) as worker:
        assert worker.stdin is not None
        worker.stdin.close()
        assert worker.wait(60) in (1, -signal.SIGKILL if os.name == "posix" else 1)


def test_worker_protects_its_answers(tmp_path: Path) -> None:
    """A task that no worker can do is answered as a defect, with the traceback, and the worker stays."""
    with real_worker(cwd=tmp_path) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        for _ in range(2):
            send(worker.stdin, "no task")
            kind, content, spans = receive(worker.stdout)
            assert spans == []
            assert kind == "defect"
            assert "Traceback" in content
        worker.stdin.close()
        worker.wait(60)


def test_tasks_travel() -> None:
    """Tasks are values: another process gets an equal one."""
    for task in (PROBE, ASSEMBLE, front("a", "--restrict")):
        assert pickle.loads(pickle.dumps(task)) == task
