"""The shared level of the build cache: asked and filled in the background, and given up at the first trouble.

Threads of our own do the work, as what they wait for may never come: a build neither fails nor hangs because of this level.
It knows names and bytes, and not what they mean.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from hatch_cuda_aot.storage import MissingPackageError, Storage, is_read_only, is_refusal, shown

__all__ = ["SharedLevel"]

_T = TypeVar("_T")

#: How many requests are under way at a time.
THREADS = 16

#: Seconds that a request may take; the first one includes imports and the connection.
PATIENCE = 15.0

#: Seconds that requests may take on average, once there were so many: beyond that it is as fast to compile.
TOO_SLOW, ENOUGH = 2.0, 16

#: Seconds before the one further try of a request that failed.
PAUSE = 0.2

#: What is waited for goes first.
_READ, _WRITE = 0, 1


class SharedLevel:
    """Entries on storage that others use as well.

    Args:
        url: where they are.
        warn: hears of trouble, from any thread; once of each kind, and of nothing more once the level is given up.

    """

    def __init__(self, url: str, warn: Callable[[str], None]) -> None:
        self._url = url
        self._tell = warn
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._ended = threading.Event()
        self._queue: queue.PriorityQueue[tuple[int, int, Callable[[], Any], Future[Any]]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._threads = 0
        #: Requests that nobody answered yet, and since when they are under way.
        self._open: dict[Future[Any], float | None] = {}
        self._given_up = False
        self._writable = not is_read_only(url)
        self._said_damaged = False
        self._requests, self._seconds = 0, 0.0
        self._opening = threading.Lock()
        self._storage: Storage | None = None

    def read(self, name: str, accept: Callable[[bytes], object | None]) -> Future[Any] | None:
        """Ask for an entry in the background; None once the level is given up.

        The future gives what `accept` makes of the content, on a thread; None if there is none, or if it is refused.
        """
        return self._submit(_READ, functools.partial(self._read, name, accept))

    def write(self, name: str, content: bytes) -> None:
        """Store an entry in the background, where writing is allowed."""
        if self._writable:
            self._submit(_WRITE, functools.partial(self._write, name, content))

    def close(self, *, wait: bool) -> None:
        """End, with everything written if `wait`."""
        with self._idle:
            while wait and self._open:
                self._idle.wait()
        self._give_up(None)

    def _submit(self, priority: int, request: Callable[[], Any]) -> Future[Any] | None:
        future: Future[Any] = Future()
        with self._lock:
            if self._given_up:
                return None
            self._open[future] = None
            self._queue.put((priority, next(self._order), request, future))
            if self._threads == 0:
                threading.Thread(target=self._watch, daemon=True).start()
            if self._threads < THREADS:
                self._threads += 1
                threading.Thread(target=self._serve, daemon=True).start()
        return future

    def _serve(self) -> None:
        while True:
            _, _, request, future = self._queue.get()
            started = time.monotonic()
            with self._lock:
                if self._given_up:
                    return
                self._open[future] = started
            try:
                answer = request()
            except Exception as error:  # noqa: BLE001 -- whatever it is, builds go on without this level
                advice = "; check the credentials, and that they may read and list there" if is_refusal(error) else ""
                self._give_up(_sentence(error) + advice)
                return
            self._settle(future, answer, time.monotonic() - started)

    def _settle(self, future: Future[Any], answer: object, seconds: float) -> None:
        with self._idle:
            unanswered = future in self._open
            self._open.pop(future, None)
            self._requests += 1
            self._seconds += seconds
            average = self._seconds / self._requests
            slow = self._requests >= ENOUGH and average > TOO_SLOW
            if not self._open:
                self._idle.notify_all()
        if unanswered:
            future.set_result(answer)
        if slow:
            self._give_up(f"it takes {average:.1f} seconds for each entry")

    def _watch(self) -> None:
        """Give up when a request takes too long; its thread may never come back."""
        while not self._ended.wait(PATIENCE / 20):
            with self._lock:
                oldest = min((since for since in self._open.values() if since is not None), default=None)
            if oldest is not None and time.monotonic() - oldest > PATIENCE:
                self._give_up(f"it did not answer within {PATIENCE:.0f} seconds")

    def _give_up(self, reason: str | None) -> None:
        """Answer every open request with None, and take no more; a reason is told."""
        with self._idle:
            if self._given_up:
                return
            self._given_up = True
            unanswered, self._open = list(self._open), {}
            self._idle.notify_all()
            for number in range(self._threads):  # wakes those that wait
                self._queue.put((_READ, -1 - number, lambda: None, Future()))
        self._ended.set()
        try:
            if reason is not None:
                self._warn(f"is not used by this build: {reason}")
        finally:
            for future in unanswered:
                future.set_result(None)

    def _read(self, name: str, accept: Callable[[bytes], object | None]) -> object | None:
        content = _persist(lambda: self._opened().read(name))
        if content is None:
            return None
        accepted = accept(content)
        if accepted is None:
            with self._lock:
                said, self._said_damaged = self._said_damaged, True
            if not said:
                self._warn(f"holds entries that are damaged, {name} for one; they are not used")
        return accepted

    def _write(self, name: str, content: bytes) -> None:
        if not self._writable:
            return
        try:
            _persist(lambda: self._opened().write(name, content))
        except Exception as error:
            if not is_refusal(error):
                raise
            with self._lock:
                first, self._writable = self._writable, False
            if first:
                self._warn(f"takes no results of this build: {_sentence(error)}")

    def _opened(self) -> Storage:
        with self._opening:
            if self._storage is None:
                self._storage = Storage(self._url)
            return self._storage

    def _warn(self, what: str) -> None:
        self._tell(f"the shared cache {shown(self._url)} {shown(self._url, what)}")


def _persist(request: Callable[[], _T]) -> _T:
    """Try once more what failed; a single lost connection means nothing."""
    try:
        return request()
    except Exception as error:
        if isinstance(error, MissingPackageError) or is_refusal(error):
            raise
    time.sleep(PAUSE)
    return request()


def _sentence(error: Exception) -> str:
    if isinstance(error, MissingPackageError):
        return str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
