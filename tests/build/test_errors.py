"""Bad input: each ends a real build with a message that names the place, the value, what is allowed and the next step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hatch_cuda_aot import compile_source
from hatch_cuda_aot.cache import Cache
from hatch_cuda_aot.errors import BuildError, CompileError, ResultError, UnsupportedArchError, WorkerCrashError
from tests.build import _functions as remote
from tests.build.conftest import Compiler

KERNEL = 'extern "C" __global__ void noop() {}\n'


def fails(compiler: Compiler, text: str, **arguments: object) -> BuildError:
    with pytest.raises(BuildError) as caught:
        compiler.call(compile_source, text, **{"archs": ["sm_80"], "name": "kernels/bad.cu", **arguments})
    return caught.value


def test_source_that_does_not_compile(compiler: Compiler) -> None:
    """File, line and NVRTC's own words for the first failing architecture, with a count of the others."""
    text = '__global__ void k() {\n    int x = "seven";\n}\n'
    error = fails(compiler, text, archs=["sm_80", "sm_90", "compute_75"])
    assert isinstance(error, CompileError)
    assert (error.module, error.arch, error.stage) == ("source", "compute_80", "NVRTC")
    lines = str(error).splitlines()
    assert lines[0] == "NVRTC cannot compile kernels/bad.cu (module 'source') for compute_80:"
    assert lines[1].startswith('  kernels/bad.cu(2): error: a value of type "const char')
    assert lines[-1] == "2 other jobs failed too: source for compute_75, source for compute_90"
    assert 'kernels/bad.cu(2): error: a value of type "const char' in error.log


@pytest.mark.parametrize("arch", ["sm_42", "compute_80a", "sm_90f", "sm_89@compute_42"])
def test_arch_that_the_compiler_lacks(compiler: Compiler, arch: str) -> None:
    """NVRTC itself says what it supports; the error names the architecture and what there is."""
    error = fails(compiler, KERNEL, archs=["sm_80", arch])
    assert isinstance(error, UnsupportedArchError)
    assert str(error).startswith(f"CUDA {compiler.line} cannot compile for {arch.rpartition('@')[2]}. It compiles ")


def test_name_expression_that_matches_nothing(compiler: Compiler) -> None:
    """The item of `kernels`, NVRTC's reason, and the kernels that there are; nothing of NVRTC's bookkeeping."""
    text = "template <class T> __global__ void axpy(T* x) { *x = 1; }\n"
    error = fails(compiler, text, kernels=["axpy<float>", "apxy< double >"])
    assert str(error) == (
        "`kernels` of module 'source': 'apxy< double >' matches no kernel in kernels/bad.cu for compute_80 "
        '(NVRTC: identifier "apxy" is undefined). Kernels in kernels/bad.cu: axpy. Write templates with their arguments, as '
        "in 'axpy<float>'; plain kernels are found by themselves, and overloads are addressed by their symbol"
    )


@pytest.mark.parametrize("expression", ["axpy", "helper", "&counter", "axpy<nothing>", "axpy<float"])
def test_name_expression_that_names_no_kernel(compiler: Compiler, expression: str) -> None:
    """A template without arguments, a device function, a variable: the message names the expression."""
    text = (
        "template <class T> __global__ void axpy(T* x) { *x = 1; }\n"
        "__device__ void helper() {}\n__device__ int counter;\n" + KERNEL
    )
    error = fails(compiler, text, kernels=[expression])
    assert f"{expression!r}" in str(error)
    assert "`kernels`" in str(error)
    assert "__nv_name_map" not in str(error)


def test_a_compile_error_is_not_blamed_on_expressions(compiler: Compiler) -> None:
    """Where the source itself is wrong, NVRTC's words on it are shown, without what follows from that for expressions."""
    text = "template <class T> __global__ void axpy(T* x) { *x = undefined_name; }\n"
    error = fails(compiler, text, kernels=["axpy<float>"])
    assert "kernels/bad.cu(1): error" in str(error)
    assert "__nv_name_map" not in str(error)


def test_missing_header(compiler: Compiler) -> None:
    """The search path is shown, and what to do."""
    error = fails(compiler, '#include "missing/header.cuh"\n' + KERNEL)
    assert 'cannot open source file "missing/header.cuh"' in str(error)
    last = str(error).splitlines()[-1]
    assert last.startswith("searched for 'missing/header.cuh': the including file's folder, .cuda/include, .cuda/cccl")
    assert "add its folder to `include-dirs`" in last


def test_module_without_kernels(compiler: Compiler) -> None:
    """A file that only holds device functions is an error that says what to do with it."""
    error = fails(compiler, "__device__ int twice(int x) { return 2 * x; }\n")
    assert isinstance(error, ResultError)
    assert "it defines no kernel. If it holds only device functions, rename it to .cuh" in str(error)


def test_signature_that_depends_on_the_architecture(compiler: Compiler) -> None:
    """One kernel cannot take other parameters on other architectures: launches could not be checked."""
    text = textwrap.dedent("""\
        #if __CUDA_ARCH__ >= 900
        extern "C" __global__ void k(double x) {}
        #else
        extern "C" __global__ void k(float x) {}
        #endif
    """)
    error = fails(compiler, text, archs=["sm_80", "sm_90"])
    assert "for compute_90 the kernel 'k' has other parameters than for the architectures before" in str(error)


def test_a_kernel_may_exist_on_some_architectures_only(compiler: Compiler) -> None:
    """The manifest's images say which kernels they hold."""
    text = KERNEL + '#if __CUDA_ARCH__ >= 900\nextern "C" __global__ void newer() {}\n#endif\n'
    source = compiler.call(compile_source, text, archs=["sm_80", "sm_90"])
    assert [sorted(image.kernels) for image in source.images] == [["noop"], ["newer", "noop"]]


def test_undefined_function_in_a_linked_module(compiler: Compiler, tmp_path: Path) -> None:
    """nvJitLink's words, with module, sources and architecture."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "a.cu").write_text("__device__ int nowhere(int);\n__global__ void k(int* x) { *x = nowhere(*x); }\n")
    (tmp_path / "b.cu").write_text(KERNEL)
    table = {"modules": [{"name": "m", "sources": ["*.cu"]}], "archs": ["sm_80"], "cuda": compiler.line}
    with pytest.raises(CompileError) as caught:
        compiler.call(remote.build, tmp_path, table, "pkg")
    assert caught.value.stage in ("nvJitLink", "ptxas")
    assert "nowhere" in str(caught.value)
    assert "module 'm'" in str(caught.value)


CRASH = textwrap.dedent("""\
    #include <cub/block/block_reduce.cuh>
    template <int N> __device__ void reduce(const float* x, float* y) {
        using Reduce = cub::BlockReduce<float, N>;
        __shared__ typename Reduce::TempStorage storage;
        float total = Reduce(storage).Sum(x[threadIdx.x]);
        if (threadIdx.x == 0) *y = total;
    }
    extern "C" __global__ void r0(const float* x, float* y) { reduce<64>(x, y); }
    extern "C" __global__ void r1(const float* x, float* y) { reduce<128>(x, y); }
""")


def test_source_that_crashes_the_compiler(compiler: Compiler, tmp_path: Path) -> None:
    """The error names module, architecture and signal; what else was compiled is kept for the next build."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "good.cu").write_text(KERNEL)
    (tmp_path / "crash.cu").write_text(CRASH)
    table = {"sources": ["*.cu"], "archs": ["sm_80", "sm_90"], "cuda": compiler.line}
    with pytest.raises(WorkerCrashError) as caught:
        compiler.call(remote.build_cached, tmp_path, table, "pkg", tmp_path / "cache")
    error = caught.value
    assert (error.module, error.arch, error.stage, error.log) == ("crash", "sm_80", "ptxas", "SIGSEGV")
    assert str(error).startswith(
        "ptxas crashed on module 'crash' for sm_80, with SIGSEGV. This is a defect of the compiler"
    )
    assert "1 other job failed too: crash for sm_90" in str(error)
    (tmp_path / "crash.cu").unlink()
    _, hits = compiler.call(remote.build_cached, tmp_path, table, "pkg", tmp_path / "cache")
    assert hits == 4


def test_a_worker_that_dies(compiler: Compiler) -> None:
    """A crash inside NVRTC takes only its worker along: the others finish, and the error says what was compiled."""
    error, finished = compiler.call(remote.crash_a_worker)
    assert (error.module, error.arch, error.stage, error.log) == ("victim", "compute_80", "NVRTC", "SIGKILL")
    assert finished


def test_interrupt_kills_the_workers(compiler: Compiler, tmp_path: Path) -> None:
    """Ctrl-C ends a build at once, whatever its workers do, and leaves no process behind."""
    (tmp_path / "pkg").mkdir()
    for number in range(8):
        (tmp_path / f"slow{number}.cu").write_text(CRASH.replace("r0", "first").replace("r1", "second"))
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tests.build import _functions as remote\n"
        "print('started', flush=True)\n"
        f"remote.build(Path.cwd(), {{'sources': ['*.cu'], 'cuda': '{compiler.line}'}}, 'pkg')\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [compiler.python, "-c", script, root],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    deadline = time.monotonic() + 60
    while not (workers := children(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)  # into the first compilations
    workers = children(process.pid)
    assert workers
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert "worker.py" not in errors
    assert not [worker for worker in workers if alive(worker)]


@pytest.mark.skipif(sys.platform == "linux" and not Path("/proc").is_dir(), reason="needs /proc")
def test_workers_end_with_a_build_that_is_killed(compiler: Compiler, tmp_path: Path) -> None:
    """kill -9 of a build leaves no worker behind."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "slow.cu").write_text(CRASH.replace("r0", "first").replace("r1", "second"))
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tests.build import _functions as remote\n"
        f"remote.build(Path.cwd(), {{'sources': ['*.cu'], 'cuda': '{compiler.line}'}}, 'pkg')\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen([compiler.python, "-c", script, root], cwd=tmp_path, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(workers := children(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [worker for worker in workers if alive(worker)]


def test_cache_entries_are_verified(compiler: Compiler, tmp_path: Path) -> None:
    """A damaged entry of the cache is compiled again; the result is the same."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "good.cu").write_text(KERNEL)
    table = {"sources": ["*.cu"], "archs": ["sm_80"], "cuda": compiler.line}
    first, hits = compiler.call(remote.build_cached, tmp_path, table, "pkg", tmp_path / "cache")
    assert hits == 0
    entries = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(entries) == 3  # of the front end, of ptxas, and what the compiler is
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-1] + b"!")
    second, hits = compiler.call(remote.build_cached, tmp_path, table, "pkg", tmp_path / "cache")
    assert (second, hits) == (first, 0)
    assert isinstance(Cache(tmp_path / "cache"), Cache)


def children(pid: int) -> list[int]:
    """Return the child processes of a process (Linux)."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
