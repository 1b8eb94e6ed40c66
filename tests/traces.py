"""The rules of Chrome's Trace Event Format, of what a profile writes.

They are those of "Trace Event Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), which
Perfetto's importer follows.
"""

from __future__ import annotations

import json
from typing import Any

#: Metadata events and the argument that each must have.
METADATA = {"process_name": ("name", str), "thread_name": ("name", str), "thread_sort_index": ("sort_index", int)}


def check_trace(text: str) -> list[dict[str, Any]]:
    """Hold a trace against the format; return its complete events."""
    data = json.loads(text)
    assert data["displayTimeUnit"] in ("ms", "ns")
    events = data["traceEvents"]
    named = set()
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert event["tid"] > 0  # Perfetto shows thread 0 on the track of the thread that has the process's number
        if event["ph"] == "M":
            argument, kind = METADATA[event["name"]]
            assert isinstance(event["args"][argument], kind)
            named |= {event["tid"]} if event["name"] == "thread_name" else set()
            continue
        assert event["ts"] >= 0  # in microseconds
        if event["ph"] == "C":
            assert all(value >= 0 for value in event["args"].values())
        else:
            assert event["ph"] == "X"
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
            json.dumps(event["args"])
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in complete} <= named
    for thread in named:
        _check_nesting([event for event in complete if event["tid"] == thread])
    return complete


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Complete events of a thread lie beside or within one another."""
    around: list[int] = []
    for start, length in sorted((_ns(event["ts"]), -_ns(event["dur"])) for event in events):
        end = start - length
        while around and around[-1] <= start:
            around.pop()
        assert not around or end <= around[-1], "two events of a thread overlap"
        around.append(end)


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)
