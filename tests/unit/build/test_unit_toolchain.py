"""The compiler: which line is chosen, which packages hold it, and what is said where it is missing."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from hatch_cuda_aot import toolchain
from hatch_cuda_aot.errors import BuildError, NoCompilerError, UnsupportedArchError
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.toolchain import (
    LINES,
    Needs,
    check_platform,
    choose_line,
    known_cuda_values,
    line_named,
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
