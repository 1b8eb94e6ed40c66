"""What a build shows while it runs."""

from __future__ import annotations

import io

import pytest
from hatchling.bridge.app import Application
from rich.console import Console

from hatch_cuda_aot.cli.progress import Progress, seconds_left
from hatch_cuda_aot.config import ModuleConfig, load_settings
from hatch_cuda_aot.plan import Module, Plan, make_plan
from hatch_cuda_aot.plugin import _Reporter as HookReporter
from hatch_cuda_aot.sources import SourceTree
from hatch_cuda_aot.spans import Span
from hatch_cuda_aot.toolchain import line_named


@pytest.mark.parametrize(
    ("done", "left", "times", "expected"),
    [
        # Half of equal tasks are done.
        ({"compile": 2}, {"compile": 2}, {"compile": 5.0}, 10.0),
        # Three cubins are left, each a tenth of a front end: not three times as long as the front end took.
        ({"compile": 1}, {"compile": 0, "assemble": 3}, {"compile": 1.0, "assemble": 0.1}, 3.0),
        # No cubin was made yet: each counts as the mean of what is known.
        ({"compile": 2}, {"assemble": 2}, {"compile": 1.0}, 10.0),
        # An executor that notes no times: every task counts the same.
        ({"compile": 1, "assemble": 3}, {"assemble": 2}, {}, 5.0),
        # All came from the cache so far: nothing can be said.
        ({}, {"compile": 2}, {}, None),
        ({"compile": 2}, {"compile": 0, "assemble": 0}, {"compile": 1.0}, 0.0),
    ],
)
def test_time_left(done: dict[str, int], left: dict[str, int], times: dict[str, float], expected: float | None) -> None:
    """After 10 seconds: what is left, weighed by how long its steps take, at the pace so far."""
    assert seconds_left(10.0, done, left, times) == (None if expected is None else pytest.approx(expected))


def plan(*archs: str, text: str = "") -> Plan:
    """Return a plan; by default one of two front ends and three images."""
    settings = load_settings({"archs": list(archs) or ["sm_80", "sm_90", "compute_90"]}, "test")
    module = ModuleConfig("k", ("k.cu",), (), settings, "test")
    return make_plan([Module(module, SourceTree.of_texts({"k.cu": text}))], line_named("12.9"), list)


def shown(*, terminal: bool, verbose: bool = False, silent: bool = False) -> str:
    """Return what is written while a plan is done, up to a bar in the middle of it."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None, quiet=silent)
    spans = [Span("compile", 0, 10**9, {"waited_ns": "0"})]
    with Progress(verbose=verbose, silent=silent, spans=spans, console=console) as progress:
        progress.planned(plan(), 5)
        progress.done("k", "compute_80", "compile", "", cached=True)
        progress.done("k", "sm_80", "assemble", "", cached=True)
        progress.done("k", "compute_90", "compile", "a.cu(1): warning: x", cached=False)
        progress._bar.refresh()
    assert progress.warnings == 1
    return out.getvalue()


def test_bar() -> None:
    """On a terminal the bar shows the task, how many are done, how many the cache answered, and the time left."""
    line = next(line for line in reversed(shown(terminal=True).splitlines()) if "cached" in line)
    assert "k compute_90" in line
    assert "3/5" in line
    assert "2 cached" in line
    assert line.rstrip().endswith("0.0 s left")


def test_plain_lines() -> None:
    """Elsewhere there are lines only, without a control sequence."""
    assert shown(terminal=False) == "building 1 module, 2 cubins and 1 PTX with CUDA 12.9\n"
    assert shown(terminal=False, verbose=True).splitlines() == [
        "building 1 module, 2 cubins and 1 PTX with CUDA 12.9",
        "compile k for compute_80 (cached)",
        "assemble k for sm_80 (cached)",
        "compile k for compute_90",
        "a.cu(1): warning: x",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_silence(terminal: bool) -> None:  # noqa: FBT001
    """With JSON nothing else is written."""
    assert shown(terminal=terminal, silent=True, verbose=True) == ""


def test_warnings_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Command and hook show what a plan warns of, before they compile."""
    slow = plan("sm_90@compute_75", text="#include <cuda_bf16.h>")
    (warning,) = slow.warnings
    out = io.StringIO()
    console = Console(file=out, width=100, color_system=None)
    with Progress(verbose=False, silent=False, spans=[], console=console) as progress:
        progress.planned(slow, 2)
    assert out.getvalue().splitlines()[:2] == [f"warning: {warning}", f"building {slow}"]
    HookReporter(Application()).planned(slow, 2)
    assert capsys.readouterr().err.splitlines() == [f"cuda-aot: {warning}", f"cuda-aot: building {slow}"]
