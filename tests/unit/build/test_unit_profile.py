"""Where the time of a build goes: spans, their sums, and the trace."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatch_cuda_aot import spans as spans_module
from hatch_cuda_aot.profile import phases, task_times, trace
from hatch_cuda_aot.spans import BUILD, Span, adopt, on_track, record, recorded, span
from tests.traces import check_trace


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the clock."""
    now = [0]
    monkeypatch.setattr(spans_module, "clock", lambda: now[0])

    def set_clock(time: int) -> None:
        now[0] = time

    return set_clock


def test_nothing_is_noted_unless_somebody_records(at: Any) -> None:
    """Without `record` a span costs next to nothing and leaves nothing."""
    with span("a"):
        assert recorded() is None
    adopt([Span("b", 0, 1, {})], 0)
    with record() as spans:
        at(1)
        with span("c", module="m"):
            at(4)
    with span("d"):
        pass
    assert spans == [Span("c", 1, 4, {"module": "m"}, BUILD)]


def test_a_span_that_fails_is_noted(at: Any) -> None:
    """A profile of a build that failed shows what it did until then."""
    with record() as spans, contextlib.suppress(ZeroDivisionError), span("a"):
        at(3)
        raise ZeroDivisionError
    assert spans == [Span("a", 0, 3, {}, BUILD)]


def test_tracks_of_threads() -> None:
    """A thread notes what it does on a track of its own, in the same list; one that was given none notes nothing."""
    with record() as spans:

        def work(track: str, into: list[Span] | None) -> None:
            with on_track(track, into), span("work"):
                pass

        for track, into in (("worker 1", recorded()), ("worker 2", None)):
            thread = threading.Thread(target=work, args=(track, into))
            thread.start()
            thread.join()
        with span("own"):
            pass
    assert [(each.name, each.track) for each in spans] == [("work", "worker 1"), ("own", BUILD)]


def test_what_workers_report(at: Any) -> None:
    """Spans of a worker are taken in as they are; those by another machine's clock are moved, and never stand out."""
    with record() as spans, on_track("worker 1", spans):
        at(100)
        adopt([Span("here", 20, 90, {})], since=10)
        adopt([Span("there", 5_000, 5_040, {}), Span("there", 5_040, 5_050, {})], since=10)
        adopt([Span("too long", 7_000, 7_400, {})], since=10)
    assert [each[:3] for each in spans] == [
        ("here", 20, 90),
        ("there", 50, 90),
        ("there", 90, 100),
        ("too long", 10, 100),
    ]
    assert {each.track for each in spans} == {"worker 1"}


SPANS = [
    Span("plan", 0, 10, {}),
    Span("wait", 20, 100, {}),
    Span("compile", 30, 90, {"module": "m", "arch": "compute_80", "waited_ns": "10"}, "worker 1"),
    Span("start worker", 30, 40, {}, "worker 1"),
    Span("NVRTC", 40, 80, {"source": "a.cu"}, "worker 1"),
    Span("load", 40, 55, {}, "worker 1"),
    Span("assemble", 90, 95, {"module": "m", "arch": "sm_80", "waited_ns": "2"}, "worker 1"),
    Span("compile", 25, 45, {"module": "n", "arch": "compute_80", "waited_ns": "5"}, "worker 2"),
    Span("NVRTC", 25, 45, {}, "worker 2"),
]


def test_phases() -> None:
    """The time of each phase, without what was done within; what is left of a task is handing it over."""
    assert [(phase.name, phase.count, phase.total, phase.longest) for phase in phases(SPANS)] == [
        ("wait", 1, 80, 80),
        ("NVRTC", 2, 45, 25),
        ("hand over", 3, 15, 10),
        ("load", 1, 15, 15),
        ("plan", 1, 10, 10),
        ("start worker", 1, 10, 10),
    ]


def test_times_of_tasks() -> None:
    """Each task with its wait and its phases, whose sum is its time; the longest first."""
    tasks = task_times(SPANS)
    assert [(task.step, task.module, task.arch, task.waited, task.total) for task in tasks] == [
        ("compile", "m", "compute_80", 10, 60),
        ("compile", "n", "compute_80", 5, 20),
        ("assemble", "m", "sm_80", 2, 5),
    ]
    assert tasks[0].phases == {"hand over": 10, "start worker": 10, "NVRTC": 25, "load": 15}
    assert all(sum(task.phases.values()) == task.total for task in tasks)


def test_trace() -> None:
    """One track for the build, one for each worker, times in microseconds from the first, and a counter of the queue."""
    data = trace(SPANS)
    events = check_trace(json.dumps(data))
    names = {event["tid"]: event["args"]["name"] for event in data["traceEvents"] if event["name"] == "thread_name"}
    assert names == {1: BUILD, 2: "worker 1", 3: "worker 2"}
    task = next(event for event in events if event["name"] == "compile m compute_80")
    assert task == {
        "ph": "X",
        "name": "compile m compute_80",
        "cat": "compile",
        "pid": 1,
        "tid": 2,
        "ts": 0.03,
        "dur": 0.06,
        "args": {"module": "m", "arch": "compute_80", "waited_ms": 1e-5},
    }
    counts = [(event["ts"], event["args"]["tasks"]) for event in data["traceEvents"] if event["ph"] == "C"]
    assert counts == [(0.02, 2), (0.025, 1), (0.03, 0), (0.088, 1), (0.09, 0)]


def test_ten_workers_stand_in_order() -> None:
    """Tracks are sorted by number."""
    spans = [Span("x", 0, 1, {}, f"worker {number}") for number in (10, 2, 1)]
    names = [event["args"]["name"] for event in trace(spans)["traceEvents"] if event["name"] == "thread_name"]
    assert names == [BUILD, "worker 1", "worker 2", "worker 10"]


def test_empty_trace() -> None:
    """A build that failed at once has a trace too."""
    assert check_trace(json.dumps(trace([]))) == []


def nested(start: int, end: int, depth: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Intervals between two times, beside and within one another."""
    if depth == 0 or end - start < 2:
        return st.just([])
    cuts = st.lists(st.integers(start, end), max_size=6).map(sorted)
    pairs = cuts.map(lambda times: list(zip(times[::2], times[1::2], strict=False)))
    return pairs.flatmap(
        lambda outer: st.tuples(*(nested(*pair, depth - 1) for pair in outer)).map(
            lambda inner: [*outer, *(pair for pairs in inner for pair in pairs)]
        )
    )


@given(st.lists(nested(0, 10**12, 3), max_size=3))
def test_sums_and_traces_of_any_spans(tracks: list[list[tuple[int, int]]]) -> None:
    """Whatever was noted: the trace keeps the rules, and phases add up to the time in which the tracks were in use."""
    spans = [
        Span("x", 10**15 + start, 10**15 + end, {}, f"worker {number}")
        for number, pairs in enumerate(tracks)
        for start, end in pairs
    ]
    check_trace(json.dumps(trace(spans)))
    busy = 0
    for pairs in tracks:
        reached = 0
        for start, end in sorted(pairs):
            busy += max(0, end - max(start, reached))
            reached = max(reached, end)
    assert sum(phase.total for phase in phases(spans)) == busy
