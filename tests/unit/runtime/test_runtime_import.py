"""The copied runtime in a process of its own: what its import needs, and what it says where CUDA is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import hatch_cuda_aot.runtime

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import FakePackage

RUNTIME = Path(hatch_cuda_aot.runtime.__file__).parent


@pytest.fixture
def run(package: FakePackage, tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs code next to a package ``demo`` with one kernel, and returns what it printed."""
    package.add("axpy", {"axpy<float>": "axpy_f"}, {"sm_90": 12000}).write()
    for source in RUNTIME.glob("*.py"):
        shutil.copy(source, package.folder)
    (tmp_path / "demo" / "__init__.py").touch()

    def run_code(code: str, *options: str) -> str:
        prelude = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        result = subprocess.run(
            [sys.executable, *options, "-c", prelude + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        return result.stdout

    return run_code


def test_import_needs_the_standard_library_alone(run: Callable[..., str]) -> None:
    """With cuda and numpy blocked the import works, and it brings in nothing from outside the standard library."""
    output = run(
        """
        for name in ("cuda", "numpy", "platformdirs"):
            sys.modules[name] = None
        before = set(sys.modules)
        import demo._cuda_aot
        from demo._cuda_aot import *
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(sorted(new - set(sys.stdlib_module_names)), kernel_names())
        """
    )
    assert output == "['demo'] ['axpy<float>']\n"


def test_import_is_light(run: Callable[..., str]) -> None:
    """The import leaves the slow modules of the standard library alone."""
    output = run(
        """
        before = set(sys.modules)
        import demo._cuda_aot
        slow = {"dataclasses", "hashlib", "json", "logging", "re", "typing", "difflib", "threading", "ctypes"}
        print(sorted((set(sys.modules) - before) & slow))
        """,
        "-I",
    )
    assert output == "[]\n"


def test_public_names(run: Callable[..., str]) -> None:
    """`__all__` is what the module offers, and each function explains itself."""
    output = run(
        """
        import demo._cuda_aot as kernels
        print(all(getattr(kernels, name).__doc__ for name in kernels.__all__), *sorted(kernels.__all__))
        """
    )
    assert output.split() == [
        "True",
        "CorruptImageError",
        "CudaAotError",
        "CudaUnavailableError",
        "KernelNotFoundError",
        "ManifestError",
        "NoCompatibleImageError",
        "VariableNotFoundError",
        "explain",
        "get_global",
        "get_handle",
        "get_kernel",
        "kernel_info",
        "kernel_names",
        "preload",
    ]


def test_no_submodule_hides_a_public_name() -> None:
    """Importing a submodule binds its name in the package, where a function of that name would be lost."""
    assert not {path.stem for path in RUNTIME.glob("*.py")} & set(hatch_cuda_aot.runtime.__all__)


def test_no_cuda_package(run: Callable[..., str]) -> None:
    """Without cuda.bindings the call prints the commands for the user and the lines for the author."""
    output = run(
        """
        sys.modules["cuda"] = None
        import demo._cuda_aot as kernels
        try:
            kernels.get_kernel("axpy<float>")
        except kernels.CudaUnavailableError as error:
            print(error.reason, error)
        """
    )
    assert output.startswith("bindings-missing demo needs cuda.bindings to load its kernels (")
    assert 'pip install "cuda-bindings" "cuda-core"' in output
    assert 'dependencies = ["cuda-core", "cuda-bindings", "platformdirs"]' in output


def test_no_driver(run: Callable[..., str]) -> None:
    """Without an NVIDIA driver the call says that it is the driver which is missing."""
    bindings = pytest.importorskip("cuda.bindings.driver")
    try:
        bindings.cuInit(0)
    except RuntimeError:
        pass
    else:
        pytest.skip("there is a driver")
    output = run(
        """
        import demo._cuda_aot as kernels
        for call in (kernels.get_kernel, kernels.get_handle, kernels.explain):
            try:
                call("axpy<float>")
            except kernels.CudaUnavailableError as error:
                print(error.reason, error)
        """
    )
    assert output.count("driver-missing no NVIDIA driver was found") == 3


def test_source_tree_has_no_kernels() -> None:
    """The runtime imported from hatch_cuda_aot itself says what is missing."""
    with pytest.raises(hatch_cuda_aot.runtime.ManifestError, match=r"hooks\.cuda-aot"):
        hatch_cuda_aot.runtime.kernel_names()


def test_zip_archive(run: Callable[..., str], tmp_path: Path) -> None:
    """From a zip archive the import works, and the first call says that files are needed."""
    archive = shutil.make_archive(str(tmp_path / "all"), "zip", tmp_path, "demo")
    output = run(
        f"""
        sys.path.insert(0, {archive!r})
        import demo._cuda_aot as kernels
        try:
            kernels.kernel_names()
        except kernels.ManifestError as error:
            print(error)
        """
    )
    assert "demo runs from a zip archive" in output


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_starts_anew(run: Callable[..., str]) -> None:
    """After a fork nothing of the parent's loader is used, not even a lock that another thread held."""
    output = run(
        """
        import os
        import demo._cuda_aot as kernels
        kernels.kernel_names()
        parent = kernels._loader()
        parent._once._guard.acquire()
        if os.fork() == 0:
            print(kernels._loader() is parent, kernels.kernel_names(), flush=True)
            os._exit(0)
        os.wait()
        """
    )
    assert output == "False ['axpy<float>']\n"
