"""Importing the plugin costs nothing: every project's hatchling imports it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

#: What the hook's module may import of ours.
LIGHT = {"hatch_cuda_aot", "hatch_cuda_aot._version", "hatch_cuda_aot.hooks"}


def imported_by(statement: str) -> set[str]:
    """Return the modules that a statement imports beyond those of hatchling's plugin interface, in a fresh process."""
    program = (
        f"import json, sys; sys.path.insert(0, {str(REPOSITORY)!r}); import hatchling.plugin; before = set(sys.modules)\n"
        f"{statement}\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_hooks() -> None:
    """The entry point imports nothing but itself: an ImportError in it would break other projects' builds."""
    assert imported_by("import hatch_cuda_aot.hooks") == LIGHT


def test_importing_the_package() -> None:
    """The package itself is as light, and still gives `compile_source` when it is asked for."""
    assert imported_by("import hatch_cuda_aot; hatch_cuda_aot.__version__") == LIGHT - {"hatch_cuda_aot.hooks"}
    assert "hatch_cuda_aot.api" in imported_by("from hatch_cuda_aot import compile_source")


def test_asking_for_the_hook() -> None:
    """Registering the hook loads its class, and neither the configuration nor what only the command line needs."""
    found = imported_by("from hatch_cuda_aot import hooks; hooks.hatch_register_build_hook()")
    assert "hatch_cuda_aot.plugin" in found
    heavy = {
        "hatch_cuda_aot.config",
        "hatch_cuda_aot.project",
        "click",
        "rich",
        "elftools",
        "itanium_demangler",
        "cuda",
    }
    assert found & heavy == set()


@pytest.mark.parametrize("module", ["build", "project", "cli", "api"])
def test_no_module_needs_cuda(module: str) -> None:
    """Nothing of ours imports a CUDA package, the demangler or the ELF reader before it is needed."""
    found = imported_by(f"import hatch_cuda_aot.{module}")
    assert [name for name in found if name.partition(".")[0] in ("cuda", "elftools", "itanium_demangler")] == []


def test_unknown_attribute() -> None:
    """A name that the package does not have is an AttributeError, as of any module."""
    import hatch_cuda_aot

    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = hatch_cuda_aot.nonsense


def test_asking_for_the_requirements() -> None:
    """What only a build needs is not imported where a frontend asks for the requirements, in a process of its own."""
    found = imported_by("import hatchling.builders.wheel; before |= set(sys.modules)\nimport hatch_cuda_aot.project")
    assert "hatch_cuda_aot.plan" in found
    late = {"ctypes", "difflib", "hatchling.builders.sdist", "packaging.requirements", "packaging.utils"}
    assert found & {*late, "hatch_cuda_aot.build", "hatch_cuda_aot.cache", "hatch_cuda_aot.compile.ptxas"} == set()


def test_a_build_that_finds_everything() -> None:
    """The processes that compile are not imported before there is something to compile."""
    found = imported_by("import hatch_cuda_aot.build, hatch_cuda_aot.compile.starter")
    processes = ("pool", "forkserver", "worker", "run", "backlog", "dask_pool")
    assert found & {f"hatch_cuda_aot.compile.{name}" for name in processes} == set()


def test_the_end_of_the_process(tmp_path: Path) -> None:
    """What was imported is left out of the last collection of garbage, and of no collection before."""
    program = (
        f"import atexit, gc, sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "from hatch_cuda_aot.plugin import CudaAotBuildHook\n"
        f"hook = CudaAotBuildHook({str(tmp_path)!r}, {{}}, None, None, '', 'wheel')\n"
        "hook._project()\nprint(gc.get_freeze_count() > 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
