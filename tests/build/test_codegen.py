"""The images are those that NVIDIA's own tools make, without the toolkit's left-overs and with all that is the project's."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from hatch_cuda_aot import compile_source
from hatch_cuda_aot.api import CompiledSource
from hatch_cuda_aot.archs import parse_spelling
from hatch_cuda_aot.compile.ptx import is_toolkit_symbol, parse
from hatch_cuda_aot.errors import ConfigError
from hatch_cuda_aot.results import ModuleResult
from hatch_cuda_aot.runtime.arch import Arch, runs_ptx
from hatch_cuda_aot.toolchain import line_named
from tests.build import _functions as remote
from tests.build.conftest import EXAMPLE, Compiler

SMALL = textwrap.dedent("""\
    struct Pair { float a; int b; };
    __constant__ Pair pair;
    __constant__ float table[4] = {1, 2, 3, 4};
    static __constant__ int hidden_constant = 3;
    static __device__ int hidden;
    namespace { __device__ double anonymous; __constant__ int anonymous_constant; }
    namespace mine { __device__ int unused; }
    __device__ int counter;

    extern "C" __global__ void mixed(float* x, const float* __restrict__ y, int n) {
        x[0] = y[1] / x[2] + sqrtf(x[3]) * y[4] + table[n] + pair.a;
        x[5] = x[0] * x[1] + x[2];
        switch (n) { case 0: x[6] = 1; break; case 1: x[7] = 5; break; case 2: x[9] = 7; break; default: x[8] = 2; }
    }
    __global__ void aliased(float* x, float* y) { x[0] = y[0]; x[1] = y[0] + y[1]; x[2] = y[1]; }
    namespace mine {
    __global__ void scale(double* x, double a) { x[threadIdx.x] *= a + hidden_constant + anonymous_constant; }
    }
""")

OWN_VARIABLES = {
    "pair",
    "table",
    "hidden_constant",
    "hidden",
    "anonymous",
    "anonymous_constant",
    "mine::unused",
    "counter",
}


def test_example_is_what_nvrtc_makes(compiler: Compiler) -> None:
    """Every kernel of the example, for every architecture: machine code bit-identical to NVRTC's own for that sm_."""
    table = {**remote.read_table(EXAMPLE / "pyproject.toml"), "cuda": compiler.line}
    modules: tuple[ModuleResult, ...] = compiler.call(remote.build, EXAMPLE, table, "src/example_pkg")
    plan = compiler.call(remote.make_plan, EXAMPLE, table, "src/example_pkg")
    expected = compiler.call(remote.nvrtc_cubins, plan)
    compared = 0
    for module in modules:
        for image in module.images:
            if image.kind == "ptx":
                continue
            own, nvrtc = remote.code_of(image.data), remote.code_of(expected[module.name, str(image.arch)])
            assert own == nvrtc, f"{module.name} for {image.arch}"
            assert len(own) == len(module.kernels)
            compared += len(own)
    assert compared == 9 * 8


@pytest.mark.parametrize(
    ("before", "defines", "limit"),
    [("", {}, 10), ("#define _CCCL_META_UNROLL_LIMIT 12", {}, 12), ("", {"_CCCL_META_UNROLL_LIMIT": 14}, 14)],
)
def test_cccl_unrolls_as_for_nvcc(compiler: Compiler, before: str, defines: dict[str, int], limit: int) -> None:
    """Its own default for NVRTC makes the front end twice as slow for the same code; a project can choose it."""
    text = f"{before}\n" + textwrap.dedent(f"""\
        #include <cuda/std/__type_traits/type_list.h>
        #define JOINED(a, b) a##b
        static_assert(JOINED(_CCCL_META_UNROLL_, LIMIT) == {limit}, "");
        __global__ void k() {{}}
    """)
    source: CompiledSource = compiler.call(compile_source, text, archs=["sm_90"], defines=defines)
    assert source.kernels


def test_no_unused_constant_of_the_toolkit(compiler: Compiler) -> None:
    """What is left of the toolkit's constants is used by some kernel, where NVRTC's own cubin has hundreds of others."""
    table = {**remote.read_table(EXAMPLE / "pyproject.toml"), "cuda": compiler.line, "archs": ["sm_90", "compute_90"]}
    modules: tuple[ModuleResult, ...] = compiler.call(remote.build, EXAMPLE, table, "src/example_pkg")
    plan = compiler.call(remote.make_plan, EXAMPLE, table, "src/example_pkg")
    unpruned = {job.front.module: compiler.call(remote.unpruned_ptx, job.front) for job in plan.jobs}
    assert sum(map(is_toolkit_symbol, parse(unpruned["reduce"]).variables)) > 400
    for module in modules:
        cubin, ptx = module.images
        text = ptx.data.decode()
        for name in remote.objects_of(cubin.data):
            assert not is_toolkit_symbol(name) or text.count(name) > 1, f"{name} in {module.name}"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"options": ["--use_fast_math"]},
        {"options": ["-ftz=true", "-prec-div=false", "-prec-sqrt=false"]},
        {"options": ["--fmad=false"]},
        {"options": ["--maxrregcount=24"]},
        {"options": ["--restrict"]},
        {"options": ["-Xptxas=-O1,-dlcm=cg"]},
        {"options": ["--extra-device-vectorization"]},
        {"options": ["--device-stack-protector=true"]},
        {"lineinfo": True},
        {"std": "c++20"},
    ],
    ids=str,
)
def test_options_as_nvrtc_takes_them(compiler: Compiler, settings: dict[str, Any], tmp_path: Path) -> None:
    """Each option has the effect on machine code that it has in NVRTC."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "small.cu").write_text(SMALL)
    table = {"sources": ["small.cu"], "archs": ["sm_80", "sm_120"], "cuda": compiler.line, **settings}
    (module,) = compiler.call(remote.build, tmp_path, table, "pkg")
    expected = compiler.call(remote.nvrtc_cubins, compiler.call(remote.make_plan, tmp_path, table, "pkg"))
    for image in module.images:
        assert remote.code_of(image.data) == remote.code_of(expected["small", str(image.arch)]), image.arch


@pytest.mark.parametrize(
    "settings",
    [
        {"options": ["--use_fast_math"]},
        {"options": ["--fmad=false"]},
        {"options": ["--maxrregcount=16"]},
        {"options": ["-prec-div=false"]},
        {"options": ["--restrict"]},
        {"debug": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("sources", [1, 2])
def test_options_have_an_effect(compiler: Compiler, settings: dict[str, Any], sources: int, tmp_path: Path) -> None:
    """Each option changes the machine code of this source; in two files that are device-linked, it does or is refused."""
    (tmp_path / "pkg").mkdir()
    if sources == 1:
        (tmp_path / "a.cu").write_text(SMALL)
        files = ["a.cu"]
    else:
        (tmp_path / "a.cu").write_text("__device__ float helper(float);\n" + SMALL.replace("sqrtf", "helper"))
        (tmp_path / "b.cu").write_text("__device__ float helper(float x) { return sqrtf(x) / 3; }\n")
        files = ["a.cu", "b.cu"]
    base = {"modules": [{"name": "m", "sources": files}], "archs": ["sm_80"], "cuda": compiler.line}
    (plain,) = compiler.call(remote.build, tmp_path, base, "pkg")
    if sources == 2 and settings.get("options") == ["--restrict"]:
        with pytest.raises(ConfigError, match="has no effect where several sources are device-linked"):
            compiler.call(remote.build, tmp_path, {**base, **settings}, "pkg")
        return
    (changed,) = compiler.call(remote.build, tmp_path, {**base, **settings}, "pkg")
    assert remote.code_of(plain.images[0].data) != remote.code_of(changed.images[0].data)


def test_variables_of_the_project_survive(compiler: Compiler) -> None:
    """Every variable of the source is in the cubin and in the manifest, used or not, static and anonymous ones too."""
    source: CompiledSource = compiler.call(compile_source, SMALL, archs=["sm_90", "compute_90"])
    assert set(source.variables) == OWN_VARIABLES
    symbols = {variable.symbol for variable in source.variables.values()}
    assert symbols <= remote.objects_of(source.image("sm_90").data)
    assert set(parse(source.image("compute_90").data.decode()).variables) == symbols
    assert source.variables["table"].size == 16
    assert source.variables["pair"].space == "const"


def test_prune_false_and_debug_keep_everything(compiler: Compiler) -> None:
    """Without pruning, and in a debug build, the toolkit's constants stay."""
    text = "#include <cuda/std/limits>\n" + SMALL
    for settings in ({"prune": False}, {"debug": True}):
        source: CompiledSource = compiler.call(compile_source, text, archs=["sm_90"], **settings)
        assert sum(map(is_toolkit_symbol, remote.objects_of(source.images[0].data))) > 100
    source = compiler.call(compile_source, text, archs=["sm_90"])
    assert sum(map(is_toolkit_symbol, remote.objects_of(source.images[0].data))) == 0


def test_a_toolkit_namespace_that_the_project_opens_is_kept(compiler: Compiler) -> None:
    """A variable that the project puts into a namespace of the toolkit is the project's."""
    text = "namespace cub { __device__ int mine; }\n" + SMALL
    source: CompiledSource = compiler.call(compile_source, text, archs=["sm_90"])
    assert "_ZN3cub4mineE" in remote.objects_of(source.images[0].data)


def linked_project(folder: Path) -> list[str]:
    (folder / "pkg").mkdir()
    (folder / "a.cu").write_text(
        textwrap.dedent("""\
            #include <cub/block/block_reduce.cuh>
            struct Pair { float a; int b; };
            __constant__ Pair pair;
            __constant__ float table[4] = {1, 2, 3, 4};
            static __constant__ int hidden_constant = 3;
            static __device__ int hidden;
            namespace { __device__ int anonymous = 5; }
            __device__ float helper(float x);
            extern __device__ int counter;
            template <class T> __global__ void sum(const T* x, T* y, int n) {
                using Reduce = cub::BlockReduce<T, 128>;
                __shared__ typename Reduce::TempStorage storage;
                T total = Reduce(storage).Sum(x[threadIdx.x]);
                if (threadIdx.x == 0) *y = helper(total) * pair.a + table[n] + hidden_constant + hidden + anonymous;
            }
            extern "C" __global__ void count(float* x) { x[0] = helper(x[1] / x[2]) + pair.a; counter++; }
        """)
    )
    (folder / "b.cu").write_text(
        textwrap.dedent("""\
            __device__ int counter;
            __device__ int unused;
            static __device__ int hidden;
            namespace { __device__ int anonymous; }
            __device__ __noinline__ float helper(float x) { return x * 2.5f + 1.0f / x + hidden + anonymous; }
            __global__ void scale(float* x, int n) { x[n] = helper(x[n]); }
            __global__ void scale_all(float* x, int n) { x[n] = helper(x[n]) + 1; }
        """)
    )
    return ["a.cu", "b.cu"]


def test_several_sources_are_device_linked(compiler: Compiler, tmp_path: Path) -> None:
    """Machine code is nvJitLink's own, all kernels and variables of both files are there, and PTX exists as well."""
    modules = [{"name": "linked", "sources": linked_project(tmp_path), "kernels": ["sum<float>"]}]
    table = {"modules": modules, "archs": ["sm_90", "sm_120", "compute_90"], "cuda": compiler.line}
    (module,) = compiler.call(remote.build, tmp_path, table, "pkg")
    assert [kernel.name for kernel in module.kernels] == ["count", "scale", "scale_all", "sum<float>"]
    named = {"pair", "table", "hidden_constant", "counter", "unused"}
    assert named <= set(module.variables)
    assert sum("hidden" in name for name in module.variables) == 3
    assert sum("anonymous" in name for name in module.variables) == 2
    (unpruned,) = compiler.call(remote.build, tmp_path, {**table, "prune": False}, "pkg")
    plan = compiler.call(remote.make_plan, tmp_path, table, "pkg")
    for job, image, whole in zip(plan.jobs[:2], module.images, unpruned.images, strict=False):
        code = remote.code_of(image.data)
        reference = remote.code_of(compiler.call(remote.nvjitlink_cubin, job.front, str(image.arch), ()))
        assert remote.code_of(whole.data) == reference
        # The address of a __device__ variable is read from a table, in which the toolkit's constants have places too:
        # its offset, in bytes 5 and 6 of an instruction of 16, is all that pruning changes.
        assert {name: _without_offsets(text) for name, text in code.items()} == {
            name: _without_offsets(text) for name, text in reference.items()
        }
        present = remote.objects_of(image.data)
        assert {variable.symbol for variable in module.variables.values()} <= present
        assert not any(is_toolkit_symbol(name) for name in present)
    ptx = module.images[2].data.decode()
    assert parse(ptx).kernels.keys() == {kernel.symbol for kernel in module.kernels}


def _without_offsets(code: bytes) -> bytes:
    return bytes(byte for position, byte in enumerate(code) if position % 16 not in (5, 6))


def test_family_specific_code_in_a_linked_module(compiler: Compiler, tmp_path: Path) -> None:
    """A family-specific architecture keeps its .target through the linker, which 12.9 itself forgets."""
    modules = [{"name": "linked", "sources": linked_project(tmp_path), "kernels": ["sum<float>"]}]
    table = {"modules": modules, "archs": ["sm_100f", "compute_100f"], "cuda": compiler.line}
    (module,) = compiler.call(remote.build, tmp_path, table, "pkg")
    cubin, ptx = module.images
    assert parse(ptx.data.decode()).target == "sm_100f"
    assert len(remote.code_of(cubin.data)) == 4


def test_options_do_not_leak_from_one_module_to_the_next(compiler: Compiler, tmp_path: Path) -> None:
    """NVRTC keeps --restrict in force for later compilations of a process; modules are compiled as if alone."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "a.cu").write_text(SMALL)
    (tmp_path / "b.cu").write_text(SMALL)
    base = {"archs": ["sm_80"], "cuda": compiler.line}
    # Modules are compiled in the order of their options, so that these two meet in the one worker in this order.
    restricted = {"name": "a", "sources": ["a.cu"], "options": ["--restrict"]}
    other = {"name": "b", "sources": ["b.cu"], "options": ["--use_fast_math"]}
    (alone,) = compiler.call(remote.build, tmp_path, {**base, "modules": [other]}, "pkg", jobs=1)
    (_, after) = compiler.call(remote.build, tmp_path, {**base, "modules": [restricted, other]}, "pkg", jobs=1)
    assert after == alone


def test_split_front_end(compiler: Compiler) -> None:
    """sm_86@compute_80 compiles the source for 8.0 and assembles it for 8.6, as nvcc's -gencode does."""
    text = 'extern "C" __global__ void k(int* x) { *x = __CUDA_ARCH__; }'
    source: CompiledSource = compiler.call(compile_source, text, archs=["sm_86@compute_80", "sm_89"])
    usual: CompiledSource = compiler.call(compile_source, text, archs=["sm_86", "sm_80"])
    assert str(source.image("sm_86").front) == "compute_80"
    assert remote.code_of(source.image("sm_86").data) != remote.code_of(usual.image("sm_86").data)


def test_the_table_of_lines(compiler: Compiler) -> None:
    """What the table says of a line is what its NVRTC says."""
    ccs, specific = compiler.call(remote.supported)
    line = line_named(compiler.line)
    assert line.ccs == ccs
    assert line.specific == specific


@pytest.mark.parametrize(
    "spelling", ["compute_75", "compute_89", "compute_90a", "compute_100f", "compute_103f", "compute_120f"]
)
def test_ptx_rules_are_the_assemblers(compiler: Compiler, spelling: str) -> None:
    """`runs_ptx` agrees with ptxas on every architecture of the line."""
    targets = parse_spelling(spelling)
    assert not isinstance(targets, str)
    (target,) = targets
    line = line_named(compiler.line)
    version = {"12.9": "8.8", "13.5": "9.5"}[compiler.line]
    text = f".version {version}\n.target {target.front.as_real}\n.address_size 64\n.visible .entry k()\n{{\nret;\n}}\n"
    archs = {str(Arch(cc)): cc for cc in line.ccs}
    answers = compiler.call(remote.assembles, text, sorted(archs), compiler.line)
    expected = {name: runs_ptx(target.front, cc) is None for name, cc in archs.items()}
    if target.front.suffix == "a":  # ptxas takes it for sm_90a only, which the plain names do not ask for
        expected[str(target.front.as_real).rstrip("a")] = False
    assert answers == expected
