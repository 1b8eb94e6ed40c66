"""The compiler: which line is chosen, which packages hold it, and what is said where it is missing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from hatch_cuda_aot import toolchain
from hatch_cuda_aot.errors import BuildError, NoCompilerError, UnsupportedArchError
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.toolchain import (
    LINES,
    Needs,
    Toolchain,
    check_platform,
    choose_line,
    find_toolchain,
    identified,
    identify_headers,
    installed_line,
    known_cuda_values,
    line_named,
    ptxas_version,
    requirements,
    unsupported_archs,
)

REPOSITORY = Path(__file__).parents[3]


def archs(text: str) -> list[Arch]:
    """Return architectures given as words."""
    return [Arch.parse(word) for word in text.split()]


def since(version: str) -> str:
    """Return the lines from one on, as messages list them."""
    versions = [line.version for line in LINES]
    return ", ".join(versions[versions.index(version) :])


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        ("", "12.9"),
        ("sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_120 compute_75 compute_120", "12.9"),
        ("sm_50", "12.9"),
        ("sm_90a sm_100f sm_121a", "12.9"),
        ("sm_101a", "12.9"),
        ("sm_88", "13.0"),
        ("sm_110", "13.0"),
        ("sm_110f compute_75", "13.0"),
        ("sm_107", "13.4"),
        ("sm_107a sm_75", "13.4"),
    ],
)
def test_auto_takes_the_oldest_line(wanted: str, line: str) -> None:
    """``auto`` is the oldest line that compiles everything, as its images load on the most drivers."""
    assert choose_line("auto", archs(wanted)).version == line


@pytest.mark.parametrize(
    ("cuda", "line"), [("12.9", "12.9"), ("12", "12.9"), ("13.0", "13.0"), ("13.4", "13.4"), ("13", LINES[-1].version)]
)
def test_explicit_line(cuda: str, line: str) -> None:
    """A minor release is taken as it is, a major one means its newest, whatever older line would do."""
    assert choose_line(cuda, archs("sm_90")).version == line
    assert line_named(cuda).version == line


def test_unknown_line() -> None:
    """A line that is not supported is an error that lists those that are."""
    with pytest.raises(BuildError) as caught:
        line_named("11.8")
    assert str(caught.value) == f"unknown CUDA line '11.8': expected one of {', '.join(known_cuda_values()[1:])}"


def test_known_values() -> None:
    """The values of the key ``cuda`` are auto, each major and each minor line, oldest first."""
    values = known_cuda_values()
    assert values[:4] == ["auto", "12", "13", "12.9"]
    assert values[4:] == [f"13.{minor}" for minor in range(len(LINES) - 1)]


@pytest.mark.parametrize(
    ("cuda", "wanted", "unsupported", "words"),
    [
        (
            "12.9",
            "sm_90 sm_110",
            ["sm_110"],
            f'CUDA 12.9 cannot compile for sm_110. CUDA {since("13.0")} can: set `cuda`, or leave it at "auto"',
        ),
        (
            "13.0",
            "sm_70 sm_75",
            ["sm_70"],
            'CUDA 13.0 cannot compile for sm_70. CUDA 12.9 can: set `cuda`, or leave it at "auto"',
        ),
        (
            "13.0",
            "sm_101",
            ["sm_101"],
            'CUDA 13.0 cannot compile for sm_101. CUDA 12.9 can: set `cuda`, or leave it at "auto"',
        ),
        (
            "13.3",
            "sm_107f",
            ["sm_107f"],
            f'CUDA 13.3 cannot compile for sm_107f. CUDA {since("13.4")} can: set `cuda`, or leave it at "auto"',
        ),
    ],
)
def test_unsupported_arch(cuda: str, wanted: str, unsupported: list[str], words: str) -> None:
    """The error names what the line lacks, and the lines that have it."""
    line = line_named(cuda)
    error = unsupported_archs(line, [arch for arch in archs(wanted) if not line.supports(arch)])
    assert str(error) == words
    assert list(error.archs) == unsupported


@pytest.mark.parametrize(
    ("wanted", "unsupported", "words"),
    [
        (
            "sm_101 sm_110",
            ["sm_101"],
            "no one CUDA line compiles all of sm_101, sm_110: leave out sm_101, or build two packages",
        ),
        (
            "sm_50 sm_60 sm_110",
            ["sm_110"],
            "no one CUDA line compiles all of sm_50, sm_60, sm_110: leave out sm_110, or build two packages",
        ),
    ],
)
def test_no_line_for_all(wanted: str, unsupported: list[str], words: str) -> None:
    """Where no line has all of them, the error says what to leave out."""
    with pytest.raises(UnsupportedArchError) as caught:
        choose_line("auto", archs(wanted))
    assert str(caught.value) == words
    assert list(caught.value.archs) == unsupported


def test_a_named_line_is_not_judged_by_the_table() -> None:
    """What a line that was named supports is asked from its compiler, which may know more than the table."""
    assert choose_line("13", archs("sm_90 sm_42")).version == LINES[-1].version


def test_a_virtual_arch_goes_without_saying() -> None:
    """Where a real architecture is named, its virtual one is not named as well."""
    error = unsupported_archs(line_named("13.0"), archs("sm_70 compute_70 compute_60"))
    assert str(error).startswith("CUDA 13.0 cannot compile for sm_70, compute_60. ")


def test_arch_that_no_line_knows() -> None:
    """An architecture that no line knows is an error that shows what this one compiles and how far our lines go."""
    with pytest.raises(UnsupportedArchError) as caught:
        choose_line("auto", archs("sm_90 sm_42"))
    line = caught.value.line
    assert str(caught.value).startswith(f"CUDA {line} cannot compile for sm_42. It compiles ")
    assert str(caught.value).endswith(f"; no other supported line (12.9 to {LINES[-1].version}) knows sm_42")
    assert " 90 " in str(caught.value)
    assert "90a" in str(caught.value)


@pytest.mark.parametrize("arch", ["sm_80a", "sm_90f", "compute_75f"])
def test_suffix_is_part_of_the_arch(arch: str) -> None:
    """A suffix that an architecture does not have is not dropped."""
    with pytest.raises(UnsupportedArchError, match=arch):
        choose_line("auto", archs(arch))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.version)
def test_requirements(line: toolchain.Line) -> None:
    """The parts of the compiler are pinned to the line; cuda-bindings is required by major version only."""
    plain = requirements(line, Needs())
    suffix = "-cu12" if line.version.startswith("12.") else ""
    same = {f"nvidia-cuda-{part}{suffix}=={line.version}.*" for part in ("nvrtc", "nvcc", "runtime")}
    if not suffix:
        same |= {f"nvidia-cuda-crt=={line.version}.*", f"nvidia-nvvm=={line.version}.*"}
    cccl = f"nvidia-cuda-cccl{suffix}=={line.cccl}"
    assert set(plain) == {f"cuda-bindings=={line.major}.*", "cuda-pathfinder", cccl, *same}
    assert len(plain) == len(set(plain))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.version)
def test_further_requirements(line: toolchain.Line) -> None:
    """NvJitLink and cuRAND's headers are fetched only for a project that needs them."""
    plain = set(requirements(line, Needs()))
    assert set(requirements(line, Needs(linker=True))) - plain == {f"nvidia-nvjitlink{line.suffix}=={line.version}.*"}
    assert set(requirements(line, Needs(curand=True))) - plain == {f"nvidia-curand{line.suffix}=={line.curand}"}
    assert set(requirements(line, Needs(linker=True, curand=True))) >= plain


@pytest.mark.parametrize(("extra", "cuda"), [("cu12", "12"), ("cu13", "13")])
def test_extras(extra: str, cuda: str) -> None:
    """The extras of pyproject.toml are the newest line of each major version, with everything a project can need."""
    declared = WheelBuilder(str(REPOSITORY)).metadata.core.optional_dependencies[extra]
    assert sorted(declared) == sorted(requirements(line_named(cuda), Needs(linker=True, curand=True)))


def test_no_cuda_dependency() -> None:
    """hatch-cuda-aot itself depends on no CUDA package: pip would refuse builds that need another version of it."""
    declared = WheelBuilder(str(REPOSITORY)).metadata.core.dependencies
    assert "click" in " ".join(declared)
    assert [name for name in declared if "cuda" in name or "nvidia" in name] == []


def test_minimum_driver() -> None:
    """Cubins load on the first driver of their major version."""
    assert {line.version: line.minimum_driver for line in LINES if line.version in ("12.9", "13.4")} == {
        "12.9": 12000,
        "13.4": 13000,
    }


@pytest.mark.parametrize(
    ("system", "machine"),
    [("Linux", "x86_64"), ("Linux", "aarch64"), ("Windows", "AMD64"), ("Windows", "x86_64")],
)
def test_platforms_with_a_compiler(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    """NVIDIA's wheels exist for Linux on both processors and for Windows."""
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    check_platform()


@pytest.mark.parametrize(
    ("system", "machine"), [("Darwin", "arm64"), ("Darwin", "x86_64"), ("Linux", "ppc64le"), ("Windows", "ARM64")]
)
def test_platforms_without_a_compiler(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    """Elsewhere, macOS first, the error says where to build, and that one build serves every platform."""
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(NoCompilerError) as caught:
        check_platform()
    assert str(caught.value) == (
        f"NVIDIA publishes no CUDA compiler for {system} on {machine.lower()}. Build this wheel on Linux (x86-64 or AArch64) "
        "or Windows (x86-64): it is tagged py3-none-any, so one build serves every platform"
    )


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
    monkeypatch.setattr(toolchain, "_version_of", installed.get)
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
    monkeypatch.setattr(toolchain, "_version_of", installed.get)
    with pytest.raises(NoCompilerError, match=r"pip install 'hatch-cuda-aot\[cu12\]'"):
        installed_line()


@pytest.fixture
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide whatever CUDA packages the tests run beside."""
    monkeypatch.setattr(toolchain, "_version_of", lambda _: None)
    monkeypatch.setattr(toolchain, "_file_of", lambda *_: None)
    for name in ("cuda", "cuda.bindings", "cuda.pathfinder"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("empty_environment")
def test_nothing_installed() -> None:
    """In an environment without any part the error lists every part and ends in the one command that installs them."""
    needs = Needs(linker=True, curand=True)
    with pytest.raises(NoCompilerError) as caught:
        find_toolchain(line_named("12.9"), needs)
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
        find_toolchain(line_named("13.0"), Needs())
    assert "  - the header crt/mma.h (wheel nvidia-cuda-crt)" in str(caught.value).splitlines()
    assert "curand" not in str(caught.value)
    assert "nvJitLink" not in str(caught.value)


@pytest.mark.usefixtures("empty_environment")
def test_bindings_of_another_major_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bindings for another major version are named as what is wrong, and never loaded."""
    monkeypatch.setattr(toolchain, "_version_of", {"cuda-bindings": "13.5.0"}.get)
    with pytest.raises(NoCompilerError) as caught:
        find_toolchain(line_named("12.9"), Needs())
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
    monkeypatch.setattr(toolchain, "_file_of", lambda name, _: program if name == "nvidia-cuda-nvcc" else None)
    with pytest.raises(NoCompilerError) as caught:
        find_toolchain(line_named("13.0"), Needs())
    assert f"  - ptxas 13.0 (found 12.9.86 at {program})" in str(caught.value).splitlines()


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

    monkeypatch.setattr(toolchain, "_file_of", file_of)
    missing: list[str] = []
    folders = toolchain._find_headers(line_named("13.1"), Needs(), missing)
    assert folders == (("include", str(shared)), ("cccl", str(cccl)))
    assert missing == []
    assert toolchain._cccl_version(folders) == "3003001"
    toolchain._find_headers(line_named("13.0"), Needs(), missing)
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
