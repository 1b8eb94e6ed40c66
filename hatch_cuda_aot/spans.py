"""Notes where the time of a build goes: named spans, on a clock that all processes of a machine share.

Nothing is noted unless somebody records, and no time ever reaches a result or a key of the cache.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

__all__ = ["BUILD", "Span", "adopt", "clock", "on_track", "record", "recorded", "span"]

#: The track of the build itself; each worker has one of its own.
BUILD = "build"

#: Nanoseconds; the same for every process of the machine.
clock = time.monotonic_ns


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        name: what was done.
        start: by `clock`.
        end: by `clock`.
        about: what it was done to, such as ``{"module": "axpy"}``.
        track: who did it.  Spans of one track lie beside or within one another.

    """

    name: str
    start: int
    end: int
    about: dict[str, str]
    track: str = BUILD


_current: ContextVar[tuple[str, list[Span]] | None] = ContextVar("spans", default=None)


@contextlib.contextmanager
def record() -> Iterator[list[Span]]:
    """Note the spans of this block, and of the worker pools that are made in it."""
    spans: list[Span] = []
    with on_track(BUILD, spans):
        yield spans


@contextlib.contextmanager
def on_track(track: str, spans: list[Span] | None) -> Iterator[None]:
    """Note the spans of this block, in this thread, as those of `track`; with None note nothing."""
    token = _current.set(None if spans is None else (track, spans))
    try:
        yield
    finally:
        _current.reset(token)


def recorded() -> list[Span] | None:
    """Return where this thread notes spans, for another thread to go `on_track`; None where nobody records."""
    current = _current.get()
    return None if current is None else current[1]


@contextlib.contextmanager
def span(name: str, **about: str) -> Iterator[None]:
    """Note how long this block takes."""
    current = _current.get()
    if current is None:
        yield
        return
    track, spans = current
    start = clock()
    try:
        yield
    finally:
        spans.append(Span(name, start, clock(), about, track))


def adopt(spans: Iterable[Span], since: int) -> None:
    """Note what another process reports to have done between `since` and now, as done on this track.

    Where that cannot be, its clock is another machine's: its spans are moved to end now.
    """
    current = _current.get()
    spans = list(spans)
    if current is None or not spans:
        return
    now = clock()
    start, end = min(each.start for each in spans), max(each.end for each in spans)
    shift = 0 if since <= start and end <= now else now - end
    # What took longer there than we waited here is cut off, so that spans stay within one another.
    current[1].extend(
        each._replace(start=max(since, each.start + shift), end=max(since, each.end + shift), track=current[0])
        for each in spans
    )
