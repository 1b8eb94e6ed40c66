"""Errors: they cross processes whole, and keep their words and their data."""

from __future__ import annotations

import pickle

import pytest

from hatch_cuda_aot.errors import (
    BuildError,
    ClusterError,
    CompileError,
    ConfigError,
    NoCompilerError,
    Problem,
    ResultError,
    SourceError,
    UnsupportedArchError,
    WorkerCrashError,
)

COMPILE = {"module": "k", "arch": "sm_90", "stage": "NVRTC", "log": "k.cu(1): error"}


@pytest.mark.parametrize(
    "error",
    [
        BuildError("words"),
        SourceError("words"),
        ConfigError([Problem("a.b", "is wrong"), Problem("c", "too")]),
        UnsupportedArchError("words", archs=["sm_42"], line="12.9"),
        NoCompilerError("words", requirements=["x==1"]),
        CompileError("words", **COMPILE),
        ResultError("words", **COMPILE),
        WorkerCrashError("words", **COMPILE),
        ClusterError("words", scheduler="tcp://a:8786", workers=["tcp://b:1"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_pickling(error: BuildError) -> None:
    """An error that a worker raised arrives in the build as it was: its kind, its words, its data."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert isinstance(again, BuildError)


def test_config_error() -> None:
    """A configuration's errors print one after the other, each behind its place."""
    error = ConfigError(Problem(place, "is wrong") for place in ("a", "b"))
    assert str(error) == "a: is wrong\nb: is wrong"
    assert [problem.place for problem in error.problems] == ["a", "b"]
