"""The compatibility rules against a table written down from NVIDIA's documents, pair by pair.

Sources: CUDA C++ Programming Guide, "Compute Capabilities" and "Binary compatibility" (machine code runs on the same
major version and the same or a higher minor one; not between desktop and Tegra), "Family-specific features" and
"Architecture-specific features"; Blackwell Compatibility Guide; CUDA 13.0 release notes (10.1 renamed to 11.0).
"""

from __future__ import annotations

import pytest

from hatch_cuda_aot.runtime.arch import Arch, format_cc, format_cuda, parse_cc, runs_cubin, runs_ptx

#: Every compute capability from 7.5 on that NVIDIA's compilers or devices have named; 10.1 is 11.0 before CUDA 13.
DEVICES = (75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121)

#: Machine code -> devices that run it.
CUBINS = {
    "sm_75": {75},
    "sm_80": {80, 86, 89},
    "sm_86": {86, 89},
    "sm_87": {87},
    "sm_88": {88},
    "sm_89": {89},
    "sm_90": {90},
    "sm_90a": {90},
    "sm_100": {100, 103, 107},
    "sm_100f": {100, 103, 107},
    "sm_100a": {100},
    "sm_101": {101, 110},
    "sm_101f": {101, 110},
    "sm_101a": {101, 110},
    "sm_103": {103, 107},
    "sm_103f": {103, 107},
    "sm_103a": {103},
    "sm_107": {107},
    "sm_107f": {107},
    "sm_107a": {107},
    "sm_110": {101, 110},
    "sm_110f": {101, 110},
    "sm_110a": {101, 110},
    "sm_120": {120, 121},
    "sm_120f": {120, 121},
    "sm_120a": {120},
    "sm_121": {121},
    "sm_121f": {121},
    "sm_121a": {121},
}

#: PTX -> devices that it compiles for.
PTX = {
    "compute_75": {75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121},
    "compute_80": {80, 86, 87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121},
    "compute_86": {86, 87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121},
    "compute_87": {87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121},
    "compute_88": {88, 89, 90, 100, 101, 103, 107, 110, 120, 121},
    "compute_89": {89, 90, 100, 101, 103, 107, 110, 120, 121},
    "compute_90": {90, 100, 101, 103, 107, 110, 120, 121},
    "compute_90a": {90},
    "compute_100": {100, 101, 103, 107, 110, 120, 121},
    "compute_100f": {100, 103, 107},
    "compute_100a": {100},
    "compute_101": {101, 110, 120, 121},
    "compute_101f": {101, 110},
    "compute_101a": {101, 110},
    "compute_103": {103, 107, 110, 120, 121},
    "compute_103f": {103, 107},
    "compute_103a": {103},
    "compute_107": {107, 110, 120, 121},
    "compute_107f": {107},
    "compute_107a": {107},
    "compute_110": {101, 110, 120, 121},
    "compute_110f": {101, 110},
    "compute_110a": {101, 110},
    "compute_120": {120, 121},
    "compute_120f": {120, 121},
    "compute_120a": {120},
    "compute_121": {121},
    "compute_121f": {121},
    "compute_121a": {121},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arch", CUBINS)
def test_cubin(arch: str, device: int) -> None:
    """Machine code runs exactly where the table says, and a reason is given elsewhere."""
    reason = runs_cubin(Arch.parse(arch), device)
    assert (reason is None) == (device in CUBINS[arch]), reason


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arch", PTX)
def test_ptx(arch: str, device: int) -> None:
    """PTX compiles exactly where the table says."""
    reason = runs_ptx(Arch.parse(arch), device)
    assert (reason is None) == (device in PTX[arch]), reason


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arch", [arch for arch in CUBINS if arch[-1].isdigit()])
def test_tegra_is_exact(arch: str, device: int) -> None:
    """On a Tegra device no machine code runs but that of its own compute capability."""
    own = {101: 110}.get(device, device)
    runs = runs_cubin(Arch.parse(arch), device, tegra=True) is None
    assert runs == ({101: 110}.get(Arch.parse(arch).cc, Arch.parse(arch).cc) == own)


@pytest.mark.parametrize("text", ["sm_75", "sm_90a", "sm_100f", "compute_120", "compute_103a"])
def test_arch_round_trip(text: str) -> None:
    """An architecture prints as it was parsed."""
    assert str(Arch.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "90", "sm_9", "sm_90b", "SM_90", "sm_90 ", "sm_090", "compute_90aa", "sm_90-real"]
)
def test_arch_rejects(text: str) -> None:
    """Other spellings belong to the configuration, not here."""
    with pytest.raises(ValueError, match="is not an architecture"):
        Arch.parse(text)


@pytest.mark.parametrize(("value", "cc"), [((9, 0), 90), ("9.0", 90), (90, 90), ("12.1", 121), ((10, 3), 103)])
def test_parse_cc(value: int | str | tuple[int, int], cc: int) -> None:
    """A compute capability may be given in three ways."""
    assert parse_cc(value) == cc


@pytest.mark.parametrize("value", ["9", "sm_90", "9.0.1", "", 9.0, None])
def test_parse_cc_rejects(value: object) -> None:
    """Anything else is named in the error."""
    with pytest.raises(ValueError, match="is not a compute capability"):
        parse_cc(value)  # type: ignore[arg-type]


def test_formats() -> None:
    """Numbers print as NVIDIA writes them."""
    assert [format_cc(90), format_cc(121)] == ["9.0", "12.1"]
    assert [format_cuda(12040), format_cuda(13000)] == ["12.4", "13.0"]
