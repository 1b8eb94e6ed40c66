"""Spans of a build to what people look at: sums by phase and by task, and a trace for Perfetto.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hatch_cuda_aot.spans import BUILD, Span

__all__ = ["Phase", "TaskTime", "phases", "task_times", "trace"]

#: What a task's span holds beyond the phases that its worker reports: packing, the pipe, and waiting for a CPU.
HAND_OVER = "hand over"


@dataclass(slots=True)
class Phase:
    """All spans of one name; times in nanoseconds, without what was done in spans within."""

    name: str
    count: int = 0
    total: int = 0
    longest: int = 0


@dataclass(slots=True)
class TaskTime:
    """One task of a worker, in nanoseconds: how long it waited, how long it took, and each phase of that."""

    step: str
    module: str
    arch: str
    waited: int
    total: int
    phases: dict[str, int] = field(default_factory=dict)


def phases(spans: Iterable[Span]) -> list[Phase]:
    """Return what took the time of all tracks, the most first; the sum is the time that the tracks were in use."""
    found: dict[str, Phase] = {}
    for each, _, own in _nested(spans):
        phase = found.setdefault(_phase_of(each), Phase(_phase_of(each)))
        phase.count += 1
        phase.total += own
        phase.longest = max(phase.longest, own)
    return sorted(found.values(), key=lambda phase: (-phase.total, phase.name))


def task_times(spans: Iterable[Span]) -> list[TaskTime]:
    """Return the tasks of the workers, the longest first."""
    found: dict[tuple[str, int], TaskTime] = {}
    for each, task, own in _nested(spans):
        if "waited_ns" in task.about:
            module, arch = task.about.get("module", ""), task.about.get("arch", "")
            new = TaskTime(task.name, module, arch, int(task.about["waited_ns"]), task.end - task.start)
            times = found.setdefault((task.track, task.start), new).phases
            times[_phase_of(each)] = times.get(_phase_of(each), 0) + own
    return sorted(found.values(), key=lambda task: (-task.total, task.module, task.arch, task.step))


def trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Return the spans in Chrome's Trace Event Format (JSON object), which Perfetto opens.

    The build and each worker is a thread in it; a counter shows how many tasks wait for a worker.
    """
    begin = min((each.start - int(each.about.get("waited_ns", 0)) for each in spans), default=0)
    tracks = sorted({each.track for each in spans} | {BUILD}, key=lambda name: (name != BUILD, len(name), name))
    # Perfetto takes thread 0 for that whose number is the process's, so that one is the build's.
    numbers = {name: number for number, name in enumerate(tracks, _PID)}
    events: list[dict[str, Any]] = [_metadata("process_name", _PID, name="hatch-cuda-aot build")]
    for name, number in numbers.items():
        events += [
            _metadata("thread_name", number, name=name),
            _metadata("thread_sort_index", number, sort_index=number),
        ]
    for each in sorted(spans, key=_order):
        events.append(
            {
                "ph": "X",
                "name": " ".join(filter(None, [each.name, each.about.get("module"), each.about.get("arch")])),
                "cat": each.name,
                "pid": _PID,
                "tid": numbers[each.track],
                "ts": (each.start - begin) / 1000,
                "dur": (each.end - each.start) / 1000,
                "args": {name: value for name, value in each.about.items() if name != "waited_ns"}
                | ({"waited_ms": int(each.about["waited_ns"]) / 1e6} if "waited_ns" in each.about else {}),
            }
        )
    return {"traceEvents": [*events, *_queue(spans, begin)], "displayTimeUnit": "ms"}


#: Of the trace: times are what matters, and a number of the operating system says nothing.
_PID = 1


def _metadata(kind: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PID, "tid": thread, "args": args}


def _queue(spans: Iterable[Span], begin: int) -> list[dict[str, Any]]:
    """Return the counter of waiting tasks: one value at each time when it changes."""
    changes: dict[int, int] = {}
    for each in spans:
        if "waited_ns" in each.about:
            submitted = each.start - int(each.about["waited_ns"])
            changes[submitted] = changes.get(submitted, 0) + 1
            changes[each.start] = changes.get(each.start, 0) - 1
    events, waiting = [], 0
    for time, change in sorted(changes.items()):
        waiting += change
        values = {"tasks": waiting}
        events.append(
            {"ph": "C", "name": "waiting", "pid": _PID, "tid": _PID, "ts": (time - begin) / 1000, "args": values}
        )
    return events


def _nested(spans: Iterable[Span]) -> list[tuple[Span, Span, int]]:
    """Return each span with the outermost one around it, and its own time: what no span within it covers."""
    found: list[tuple[Span, Span]] = []
    own: list[int] = []
    around: list[int] = []
    for each in sorted(spans, key=_order):
        while around and not _holds(found[around[-1]][0], each):
            around.pop()
        length = each.end - each.start
        if around:
            own[around[-1]] -= length
        found.append((each, found[around[0]][0] if around else each))
        own.append(length)
        around.append(len(own) - 1)
    return [(each, outermost, time) for (each, outermost), time in zip(found, own, strict=True)]


def _order(span: Span) -> tuple[str, int, int, bool]:
    """Order by track and time, with a span before those within it."""
    return span.track, span.start, -span.end, "waited_ns" not in span.about


def _holds(outer: Span, inner: Span) -> bool:
    return outer.track == inner.track and outer.start <= inner.start and inner.end <= outer.end


def _phase_of(span: Span) -> str:
    return HAND_OVER if "waited_ns" in span.about else span.name
