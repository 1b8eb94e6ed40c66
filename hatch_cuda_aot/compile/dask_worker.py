"""What a build runs inside Dask's workers: tasks, each in a compiler process of its own and never in the worker itself.

NVRTC in the worker's process would carry options from one task to the next, and a crash of it would take the worker along.
What comes in and goes out is pickled by ourselves, see `dask_pool`.
"""

from __future__ import annotations

import asyncio
import functools
import pickle
import socket
import threading
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any, Literal

from hatch_cuda_aot.compile.pool import WorkerPool
from hatch_cuda_aot.compile.software import PROGRAM, Software, program, software_of
from hatch_cuda_aot.compile.tasks import Compiler, FrontTask, ProbeTask, Result, Task
from hatch_cuda_aot.errors import BuildError
from hatch_cuda_aot.toolchain import Toolchain

__all__ = ["Answer", "Report", "answer", "survey"]

#: How long a compiler process waits for another task, in seconds.
IDLE = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a task: a result, an error of the user's, a worker that does not fit, or a defect of ours."""

    kind: Literal["result", "error", "unfit", "defect"]
    content: Any
    worker: str


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's host, and what it compiles with, or why it cannot."""

    host: str
    software: Software | None
    problem: str = ""


def answer(payload: bytes, tree: bytes | None, expected: Software | None) -> bytes:
    """Do the task in a pickle, and return an `Answer` in another.

    Args:
        payload: the task.
        tree: the source tree that belongs to it, where that was sent apart.
        expected: what a worker must have to take part; None where that is not known yet.

    """
    return pickle.dumps(_answer(payload, tree, expected))


async def survey(compiler: Compiler) -> Report:
    """Say what this worker compiles with, without holding up its event loop."""
    return await asyncio.to_thread(_report, compiler)


def _answer(payload: bytes, tree: bytes | None, expected: Software | None) -> Answer:
    from distributed import get_worker

    worker = str(get_worker().address)
    if expected is not None and expected[PROGRAM] != program():  # then its tasks might be none of ours
        return Answer("unfit", Report(socket.gethostname(), {PROGRAM: program()}), worker)
    task: Task = pickle.loads(payload)  # noqa: S301 -- a cluster runs whatever it is sent
    if tree is not None and isinstance(task, FrontTask):
        task = replace(task, tree=pickle.loads(tree))  # noqa: S301
    try:
        if expected is not None and (report := _report(task.compiler)).software != expected:
            return Answer("unfit", report, worker)
        return Answer("result", _PROCESSES.run(task), worker)
    except BuildError as error:
        # As a value: Dask replaces exceptions with a long text, and logs every one.
        return Answer("error", error, worker)
    except Exception:  # noqa: BLE001 -- a defect: the build shows it whole
        return Answer("defect", traceback.format_exc(), worker)


def _report(compiler: Compiler) -> Report:
    host = socket.gethostname()
    try:
        return Report(host, _software(compiler))
    except BuildError as error:
        return Report(host, None, _in_one_line(error))


def _in_one_line(error: BuildError) -> str:
    """Return what an error says, without the advice below its list: that is not for Dask's workers."""
    first, *rest = str(error).splitlines()
    items = [line.removeprefix("  - ") for line in rest if line.startswith("  - ")]
    return " ".join([first, ", ".join(items)]).strip()


@functools.cache
def _software(compiler: Compiler) -> Software:
    toolchain = _PROCESSES.run(ProbeTask(compiler))
    assert isinstance(toolchain, Toolchain)
    return software_of(toolchain, compiler)


class _Processes:
    """Compiler processes that wait for work: as many as this worker ran tasks at a time, and none for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []
        self._timer: threading.Timer | None = None

    def run(self, task: Task) -> Result:
        affinity = task.affinity if isinstance(task, FrontTask) else None
        process = self._take(affinity)
        try:
            return process.pool.submit(task).result()
        finally:
            self._give_back(_Idle(process.pool, affinity or process.affinity, time.monotonic()))

    def _take(self, affinity: tuple[str, ...] | None) -> _Idle:
        """Return a process that can go on as it is, if there is one, or else one that cannot, or a new one."""
        with self._lock:
            fitting = (
                place for place, idle in enumerate(self._idle) if affinity is None or idle.affinity in (None, affinity)
            )
            if self._idle:
                return self._idle.pop(next(fitting, -1))
        return _Idle(WorkerPool(1), None, 0)

    def _give_back(self, idle: _Idle) -> None:
        with self._lock:
            self._idle.append(idle)
            if self._timer is None:
                self._start_timer()

    def _start_timer(self) -> None:
        self._timer = threading.Timer(IDLE, self._end_idle)
        self._timer.daemon = True
        self._timer.start()

    def _end_idle(self) -> None:
        with self._lock:
            now = time.monotonic()
            ended = [idle for idle in self._idle if now - idle.since >= IDLE]
            self._idle = [idle for idle in self._idle if idle not in ended]
            self._timer = None
            if self._idle:
                self._start_timer()
        for idle in ended:
            idle.pool.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Idle:
    """One process, the options that it remembers, and since when it waits."""

    pool: WorkerPool
    affinity: tuple[str, ...] | None
    since: float


_PROCESSES = _Processes()
