"""The toolkit's headers are found without an entry in `include-dirs`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from hatch_cuda_aot import compile_source
from hatch_cuda_aot.project import Project
from tests.build.conftest import Compiler

PROGRAMS = {
    "cuda_fp16.h": "__global__ void k(__half* x) { x[0] = __hadd(x[1], x[2]); }",
    "cuda_bf16.h": "__global__ void k(__nv_bfloat16* x) { x[0] = __float2bfloat16(1.5f); }",
    "cub/block/block_reduce.cuh": (
        "__global__ void k(int* x) { using R = cub::BlockReduce<int, 32>; __shared__ R::TempStorage s; "
        "x[0] = R(s).Sum(x[threadIdx.x]); }"
    ),
    "cuda/std/limits": "__global__ void k(float* x) { x[0] = cuda::std::numeric_limits<float>::max(); }",
    "cuda/std/complex": "__global__ void k(cuda::std::complex<float>* x) { x[0] *= x[1]; }",
    "cuda/atomic": "__global__ void k(int* x) { cuda::atomic_ref<int> r(*x); r.fetch_add(1); }",
    "cooperative_groups.h": "__global__ void k() { cooperative_groups::this_thread_block().sync(); }",
    "mma.h": (
        "__global__ void k(const __half* x, float* y) { using namespace nvcuda::wmma; "
        "fragment<matrix_a, 16, 16, 16, __half, row_major> a; fragment<matrix_b, 16, 16, 16, __half, col_major> b; "
        "fragment<accumulator, 16, 16, 16, float> c; fill_fragment(c, 0.0f); load_matrix_sync(a, x, 16); "
        "load_matrix_sync(b, x, 16); mma_sync(c, a, b, c); store_matrix_sync(y, c, 16, mem_row_major); }"
    ),
    "curand_kernel.h": (
        "__global__ void k(float* x) { curandStatePhilox4_32_10_t s; curand_init(1, 2, 3, &s); x[0] = curand_uniform(&s); }"
    ),
}


@pytest.mark.parametrize("header", PROGRAMS)
def test_header_just_works(compiler: Compiler, header: str) -> None:
    """A kernel that includes the header compiles on every line."""
    source = compiler.call(compile_source, f"#include <{header}>\n{PROGRAMS[header]}\n", archs=["sm_80", "compute_80"])
    assert [kernel.name for kernel in source.kernels] == ["k"]


@pytest.mark.parametrize("header", ["curand_kernel.h", "cub/cub.cuh"])
def test_wheels_that_a_header_needs(tmp_path: Path, header: str) -> None:
    """A build that includes cuRAND's device headers, through a header of the project, requires their wheel; others do not."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "pkg"\nversion = "1"\n'
        '[tool.hatch.build.targets.wheel]\npackages = ["pkg"]\n[tool.hatch.build.targets.wheel.hooks.cuda-aot]\n'
        '[tool.cuda-aot]\nsources = ["pkg/*.cu"]\n'
    )
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.cu").write_text('#include "own.cuh"\n')
    (tmp_path / "pkg" / "own.cuh").write_text(f"#include <{header}>\n")
    found = Project(WheelBuilder(str(tmp_path))).requirements()
    assert ("nvidia-curand-cu12==10.3.10.*" in found) == header.startswith("curand")
    assert "nvidia-cuda-nvrtc-cu12==12.9.*" in found
    assert not any("nvjitlink" in requirement for requirement in found)


def test_listed_headers_go_into_the_sdist(tmp_path: Path) -> None:
    """What `headers` lists, and what that includes, belongs to the files that a build reads, so sdists carry it."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "pkg"\nversion = "1"\n'
        '[tool.hatch.build.targets.wheel]\npackages = ["pkg"]\n[tool.hatch.build.targets.wheel.hooks.cuda-aot]\n'
        '[tool.cuda-aot]\nsources = ["pkg/*.cu"]\nheaders = ["pkg/config*.h"]\n'
    )
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.cu").write_text("#include CONFIG\n")
    (tmp_path / "pkg" / "config_1.h").write_text('#include "deep.h"\n')
    (tmp_path / "pkg" / "deep.h").write_text("")
    (tmp_path / "pkg" / "other.h").write_text("")
    project = Project(WheelBuilder(str(tmp_path)))
    assert project.sources(project.config()) == ["pkg/a.cu", "pkg/config_1.h", "pkg/deep.h"]
