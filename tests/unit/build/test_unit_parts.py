"""The parts of an installed compiler: which are found, what each says that it is, and what is said of those that lack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hatch_cuda_aot.compile import nvrtc, parts
from hatch_cuda_aot.compile.parts import (
    Parts,
    describe,
    find_parts,
    identified,
    identify_headers,
    installed_line,
    ptxas_version,
)
from hatch_cuda_aot.errors import NoCompilerError
from hatch_cuda_aot.toolchain import Needs, Toolchain, line_named, requirements


@pytest.mark.parametrize(
    ("installed", "line"),
    [
        ({"cuda-bindings": "13.5.0", "nvidia-cuda-nvrtc": "13.5.37"}, "13.5"),
        ({"cuda-bindings": "13.5.0", "nvidia-cuda-nvrtc": "13.0.88"}, "13.0"),
        ({"cuda-bindings": "12.9.3", "nvidia-cuda-nvrtc-cu12": "12.9.86"}, "12.9"),
        ({"cuda-bindings": "12.9.3", "nvidia-cuda-nvrtc-cu12": "12.9.86", "nvidia-cuda-nvrtc": "13.5.37"}, "12.9"),
        ({"cuda-bindings": "13.5.0", "nvidia-cuda-nvrtc-cu12": "12.9.86", "nvidia-cuda-nvrtc": "13.5.37"}, "13.5"),
    ],
)
def test_installed_line(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], line: str) -> None:
    """The installed line is that of NVRTC's wheel; of two, the one that the installed cuda-bindings drive."""
    monkeypatch.setattr(parts, "_version_of", installed.get)
    assert installed_line().version == line


@pytest.mark.parametrize(
    "installed",
    [
        {},
        {"cuda-bindings": "13.5.0"},
        {"nvidia-cuda-nvrtc": "13.5.37"},
        {"cuda-bindings": "12.9.3", "nvidia-cuda-nvrtc": "13.5.37"},
        {"cuda-bindings": "12.8.0", "nvidia-cuda-nvrtc-cu12": "12.8.93"},
    ],
)
def test_no_installed_line(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    """Half a compiler, two halves that do not fit, or an unsupported line count as none."""
    monkeypatch.setattr(parts, "_version_of", installed.get)
    with pytest.raises(NoCompilerError, match=r"pip install 'hatch-cuda-aot\[cu12\]'"):
        installed_line()


@pytest.fixture
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide whatever CUDA packages the tests run beside."""
    monkeypatch.setattr(parts, "_version_of", lambda _: None)
    monkeypatch.setattr(parts, "_file_of", lambda *_: None)
    for name in ("cuda", "cuda.bindings", "cuda.pathfinder"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("empty_environment")
def test_nothing_installed() -> None:
    """In an environment without any part the error lists every part and ends in the one command that installs them."""
    needs = Needs(linker=True, curand=True)
    with pytest.raises(NoCompilerError) as caught:
        find_parts(line_named("12.9"), needs)
    message = str(caught.value)
    assert message.splitlines()[0] == (f"the compiler of CUDA 12.9 is not complete in this environment ({sys.prefix}):")
    listed = [line.strip() for line in message.splitlines() if line.startswith("  - ")]
    assert listed[:3] == [
        "- cuda-bindings",
        "- ptxas 12.9 (not found)",
        "- the header cuda_fp16.h (wheel nvidia-cuda-runtime-cu12)",
    ]
    assert "- the header cub/block/block_reduce.cuh (wheel nvidia-cuda-cccl-cu12)" in listed
    assert "- the header crt/mma.h (wheel nvidia-cuda-nvcc-cu12)" in listed
    assert "- the header curand_kernel.h (wheel nvidia-curand-cu12)" in listed
    assert listed[-1].startswith("- nvJitLink (")
    wanted = requirements(line_named("12.9"), needs)
    assert message.splitlines()[-1] == "  pip install " + " ".join(f"'{name}'" for name in wanted)
    assert list(caught.value.requirements) == wanted


@pytest.mark.usefixtures("empty_environment")
def test_header_wheels_of_13() -> None:
    """On 13 crt/ has a wheel of its own, and cuRAND is not asked for without need."""
    with pytest.raises(NoCompilerError) as caught:
        find_parts(line_named("13.0"), Needs())
    assert "  - the header crt/mma.h (wheel nvidia-cuda-crt)" in str(caught.value).splitlines()
    assert "curand" not in str(caught.value)
    assert "nvJitLink" not in str(caught.value)


@pytest.mark.usefixtures("empty_environment")
def test_bindings_of_another_major_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bindings for another major version are named as what is wrong, and never loaded."""
    monkeypatch.setattr(parts, "_version_of", {"cuda-bindings": "13.5.0"}.get)
    with pytest.raises(NoCompilerError) as caught:
        find_parts(line_named("12.9"), Needs())
    assert "  - cuda-bindings 13.5.0 is installed, and drives CUDA 13 only" in str(caught.value).splitlines()


PTXAS_VERSION = """\
ptxas: NVIDIA (R) Ptx optimizing assembler
Copyright (c) 2005-2025 NVIDIA Corporation
Built on Tue_May_27_02:20:58_PDT_2025
Cuda compilation tools, release 12.9, V12.9.86
Build cuda_12.9.r12.9/compiler.36037853_0
"""


@pytest.fixture
def make_ptxas(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes a program which prints a text, whatever it is asked."""

    def make(text: str) -> Path:
        program = tmp_path / "ptxas"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n", encoding="utf-8")
        program.chmod(0o755)
        return program

    return make


@pytest.mark.skipif(sys.platform == "win32", reason="runs a shell script")
def test_ptxas_version(make_ptxas: Callable[[str], Path]) -> None:
    """The full version is read from what ptxas prints; anything else is of unknown version."""
    assert ptxas_version(make_ptxas(PTXAS_VERSION)) == "12.9.86"
    assert ptxas_version(make_ptxas("segmentation fault")) == "of unknown version"


@pytest.mark.skipif(sys.platform == "win32", reason="runs a shell script")
@pytest.mark.usefixtures("empty_environment")
def test_ptxas_of_another_release(monkeypatch: pytest.MonkeyPatch, make_ptxas: Callable[[str], Path]) -> None:
    """A ptxas of another release than NVRTC is not used but named with its place."""
    program = make_ptxas(PTXAS_VERSION)
    monkeypatch.setattr(parts, "_file_of", lambda name, _: program if name == "nvidia-cuda-nvcc" else None)
    with pytest.raises(NoCompilerError) as caught:
        find_parts(line_named("13.0"), Needs())
    assert f"  - ptxas 13.0 (found 12.9.86 at {program})" in str(caught.value).splitlines()


@pytest.mark.skipif(sys.platform == "win32", reason="runs a shell script")
@pytest.mark.usefixtures("empty_environment")
def test_ptxas_of_the_wheel(monkeypatch: pytest.MonkeyPatch, make_ptxas: Callable[[str], Path]) -> None:
    """That of a wheel of the right release is taken at its word at first; what it says itself is held against that."""
    program = make_ptxas(PTXAS_VERSION)
    monkeypatch.setattr(parts, "_file_of", lambda name, _: program if name.startswith("nvidia-cuda-nvcc") else None)
    monkeypatch.setattr(
        parts,
        "_version_of",
        {"nvidia-cuda-nvcc-cu12": "12.9.86", "nvidia-cuda-nvcc": "13.0.88", "cuda-bindings": ""}.get,
    )
    monkeypatch.setattr(nvrtc, "supported_ccs", lambda: (75, 90))
    monkeypatch.setattr(nvrtc, "build_version", lambda: "13.0.88")
    missing: list[str] = []
    for version in ("12.9", "13.0"):
        assert parts._find_ptxas(line_named(version), missing) == str(program)
    assert missing == []
    found = describe(Parts(line_named("12.9"), Needs(), str(program), ()))
    assert (found.ptxas, found.nvrtc, found.archs, found.unknown) == (
        "12.9.86",
        "13.0.88",
        (75, 90),
        ("cuda.bindings",),
    )
    with pytest.raises(NoCompilerError) as caught:
        describe(Parts(line_named("13.0"), Needs(), str(program), ()))
    listed = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    assert listed == [f"  - ptxas 13.0 (found 12.9.86 at {program})"]
    assert list(caught.value.requirements) == requirements(line_named("13.0"), Needs())


@pytest.mark.usefixtures("empty_environment")
def test_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Header folders carry short names, in a fixed order; two wheels in one folder give it once; releases must match."""
    shared = tmp_path / "nvidia" / "include"
    cccl = tmp_path / "nvidia" / "cccl"
    for file, text in {
        shared / "cuda_fp16.h": "",
        shared / "crt/mma.h": "",
        shared / "cuda_runtime_api.h": "#define CUDART_VERSION  13010\n",
        cccl / "cub/block/block_reduce.cuh": "",
        cccl / "cuda/std/__cccl/version.h": "#  define CCCL_VERSION 3003001 // a comment\n",
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def file_of(_: str, wanted: Callable[[str], bool]) -> Path | None:
        files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
        return next((path for path in files if wanted(f"/{path.relative_to(tmp_path).as_posix()}")), None)

    monkeypatch.setattr(parts, "_file_of", file_of)
    missing: list[str] = []
    folders = parts._find_headers(line_named("13.1"), Needs(), missing)
    assert folders == (("include", str(shared)), ("cccl", str(cccl)))
    assert missing == []
    assert parts._cccl_version(folders) == "3003001"
    parts._find_headers(line_named("13.0"), Needs(), missing)
    assert missing == [f"the headers of CUDA 13.0 (found 13.1 in {shared})"]


def wheel(site: Path, name: str, *files: str) -> None:
    """Lay out an installed wheel."""
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(name, encoding="utf-8")
    (site / f"{name}.dist-info").mkdir()
    record = "".join(f"{file},sha256=x,1\n" for file in files)
    (site / f"{name}.dist-info" / "RECORD").write_text(record, encoding="utf-8")


def test_headers_of_wheels(tmp_path: Path) -> None:
    """Headers of wheels are known by name and version of every wheel that owns files in their folder."""
    wheel(tmp_path, "nvidia_cuda_runtime-13.5.37", "nvidia/cu13/include/cuda_fp16.h")
    wheel(tmp_path, "nvidia_cuda_crt-13.5.37", "nvidia/cu13/bin/x", "nvidia/cu13/include/crt/mma.h")
    wheel(tmp_path, "nvidia_cuda_cccl-13.3.5", "nvidia/cu13/include/cccl/cub/cub.cuh")
    wheel(tmp_path, "nvidia_cublas-13.1.0", "nvidia/cu13/lib/libcublas.so", "nvidia/cu13/include2/x.h")
    wheel(tmp_path, "other-1.0", "nvidia/cu13/lib/other.so")
    include = tmp_path / "nvidia" / "cu13" / "include"
    everything = "nvidia_cuda_cccl-13.3.5 nvidia_cuda_crt-13.5.37 nvidia_cuda_runtime-13.5.37"
    assert identify_headers(include) == everything
    assert identify_headers(include / "cccl") == "nvidia_cuda_cccl-13.3.5"
    (tmp_path / "link").symlink_to(include)
    assert identify_headers(tmp_path / "link") == everything


def test_headers_of_a_toolkit(tmp_path: Path) -> None:
    """Headers that no wheel owns are known by their contents, wherever they lie."""
    copies = [tmp_path / "one", tmp_path / "two" / "include"]
    for copy in copies:
        (copy / "crt").mkdir(parents=True)
        (copy / "cuda_fp16.h").write_bytes(b"a")
        (copy / "crt" / "mma.h").write_bytes(b"b")
    first, second = map(identify_headers, copies)
    assert first == second != ""
    seen = {first}
    for path, content in (("cuda_fp16.h", b"c"), ("crt/mma.h", b"d"), ("new.h", b""), ("crt/new.h", b"")):
        (copies[0] / path).write_bytes(content)
        seen.add(identify_headers(copies[0]))
    assert len(seen) == 5


def test_identified(tmp_path: Path) -> None:
    """A compiler's headers are named folder by folder; those that cannot be read are parts that are not known."""
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "cuda_fp16.h").write_bytes(b"a")
    folders = (("include", str(tmp_path / "good")), ("cccl", str(tmp_path / "none")))
    found = identified(Toolchain("12.9", "12.9.86", "12.9", "", "", folders, (), unknown=("ptxas",)))
    assert found.headers == (("include", identify_headers(tmp_path / "good")), ("cccl", ""))
    assert found.unknown == ("ptxas", f"the headers in {tmp_path / 'none'}")


def test_headers_that_cannot_be_read(tmp_path: Path) -> None:
    """Where contents cannot be read, nothing is known."""
    (tmp_path / "broken.h").symlink_to(tmp_path / "none")
    assert identify_headers(tmp_path) == ""
    assert identify_headers(tmp_path / "nowhere") == ""
