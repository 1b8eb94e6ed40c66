"""Runs tasks in worker processes of our own.

Threads would not do: the front end does not scale in them, and a crash of the compiler would take the build along.  Nor
would a spawn pool of the standard library, which breaks in unguarded scripts and on stdin.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from types import TracebackType

from hatch_cuda_aot.compile.environment import worker_environ
from hatch_cuda_aot.compile.run import CRASH_ADVICE
from hatch_cuda_aot.compile.tasks import Compiler, FrontTask, ProbeTask, Result, Task, step_of
from hatch_cuda_aot.compile.worker import receive, send
from hatch_cuda_aot.errors import WorkerCrashError
from hatch_cuda_aot.scratch import Scratch
from hatch_cuda_aot.spans import Span, adopt, clock, on_track, recorded, span

__all__ = ["WorkerPool", "default_jobs"]


#: Starts a worker that finds modules where this process does, also in the isolated environments of build frontends.
_START = """\
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from hatch_cuda_aot.compile.worker import main
main()
"""


class WorkerPool:
    """A number of worker processes behind one queue; use it as a context manager.

    Leaving the context kills the workers, whatever they do: Ctrl-C never waits for a compiler.
    """

    def __init__(self, jobs: int) -> None:
        self._queue: queue.PriorityQueue[tuple[float, int, int, Task | None, Future[Result] | None]]
        self._queue = queue.PriorityQueue()
        self._order = itertools.count()
        self._scratch = Scratch()
        self._slots = [_Slot(str(self._scratch.path)) for _ in range(jobs)]
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._spans = recorded()

    def submit(self, task: Task, *, priority: float = 0.0) -> Future[Result]:
        """Queue `task`; of those that wait, a lower `priority` starts first."""
        future: Future[Result] = Future()
        self._queue.put((priority, next(self._order), clock(), task, future))
        if len(self._threads) < len(self._slots):
            thread = threading.Thread(target=self._serve, args=(len(self._threads),), daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def warm_up(self, compiler: Compiler) -> None:
        """Have all workers but one load `compiler`, while that one is asked what it is."""
        for _ in self._slots[1:]:
            self.submit(ProbeTask(compiler))

    def close(self) -> None:
        """Kill the workers and forget the tasks that wait."""
        self._closed = True
        for slot in self._slots:
            slot.kill()
        for _ in self._threads:
            self._queue.put((float("-inf"), next(self._order), 0, None, None))
        for thread in self._threads:
            thread.join()
        self._scratch.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, number: int) -> None:
        slot = self._slots[number]
        with on_track(f"worker {number + 1}", self._spans):
            while True:
                _, _, submitted, task, future = self._queue.get()
                if task is None or future is None or self._closed:
                    return
                try:
                    with _span_of(task, submitted):
                        result = slot.run(task)
                except BaseException as error:  # noqa: BLE001 -- whatever it is belongs to whoever waits for the task
                    future.set_exception(error)
                else:
                    future.set_result(result)


class _Slot:
    """One place for a worker process, which is replaced when it died or when the next task must not share it."""

    def __init__(self, temporary: str) -> None:
        self._temporary = temporary
        self._process: subprocess.Popen[bytes] | None = None
        self._affinity: tuple[str, ...] | None = None
        self._killed = False
        self._lock = threading.Lock()

    def run(self, task: Task) -> Result:
        if isinstance(task, FrontTask):
            if self._affinity not in (None, task.affinity):
                self._stop()
            self._affinity = task.affinity
        before, new = clock(), self._process is None
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin, task)
            kind, content, *rest = receive(process.stdout)
        except (EOFError, OSError):
            raise self._crashed(task) from None
        spans: list[Span] = rest[0] if rest else []
        if new and spans:
            spans.append(Span("start worker", before, min(each.start for each in spans), {}))
        adopt(spans, before)
        if kind == "result":
            return content  # type: ignore[no-any-return]
        if kind == "error":
            raise content
        message = f"a worker failed in a way that it should not:\n{content}"
        raise RuntimeError(message)

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._killed:
                raise WorkerCrashError("the build was stopped", module="", arch="", stage="", log="")
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, json.dumps(sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=worker_environ(os.environ, self._temporary),
                    # A group of its own: Ctrl-C reaches only the build, which then kills the worker and its ptxas.
                    start_new_session=True,
                )
            return self._process

    def _stop(self) -> int | None:
        process, self._process, self._affinity = self._process, None, None
        if process is None:
            return None
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return process.wait()

    def _crashed(self, task: Task) -> WorkerCrashError:
        process = self._process
        code = process.wait() if process is not None else None
        self._stop()
        how = _describe_exit(code)
        if isinstance(task, ProbeTask):
            message = f"the compiler of CUDA {task.compiler.line} crashed while it was loaded, with {how}"
            return WorkerCrashError(message, module="", arch="", stage="NVRTC", log=how)
        stage = "NVRTC" if isinstance(task, FrontTask) else "ptxas"
        sources = f" ({', '.join(task.sources)})" if isinstance(task, FrontTask) else ""
        message = f"{stage} crashed on module {task.module!r}{sources} for {task.arch}, with {how}. {CRASH_ADVICE}"
        return WorkerCrashError(message, module=task.module, arch=str(task.arch), stage=stage, log=how)


def _span_of(task: Task, submitted: int) -> contextlib.AbstractContextManager[None]:
    """Return the span of a task, which says how long the task waited for its worker."""
    about = {} if isinstance(task, ProbeTask) else {"module": task.module, "arch": str(task.arch)}
    return span(step_of(task), **about, waited_ns=str(clock() - submitted))


def default_jobs() -> int:
    """Return how many workers ``jobs = "auto"`` means: one for each CPU that this process may use."""
    with contextlib.suppress(AttributeError):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit status {code}"
