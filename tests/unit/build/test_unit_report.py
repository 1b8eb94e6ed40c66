"""Sentences about a build."""

from __future__ import annotations

import dataclasses

import pytest

from hatch_cuda_aot.build import BuildResult
from hatch_cuda_aot.report import count_warnings, format_seconds, format_size, summarise
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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1:00 min"),
        (125, "2:05 min"),
        (3725, "1:02 h"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    """Times are as precise as people need them."""
    assert format_seconds(seconds) == text


def result(kernels: int, images: int, hits: int = 0) -> BuildResult:
    """Return the result of a build of one module: cubins of 1,000 bytes, and PTX of 20,000 as the last image."""
    front = Arch(75, virtual=True)
    made = [Image(Arch(75 + number), front, bytes(1000), 12000, None, {}) for number in range(images - 1)]
    module = ModuleResult(
        "k",
        tuple(Kernel(f"k{number}", f"k{number}", ()) for number in range(kernels)),
        {},
        (*made, Image(front, front, bytes(20_000), 12000, None, {})),
        (),
    )
    return BuildResult((module,), Toolchain("12.9", "", "", "", "", (), ()), 10, hits)


def test_summary() -> None:
    """One line tells kernels, images, bytes of each kind and of all files, hits and time; warnings where there were any."""
    files = {"a": bytes(1_500_000), "b": bytes(1500)}
    assert summarise(result(2, 3), files, 0, 12.3) == (
        "built 2 kernels in 3 images; cubins 2 kB, PTX 20 kB, in all 1.5 MB; 0 of 10 results from the cache; 12 s"
    )
    assert summarise(result(1, 1, hits=7), files, 1, 0.3) == (
        "built 1 kernel in 1 image; cubins 0 kB, PTX 20 kB, in all 1.5 MB; 7 of 10 results from the cache; "
        "1 compiler warning (shown with -v); 0.3 s"
    )
    assert "; 12 compiler warnings (shown with -v); " in summarise(result(2, 3), files, 12, 1.0)


def test_summary_without_a_cache() -> None:
    """Where a part of the compiler has no exact version, it is said that nothing was kept."""
    one = result(1, 1)
    unknown = dataclasses.replace(one, toolchain=dataclasses.replace(one.toolchain, unknown=("NVRTC", "cuda.bindings")))
    assert "; nothing kept in the cache, as the exact version of NVRTC, cuda.bindings is not known; " in summarise(
        unknown, {}, 0, 1.0
    )
