"""The tasks that wait for a worker, and which of them is next.

Images come before front ends, as they free the memory of their PTX.  But the task that ends last decides when a build ends,
so the long ones must not start last: as soon as there is a worker for each front end that still waits, those come first.

Among front ends the longest should come first as well.  How long one takes shows only when it runs, but it takes about as
long for one architecture as for another.  So each module is compiled once, and then those come first that took longest.

Where many sources start alike, a worker precompiles that start, and stays with them.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from hatch_cuda_aot.compile import precompiled
from hatch_cuda_aot.compile.tasks import FrontTask, Result, Task

__all__ = ["Backlog", "Waiting"]


@dataclass(eq=False, slots=True)
class Waiting:
    """A task that waits.

    Attributes:
        task: the task.
        future: who waits for its result.
        since: the time, by `spans.clock`.
        start: the identity of its start, if the worker that takes it shall have that precompiled.

    """

    task: Task
    future: Future[Result]
    since: int
    start: str = ""
    taken: bool = False


@dataclass(eq=False, slots=True)
class _Module:
    """The front ends of one module with one set of options that wait, and how long those took that are done."""

    order: int
    waiting: deque[Waiting] = field(default_factory=deque)
    started: bool = False
    nanoseconds: int = 0
    done: int = 0

    @property
    def rank(self) -> tuple[int, float, int]:
        """What decides: never started; started and not done, so longer than any that is; and then the longest."""
        if not self.started:
            return (0, 0, self.order)
        if not self.done:
            return (1, 0, self.order)
        return (2, -self.nanoseconds / self.done, self.order)


@dataclass(eq=False, slots=True)
class _Start:
    """The front ends of one start, how many of them wait, and how many workers have it precompiled."""

    name: str
    affinity: tuple[str, ...]
    all: deque[Waiting] = field(default_factory=deque)
    waiting: int = 0
    workers: int = 0

    @property
    def pays(self) -> float:
        """How many of them there are for each worker, if one more precompiles it."""
        return self.waiting / (self.workers + 1)


#: Modules by rank.  A module stands in it once for each rank that it had; only the last of them counts.
_Ranking = list[tuple[tuple[int, float, int], _Module]]


class Backlog:
    """A queue of tasks for as many threads as there are `workers`, which may `precompile` what many sources start with."""

    def __init__(self, workers: int, *, precompile: bool = True) -> None:
        self._workers = workers
        self._precompile = precompile
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._fronts = 0
        self._others: list[tuple[float, int, Waiting]] = []
        self._modules: dict[tuple[tuple[str, ...], str], _Module] = {}
        self._rankings: dict[tuple[str, ...], _Ranking] = {}
        self._starts: dict[str, _Start] = {}
        self._common: dict[str, _Start] = {}

    def put(self, task: Task, future: Future[Result], since: int, priority: float) -> None:
        """Add a task.

        Args:
            task: the task.
            future: who waits for its result.
            since: the time, by `spans.clock`.
            priority: of tasks other than front ends, those with the lowest come first.

        """
        if isinstance(task, FrontTask):
            waiting = Waiting(task, future, since, precompiled.start_of(task) if self._precompile else "")
            with self._changed:
                self._put_front(task, waiting)
                self._changed.notify()
        else:
            with self._changed:
                heapq.heappush(self._others, (priority, next(self._order), Waiting(task, future, since)))
                self._changed.notify()

    def take(self, affinity: tuple[str, ...] | None = None, start: str = "") -> Waiting | None:
        """Wait for a task and return it; None when the backlog is closed.

        Args:
            affinity: that of the worker; front ends of the same are preferred (see `FrontTask.affinity`).
            start: what the worker has precompiled.

        """
        with self._changed:
            while not self._closed:
                if self._others and not 0 < self._fronts <= self._workers:
                    return heapq.heappop(self._others)[2]
                if self._fronts:
                    return self._take_front(affinity, start)
                self._changed.wait()
            return None

    def took(self, task: Task, nanoseconds: int) -> None:
        """Note how long a task took."""
        if isinstance(task, FrontTask):
            with self._changed:
                module = self._module_of(task)
                module.nanoseconds += nanoseconds
                module.done += 1
                self._rank(task.affinity, module)

    def close(self) -> None:
        """Forget what waits, and let every thread that waits for a task have None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put_front(self, task: FrontTask, waiting: Waiting) -> None:
        self._fronts += 1
        module = self._module_of(task)
        module.waiting.append(waiting)
        if len(module.waiting) == 1:
            self._rank(task.affinity, module)
        if waiting.start:
            start = self._starts.setdefault(waiting.start, _Start(waiting.start, task.affinity))
            start.all.append(waiting)
            start.waiting += 1
            if start.waiting >= precompiled.PAYS:
                self._common[start.name] = start

    def _module_of(self, task: FrontTask) -> _Module:
        key = (task.affinity, task.module)
        if key not in self._modules:
            self._modules[key] = _Module(next(self._order))
        return self._modules[key]

    def _rank(self, affinity: tuple[str, ...], module: _Module) -> None:
        if module.waiting:
            heapq.heappush(self._rankings.setdefault(affinity, []), (module.rank, module))

    def _take_front(self, affinity: tuple[str, ...] | None, start: str) -> Waiting:
        """Return one of the worker's start; or of one that it had better precompile; or that of the first module."""
        own = self._starts.get(start)
        if own is None or not own.waiting:
            fitting = [each for each in self._common.values() if affinity in (None, each.affinity)]
            own = max(fitting, key=lambda each: each.pays, default=None)
            if own is None or own.pays < precompiled.PAYS:
                found = self._first_module(affinity)
                found.start = ""
                return found
            own.workers += 1
        found = next(each for each in _drained(own.all) if not each.taken)
        self._mark(found)
        return found

    def _first_module(self, affinity: tuple[str, ...] | None) -> Waiting:
        for each in sorted(self._rankings, key=lambda other: other != affinity):
            ranking = self._rankings[each]
            while ranking:
                rank, module = heapq.heappop(ranking)
                while module.waiting and module.waiting[0].taken:
                    module.waiting.popleft()
                if not module.waiting or rank != module.rank:
                    continue  # it had this rank once
                found = module.waiting.popleft()
                module.started = True
                self._rank(each, module)
                self._mark(found)
                return found
            del self._rankings[each]
        message = "no front end waits"
        raise IndexError(message)

    def _mark(self, found: Waiting) -> None:
        found.taken = True
        self._fronts -= 1
        if found.start:
            start = self._starts[found.start]
            start.waiting -= 1
            if start.waiting < precompiled.PAYS:
                self._common.pop(start.name, None)


def _drained(waiting: deque[Waiting]) -> Iterator[Waiting]:
    while waiting:
        yield waiting.popleft()
