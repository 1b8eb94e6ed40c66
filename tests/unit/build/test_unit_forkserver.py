"""Workers that are forked from one process: they answer, crash and end as others do."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hatch_cuda_aot.compile import starter as starter_module
from hatch_cuda_aot.compile.pool import WorkerPool
from hatch_cuda_aot.compile.tasks import AssembleTask, Compiler, Task
from hatch_cuda_aot.errors import NoCompilerError, WorkerCrashError
from hatch_cuda_aot.runtime.arch import Arch
from tests.unit.build.test_unit_pool import PREAMBLE, PROBE, front, is_running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")

#: The start of a server whose workers do what `body` says with each `task`.
SERVER = """\
import json, os, signal, sys, time
sys.path[:] = json.loads(sys.argv.pop())
from hatch_cuda_aot.compile import forkserver, worker
from hatch_cuda_aot.compile.worker import receive, send
loaded = []
forkserver._import_early = lambda: None
forkserver._load = loaded.append
def main():
    tasks, results = os.fdopen(0, "rb"), os.fdopen(1, "wb")
    while True:
        task = receive(tasks)
{body}
worker.main = main
forkserver.serve()
"""


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets what every forked worker does, and what one does that is not forked."""

    def use(body: str, *, otherwise: str = 'send(sys.stdout.buffer, ("result", "not forked"))') -> None:
        indented = "".join(f"        {line}\n" for line in body.splitlines())
        monkeypatch.setattr(starter_module, "_START_SERVER", SERVER.format(body=indented))
        monkeypatch.setattr(starter_module, "_START", f"{PREAMBLE}    {otherwise}\n")

    return use


def image(name: str) -> AssembleTask:
    return AssembleTask(Compiler("12.9"), name, Arch(90), b"", ())


def run(pool: WorkerPool, task: Task) -> Any:
    return pool.submit(task).result(timeout=60)


def test_each_worker_is_a_process(workers: Callable[..., None]) -> None:
    """Tasks are done by as many processes at once as there are places, all forked from one that loaded the compiler."""
    workers(
        "time.sleep(0.3)\n"
        "about = (task.module, os.getpid(), os.getppid(), os.getpgid(0), loaded, os.environ['TMPDIR'])\n"
        'send(results, ("result", about))'
    )
    with WorkerPool(3) as pool:
        futures = [pool.submit(image(name)) for name in "abc"]
        answers: list[Any] = [future.result(timeout=60) for future in futures]
        names, pids, parents, groups, loaded, folders = (list(column) for column in zip(*answers, strict=True))
        assert names == ["a", "b", "c"]
        assert len(set(pids)) == 3
        assert groups == pids
        assert len(set(parents)) == 1
        assert parents != [os.getpid()] * 3
        assert loaded == [[Compiler("12.9")]] * 3
        assert len(set(folders)) == 1
    assert not Path(folders[0]).exists()
    deadline = time.monotonic() + 30  # they are reaped by another process
    while any(map(is_running, [*pids, *parents])) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in [*pids, *parents] if is_running(pid)] == []


def test_a_crash(workers: Callable[..., None]) -> None:
    """The signal that ended a forked worker is known; the next task has a new one."""
    workers('os.kill(os.getpid(), 11) if task.module == "bad" else send(results, ("result", os.getpid()))')
    with WorkerPool(2) as pool:
        first = run(pool, image("good"))
        for _ in range(3):
            with pytest.raises(WorkerCrashError, match=r"ptxas crashed on module 'bad' for sm_90, with SIGSEGV\. "):
                run(pool, image("bad"))
        assert run(pool, image("good")) != first


def test_other_options(workers: Callable[..., None]) -> None:
    """A front end with other options gets another process."""
    workers('send(results, ("result", os.getpid()))')
    with WorkerPool(2) as pool:
        pids = {run(pool, front("a", option)) for option in ("-a", "-b", "-c", "-d")}
    assert len(pids) == 4


@pytest.mark.parametrize("how", ["exit(3)", "os.kill(os.getpid(), 11)"])
def test_a_server_that_does_not_start(monkeypatch: pytest.MonkeyPatch, workers: Callable[..., None], how: str) -> None:
    """If loading the compiler ends the server, workers are started one by one, and can say what is wrong."""
    workers("")
    monkeypatch.setattr(starter_module, "_START_SERVER", f"import os; {how}")
    with WorkerPool(2) as pool:
        assert [run(pool, image("k")) for _ in range(2)] == ["not forked"] * 2


def test_a_server_that_is_killed(workers: Callable[..., None]) -> None:
    """Its workers go on; how one of them ended is not known then; further ones are started one by one."""
    workers('os._exit(7) if task.module == "bad" else send(results, ("result", os.getppid()))')
    with WorkerPool(2) as pool:
        server = run(pool, image("k"))
        os.kill(server, signal.SIGKILL)
        while is_running(server):
            time.sleep(0.01)
        outcomes = set()
        for _ in range(1000):  # until it meets the worker that was forked
            try:
                outcomes.add(run(pool, image("bad")))
            except WorkerCrashError as error:
                outcomes.add(str(error).partition(".")[0])
            if len(outcomes) == 2:
                break
        assert outcomes == {"not forked", "ptxas crashed on module 'bad' for sm_90, with an unknown exit status"}
        assert run(pool, image("k")) == "not forked"


def test_closing_while_the_compiler_is_loaded(workers: Callable[..., None]) -> None:
    """A pool need not wait for a server that is not ready."""
    workers("")
    slow = starter_module._START_SERVER.replace("loaded.append", "lambda _: time.sleep(600)")
    starter_module._START_SERVER = slow
    with WorkerPool(2) as pool:
        future = pool.submit(image("k"))
        time.sleep(0.5)
    with pytest.raises(WorkerCrashError, match="the build was stopped"):
        future.result(timeout=60)


def test_real_workers_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no compiler is installed the server starts all the same, and the worker says so."""
    site = [path for path in sys.path if "site-packages" not in path and "dist-packages" not in path and path]
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[3]), *site])
    hide = "import sys; sys.modules.update(dict.fromkeys(['cuda', 'cuda.bindings', 'cuda.pathfinder']))\n"
    monkeypatch.setattr(starter_module, "_START_SERVER", hide + starter_module._START_SERVER)
    with WorkerPool(2) as pool, pytest.raises(NoCompilerError):
        run(pool, PROBE)
