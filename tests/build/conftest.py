"""Real compilers for the build tests: one virtual environment for each CUDA line, made once and kept in pytest's cache."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from hatch_cuda_aot.compile.dask_pool import REQUIREMENTS
from hatch_cuda_aot.toolchain import Needs, line_named, requirements
from tests.wheels import ROOT, make_wheelhouse

EXAMPLE = ROOT / "example_pkg"
PACKAGES = ROOT / "tests" / "packages"

#: The lines that are tested: the oldest, and the newest.
LINES = ("12.9", "13.5")


# Started in the background it is ignored, and programs that the tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.build)
            # One process for the tests of a line, so that only one makes its environment.
            params = getattr(item, "callspec", None)
            line = params.params.get("compiler") if params is not None else None
            item.add_marker(pytest.mark.xdist_group(line or item.path.stem))


class Compiler:
    """The compiler of one CUDA line, in an environment of its own, called through a Python process there."""

    def __init__(self, line: str, python: Path) -> None:
        self.line = line
        self.python = python

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in that environment and return its result, or raise what it raised."""
        request = pickle.dumps((function.__module__, function.__qualname__, args, kwargs))
        done = subprocess.run(
            [self.python, str(ROOT / "tests" / "build" / "_remote.py")],
            input=request,
            stdout=subprocess.PIPE,
            env={**os.environ, "HATCH_CUDA_AOT_CACHE": "0"},
            check=True,
        )
        raised, result = pickle.loads(done.stdout)
        if raised:
            raise result
        return result


@pytest.fixture(scope="session", params=LINES)
def compiler(request: pytest.FixtureRequest) -> Compiler:
    """The compiler of each line in turn."""
    return make_compiler(request.config, request.param)


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of this very hatch-cuda-aot, for builds that fetch it."""
    return make_wheelhouse(tmp_path_factory.mktemp("wheelhouse"))


def make_compiler(config: pytest.Config, line: str) -> Compiler:
    wanted = requirements(line_named(line), Needs(linker=True, curand=True))
    own = [
        "click",
        *REQUIREMENTS,
        "hatchling",
        "itanium-demangler",
        "packaging",
        "platformdirs",
        "pyelftools",
        "rich",
        "watchfiles",
    ]
    text = "\n".join([*wanted, *own])
    assert config.cache is not None
    tag = f"{line}-{sys.implementation.cache_tag}"
    folder = Path(config.cache.mkdir(f"compiler-{tag}"))
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    complete = folder / "complete"
    with FileLock(folder.with_suffix(".lock")):  # tests run in several processes
        if not complete.is_file() or complete.read_text() != text:
            venv.create(folder, with_pip=True, clear=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted, *own], check=True)
            complete.write_text(text)
    return Compiler(line, python)
