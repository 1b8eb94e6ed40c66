"""The tasks that wait for a worker, and which of them is next.

Images come before front ends, as they free the memory of their PTX.  But the task that ends last decides when a build ends,
so the long ones must not start last: as soon as there is a worker for each front end that still waits, those come first.

Among front ends the longest should come first as well.  How long one takes shows only when it runs, but it takes about as
long for one architecture as for another.  So each module is compiled once, and then those come first that took longest.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from hatch_cuda_aot.compile.tasks import FrontTask, Result, Task

__all__ = ["Backlog", "Waiting"]


class Waiting(NamedTuple):
    """A task that waits: since when, by `spans.clock`, and who waits for its result."""

    task: Task
    future: Future[Result]
    since: int


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


#: Modules by rank.  A module stands in it once for each rank that it had; only the last of them counts.
_Ranking = list[tuple[tuple[int, float, int], _Module]]


class Backlog:
    """A queue of tasks for as many threads as there are `workers`."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._fronts = 0
        self._others: list[tuple[float, int, Waiting]] = []
        self._modules: dict[tuple[tuple[str, ...], str], _Module] = {}
        self._rankings: dict[tuple[str, ...], _Ranking] = {}

    def put(self, waiting: Waiting, priority: float) -> None:
        """Add a task.

        Args:
            waiting: the task.
            priority: of tasks other than front ends, those with the lowest come first.

        """
        with self._changed:
            if isinstance(waiting.task, FrontTask):
                module = self._module_of(waiting.task)
                module.waiting.append(waiting)
                self._fronts += 1
                if len(module.waiting) == 1:
                    self._rank(waiting.task.affinity, module)
            else:
                heapq.heappush(self._others, (priority, next(self._order), waiting))
            self._changed.notify()

    def take(self, affinity: tuple[str, ...] | None = None) -> Waiting | None:
        """Wait for a task and return it; None when the backlog is closed.

        Args:
            affinity: that of the worker; front ends of the same are preferred (see `FrontTask.affinity`).

        """
        with self._changed:
            while not self._closed:
                if self._others and not 0 < self._fronts <= self._workers:
                    return heapq.heappop(self._others)[2]
                if self._fronts:
                    self._fronts -= 1
                    return self._take_front(affinity)
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

    def _module_of(self, task: FrontTask) -> _Module:
        key = (task.affinity, task.module)
        if key not in self._modules:
            self._modules[key] = _Module(next(self._order))
        return self._modules[key]

    def _rank(self, affinity: tuple[str, ...], module: _Module) -> None:
        if module.waiting:
            heapq.heappush(self._rankings.setdefault(affinity, []), (module.rank, module))

    def _take_front(self, affinity: tuple[str, ...] | None) -> Waiting:
        for each in sorted(self._rankings, key=lambda other: other != affinity):
            ranking = self._rankings[each]
            while ranking:
                rank, module = heapq.heappop(ranking)
                if not module.waiting or rank != module.rank:
                    continue  # it had this rank once
                found = module.waiting.popleft()
                module.started = True
                self._rank(each, module)
                return found
            del self._rankings[each]
        message = "no front end waits"
        raise IndexError(message)
