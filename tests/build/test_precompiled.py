"""Precompiled headers make no difference but in time."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.build import _functions as remote
from tests.build.conftest import Compiler

HEADER = textwrap.dedent("""\
    #pragma once
    #include <cuda/std/array>
    #include <cub/warp/warp_reduce.cuh>
    #include <cuda_fp16.h>
    #define WIDTH {width}
    namespace {{ __device__ int hidden; __constant__ float table[4] = {{1, 2, 3, 4}}; __device__ float helper(float x); }}
    static __device__ int counter = 3;
    {warning}
    inline __device__ void say(int x) {{ printf("%s:%d %d\\n", __FILE__, __LINE__, x); }}
    namespace {{ __device__ float helper(float x) {{ return x * table[hidden] + WIDTH; }} }}
    template <class T> __global__ void scale(T* x, T a) {{ x[threadIdx.x] = T(helper(float(x[0] * a))); }}
""")
SOURCE = textwrap.dedent("""\
    // Number {number}
    #include "common.cuh"

    __global__ void k{number}(float* x, __half* y, int n) {{
        using Reduce = cub::WarpReduce<float>;
        __shared__ typename Reduce::TempStorage storage;
        cuda::std::array<float, {number} + 1> all{{x[1], x[2]}};
        x[0] = Reduce(storage).Sum(helper(x[threadIdx.x] + all[n])) + counter++ + hidden + __half2float(y[n]);
        say(n + {number} + __LINE__);
    }}
""")


def write(root: Path, *, warning: str = "") -> dict[str, Any]:
    """Write two folders of sources, each with a header of the same name; return the configuration."""
    (root / "pkg").mkdir(parents=True)
    for folder, width in (("a", 32), ("b", 64)):
        (root / folder).mkdir()
        (root / folder / "common.cuh").write_text(HEADER.format(width=width, warning=warning))
        for number in range(1, 4):
            (root / folder / f"{folder}{number}.cu").write_text(SOURCE.format(number=number))
    modules = [
        {"name": f"{folder}{number}", "sources": [f"{folder}/{folder}{number}.cu"], "kernels": ["scale<float>"]}
        for folder in "ab"
        for number in range(1, 4)
    ]
    return {"modules": modules, "archs": ["sm_80", "sm_90", "compute_90"]}


def test_the_same_images(compiler: Compiler, tmp_path: Path) -> None:
    """Images, kernels, variables and warnings are what they are without: byte for byte."""
    table = {**write(tmp_path), "cuda": compiler.line}
    plain, warnings, none = compiler.call(remote.build_alike, tmp_path, table, "pkg", precompile=False)
    modules, again, made = compiler.call(remote.build_alike, tmp_path, table, "pkg", precompile=True)
    assert (none, made) == (0, 4)  # two headers, two architectures
    assert again == warnings
    assert modules == plain


@pytest.mark.parametrize("keys", [{"lineinfo": True}, {"debug": True}])
def test_where_folders_show(compiler: Compiler, tmp_path: Path, keys: dict[str, Any]) -> None:
    """Line numbers name the folder of a compilation: nothing is precompiled with them."""
    table = {**write(tmp_path), "cuda": compiler.line, "archs": ["sm_90"], **keys}
    *_, made = compiler.call(remote.build_alike, tmp_path, table, "pkg", precompile=True)
    assert made == 0


def test_warnings_of_headers(compiler: Compiler, tmp_path: Path) -> None:
    """What NVRTC says of a header it says for each source, whichever was compiled first."""
    warning = "inline __device__ int odd(int n) { int unused; return n; }"
    table = {**write(tmp_path, warning=warning), "cuda": compiler.line, "archs": ["sm_90"]}
    plain, warnings, _ = compiler.call(remote.build_alike, tmp_path, table, "pkg", precompile=False)
    assert sum("unused" in line for line in warnings) == 6
    modules, again, made = compiler.call(remote.build_alike, tmp_path, table, "pkg", precompile=True)
    assert made >= 2  # and then not used
    assert again == warnings
    assert modules == plain
