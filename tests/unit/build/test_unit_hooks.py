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
