"""Runs tasks in worker processes of our own.

Threads would not do: the front end does not scale in them, and a crash of the compiler would take the build along.  Nor
would a spawn pool of the standard library, which breaks in unguarded scripts and on stdin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
from concurrent.futures import Future
from types import TracebackType

from hatch_cuda_aot.compile.backlog import Backlog
from hatch_cuda_aot.compile.forkserver import ForkedProcess
from hatch_cuda_aot.compile.run import CRASH_ADVICE
from hatch_cuda_aot.compile.starter import Starter
from hatch_cuda_aot.compile.tasks import Compiler, FrontTask, ProbeTask, Result, Task, step_of
from hatch_cuda_aot.compile.worker import receive, send
from hatch_cuda_aot.errors import WorkerCrashError
from hatch_cuda_aot.spans import Span, adopt, clock, on_track, recorded, span

__all__ = ["WorkerPool"]


class WorkerPool:
    """A number of worker processes behind one queue; use it as a context manager.

    Leaving the context kills the workers, whatever they do: Ctrl-C never waits for a compiler.

    Args:
        jobs: how many there may be.
        precompile: have them precompile what many sources begin with.
        starter: starts them; by default one of its own.

    """

    def __init__(self, jobs: int, *, precompile: bool = True, starter: Starter | None = None) -> None:
        self._backlog = Backlog(jobs, precompile=precompile)
        self._starter = starter or Starter(fork=jobs > 1)
        self._slots = [_Slot(self._starter) for _ in range(jobs)]
        self._threads: list[threading.Thread] = []
        self._spans = recorded()

    def submit(self, task: Task, *, priority: float = 0.0) -> Future[Result]:
        """Queue `task`; of those that wait, a lower `priority` starts first, and front ends as `Backlog` says."""
        future: Future[Result] = Future()
        self._backlog.put(task, future, clock(), priority)
        if len(self._threads) < len(self._slots):
            thread = threading.Thread(target=self._serve, args=(len(self._threads),), daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def warm_up(self, compiler: Compiler) -> None:
        """Have all workers but one load `compiler`, while that one is asked what it is; forks will have it loaded."""
        if not self._starter.forks:
            for _ in self._slots[1:]:
                self.submit(ProbeTask(compiler, identify=False))

    def close(self) -> None:
        """Kill the workers and forget the tasks that wait."""
        self._backlog.close()
        for slot in self._slots:
            slot.kill()
        for slot in self._slots:  # now that all of them die at once: each has much memory to give back
            slot.close()
        self._starter.close()
        for thread in self._threads:
            thread.join()
        self._starter.clear()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, number: int) -> None:
        slot = self._slots[number]
        with on_track(f"worker {number + 1}", self._spans):
            while (waiting := self._backlog.take(slot.affinity, slot.start)) is not None:
                task, before = waiting.task, clock()
                try:
                    with _span_of(task, waiting.since):
                        result = slot.run(task, waiting.start)
                except BaseException as error:  # noqa: BLE001 -- whatever it is belongs to whoever waits for the task
                    waiting.future.set_exception(error)
                else:
                    self._backlog.took(task, clock() - before)
                    waiting.future.set_result(result)


class _Slot:
    """One place for a worker process, which is replaced when it died or when the next task must not share it.

    Attributes:
        affinity: of the front ends that its process has compiled; None where there are none yet.
        start: what its process has precompiled.

    """

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.affinity: tuple[str, ...] | None = None
        self.start = ""
        self._avoids_starts = False
        self._killed = False
        self._lock = threading.Lock()

    def run(self, task: Task, start: str = "") -> Result:
        """Run `task`, and have what its source starts with precompiled under the name `start`, if there is one.

        If that is too much for the compiler, it does without from then on.
        """
        if start and not self._avoids_starts and isinstance(task, FrontTask):
            try:
                return self._run(dataclasses.replace(task, start=start))
            except WorkerCrashError:
                self._avoids_starts = True
        return self._run(task)

    def _run(self, task: Task) -> Result:
        if isinstance(task, FrontTask):
            if self.affinity not in (None, task.affinity):
                with self._lock:
                    self._stop()
            self.affinity = task.affinity
            self.start = task.start or self.start
        before, new = clock(), self._process is None
        process = self._process or self._start(task.compiler)
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
        """Kill the process, without waiting for its end, and start no other."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                with contextlib.suppress(OSError):
                    _kill(self._process.pid)

    def close(self) -> None:
        """Kill the process and wait for its end."""
        self.kill()
        with self._lock:
            self._stop()

    def _start(self, compiler: Compiler) -> subprocess.Popen[bytes] | ForkedProcess:
        stopped = WorkerCrashError("the build was stopped", module="", arch="", stage="", log="")
        if self._killed:
            raise stopped
        process = self._starter.start(compiler)  # without the lock: a kill need not wait for a compiler to be loaded
        with self._lock:
            self._process = process
            if self._killed:
                self._stop()
                raise stopped
        return process

    def _stop(self) -> int | None:
        """Kill the process, if it did not end by itself, and return how it ended; with the lock."""
        process, self._process, self.affinity, self.start = self._process, None, None, ""
        if process is None:
            return None
        with contextlib.suppress(OSError):
            _kill(process.pid)
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return process.wait()

    def _crashed(self, task: Task) -> WorkerCrashError:
        with self._lock:
            how = _describe_exit(self._stop())
        if isinstance(task, ProbeTask):
            message = f"the compiler of CUDA {task.compiler.line} crashed while it was loaded, with {how}"
            return WorkerCrashError(message, module="", arch="", stage="NVRTC", log=how)
        stage = "NVRTC" if isinstance(task, FrontTask) else "ptxas"
        sources = f" ({', '.join(task.sources)})" if isinstance(task, FrontTask) else ""
        message = f"{stage} crashed on module {task.module!r}{sources} for {task.arch}, with {how}. {CRASH_ADVICE}"
        return WorkerCrashError(message, module=task.module, arch=str(task.arch), stage=stage, log=how)


def _kill(pid: int) -> None:
    """Kill a worker and any ptxas of it."""
    if not hasattr(os, "killpg"):
        os.kill(pid, signal.SIGTERM)  # which on Windows is as good
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # just forked, and not in a group of its own yet
        os.kill(pid, signal.SIGKILL)


def _span_of(task: Task, submitted: int) -> contextlib.AbstractContextManager[None]:
    """Return the span of a task, which says how long the task waited for its worker."""
    about = {} if isinstance(task, ProbeTask) else {"module": task.module, "arch": str(task.arch)}
    return span(step_of(task), **about, waited_ns=str(clock() - submitted))


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return "an unknown exit status" if code is None else f"exit status {code}"
