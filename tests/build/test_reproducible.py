"""The same tree gives the same bytes, wherever it lies and however it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.build import _functions as remote
from tests.build.conftest import Compiler

SOURCE = """\
#include <cuda/std/cassert>
#include "own.cuh"
namespace { __device__ int hidden; }
extern "C" __global__ void k(const char** x, float* y) { *x = __FILE__; assert(y); y[0] = own(y[1]) + hidden; }
template <class T> __global__ void t(T* x) { own_file(x); }
"""

HEADER = """\
#pragma once
#include <cassert>
inline __device__ float own(float x) { assert(x > 0); return x / 3; }
template <class T> __device__ void own_file(T* x) { *x = *__FILE__; }
"""


@pytest.mark.parametrize("settings", [{}, {"lineinfo": True}], ids=str)
@pytest.mark.parametrize("linked", [False, True])
def test_same_bytes_in_any_folder(
    compiler: Compiler, tmp_path: Path, settings: dict[str, Any], *, linked: bool
) -> None:
    """Cubins and PTX repeat in another folder, with another number of workers, line numbers and assertions included."""
    results = []
    for number, folder in enumerate((tmp_path / "one", tmp_path / "quite" / "another")):
        (folder / "pkg" / "device").mkdir(parents=True)
        (folder / "pkg" / "a.cu").write_text(SOURCE)
        (folder / "pkg" / "device" / "own.cuh").write_text(HEADER.replace("#include <cassert>\n", ""))
        (folder / "pkg" / "b.cu").write_text('extern "C" __global__ void other() {}\n')
        module = {"name": "m", "sources": ["pkg/*.cu"] if linked else ["pkg/a.cu"], "kernels": ["t<char>"]}
        table = {
            "modules": [module],
            "include-dirs": ["pkg/device"],
            "archs": ["sm_80", "sm_90a", "sm_120", "compute_80"],
            "cuda": compiler.line,
            **settings,
        }
        results.append(compiler.call(remote.build, folder, table, "pkg", jobs=1 + number))
    assert results[0] == results[1]
    (module_result,) = results[0]
    for image in module_result.images:
        assert str(tmp_path).encode() not in image.data
        assert b"/tmp/" not in image.data
    if settings:
        assert b".debug_line" in module_result.images[0].data
        assert b'"pkg/a.cu"' in module_result.images[-1].data
