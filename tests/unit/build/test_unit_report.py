"""Sentences about a build."""

from __future__ import annotations

import dataclasses

import pytest

from hatch_cuda_aot.build import BuildResult
from hatch_cuda_aot.report import count_warnings, format_size, summarise
from hatch_cuda_aot.results import Image, Kernel, ModuleResult
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.toolchain import Toolchain

#: What NVRTC 12.9, NVRTC 13.5 and ptxas 13.5 wrote.
LOG = """\
/venv/cub/util_type.cuh(930): warning #1444-D: member "CATEGORY" was declared deprecated ("Use <cuda/std/type_traits>")
        IS_SMALL = (Traits<S>::CATEGORY == UNSIGNED_INTEGER)
                                ^
          detected during instantiation of "void sum<T,B,Q>(T *)"

Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"

nvrtc: warning: "--ftz(-ftz)=false" followed by "--ftz(-ftz)=true"
a.cu(27): warning #177-D: function "<unnamed>::hiddenk" was declared but never referenced
a.cu(28): warning: variable "x" is unused
ptxas warning : Stack size for entry function 'stacky' cannot be statically determined
a.cu(3): error: expected a ";"
"""


def test_count_warnings() -> None:
    """Each warning counts once, of every program; remarks, errors and the word elsewhere do not."""
    assert count_warnings(LOG) == 5
    assert count_warnings("") == 0


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 kB"), (999, "1 kB"), (12_345, "12 kB"), (999_499, "999 kB"), (1_000_000, "1.0 MB")]
)
def test_format_size(size: int, text: str) -> None:
    """Sizes are in kB, from a million bytes in MB."""
    assert format_size(size) == text


def result(kernels: int, images: int, hits: int = 0) -> BuildResult:
    """Return the result of a build of one module."""
    module = ModuleResult(
        "k",
        tuple(Kernel(f"k{number}", f"k{number}", ()) for number in range(kernels)),
        {},
        tuple(Image(Arch(75 + number), Arch(75, virtual=True), b"", 12000, None, {}) for number in range(images)),
        (),
    )
    return BuildResult((module,), Toolchain("12.9", "", "", "", "", (), ()), 10, hits)


def test_summary() -> None:
    """One line tells kernels, images and bytes; hits of the cache and warnings where there were any."""
    files = {"a": bytes(1500), "b": bytes(1500)}
    assert summarise(result(2, 3), files, 0) == "built 2 kernels in 3 images, 3 kB"
    assert summarise(result(1, 1), files, 0) == "built 1 kernel in 1 image, 3 kB"
    assert summarise(result(2, 3, hits=7), files, 1) == (
        "built 2 kernels in 3 images, 3 kB; 7 of 10 results from the cache; 1 compiler warning (shown with -v)"
    )
    assert summarise(result(2, 3), files, 12).endswith("; 12 compiler warnings (shown with -v)")


def test_summary_without_a_cache() -> None:
    """Where a part of the compiler has no exact version, it is said that nothing was kept."""
    one = result(1, 1)
    unknown = dataclasses.replace(one, toolchain=dataclasses.replace(one.toolchain, unknown=("NVRTC", "cuda.bindings")))
    assert summarise(unknown, {}, 0).endswith(
        "; nothing kept in the cache, as the exact version of NVRTC, cuda.bindings is not known"
    )
