"""Selection over every pair of image and device, both kinds, Tegra or not, under every driver from CUDA 12.0 to 13.5.

The tables of test_runtime_rules.py say where an image runs; here the drivers' floors come in.  Tegra devices and drivers
other than the one of the machine that runs the GPU tests are proven by these tables alone.
"""

from __future__ import annotations

import pytest

from hatch_cuda_aot.runtime.arch import Arch, canonical_cc
from hatch_cuda_aot.runtime.manifest import Image
from hatch_cuda_aot.runtime.select import CHOSEN, DeviceFacts, rank
from tests.unit.runtime.test_runtime_rules import CUBINS, DEVICES, PTX

#: CUDA versions of drivers, as cuDriverGetVersion counts.
DRIVERS = (*range(12000, 12100, 10), *range(13000, 13060, 10))

#: The compiler lines, each with the driver floor of its cubins (minor-version compatibility: any of the same major
#: version; source: NVIDIA, CUDA Compatibility) and the one of its PTX (its own release; source: PTX ISA release notes).
LINES = {"12.9": (12000, 12090), "13.0": (13000, 13000), "13.5": (13000, 13050)}


def image_of(arch: str, line: str, floor: int | None = None) -> Image:
    cubin, ptx = LINES[line]
    virtual = arch.startswith("compute")
    return Image(
        arch=Arch.parse(arch),
        file=f"m.{arch}",
        size=1,
        sha256="",
        min_driver=ptx if virtual else cubin,
        ptx_version={12090: "8.8", 13000: "9.0", 13050: "9.5"}[ptx] if virtual else None,
        ptx_floor="6.3" if floor else None,
        floor_driver=floor,
        kernels={"k": {}},
    )


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("arch", [*CUBINS, *PTX])
def test_one_image(arch: str, line: str) -> None:
    """An image alone is chosen exactly where the table says that it runs and the driver is new enough."""
    runs = {**CUBINS, **PTX}[arch]
    image = image_of(arch, line)
    for device in DEVICES:
        for driver in DRIVERS:
            (candidate,) = rank([image], DeviceFacts(device, driver))
            expected = device in runs and driver >= image.min_driver
            assert (candidate.verdict == CHOSEN) == expected, (device, driver, candidate.reason)


@pytest.mark.parametrize("arch", CUBINS)
def test_tegra(arch: str) -> None:
    """On a device that says it is Tegra, machine code is exact: its own compute capability, or family within it."""
    own = canonical_cc(Arch.parse(arch).cc)
    for device in DEVICES:
        (candidate,) = rank([image_of(arch, "13.5")], DeviceFacts(device, 13050, tegra=True))
        if arch[-1] == "f":
            continue  # families hold no Tegra device but 11.0, which is a family of its own
        assert (candidate.verdict == CHOSEN) == (canonical_cc(device) == own), (device, candidate.reason)


@pytest.mark.parametrize("arch", PTX)
@pytest.mark.parametrize("floor", [10000, 12010, 12080, 13000])
def test_lowered_ptx(arch: str, floor: int) -> None:
    """PTX with a verified floor is chosen from the floor's driver on; the version line changes only below its own."""
    image = image_of(arch, "13.5", floor)
    for device in DEVICES:
        for driver in DRIVERS:
            (candidate,) = rank([image], DeviceFacts(device, driver))
            expected = device in PTX[arch] and driver >= floor
            assert (candidate.verdict == CHOSEN) == expected, (device, driver, candidate.reason)
            if expected:
                assert ("lowered" in candidate.reason) == (driver < image.min_driver), (driver, candidate.reason)


def test_every_pair_of_images() -> None:
    """Of any two images that run, the better of DESIGN's order wins: exact a, f, plain; family; major; then PTX."""
    archs = [*CUBINS, *PTX]
    for device in DEVICES:
        running = [arch for arch in archs if device in {**CUBINS, **PTX}[arch]]
        for first in running:
            for second in running:
                ranked = rank([image_of(first, "13.5"), image_of(second, "13.5")], DeviceFacts(device, 13050))
                better = min((first, second), key=lambda arch: place(arch, device))
                assert str(ranked[0].image.arch) == better, (device, first, second)


def place(arch: str, device: int) -> tuple[int, int, bool, str]:
    """Return where an image stands in the order; the lowest is loaded.  Written down anew, not taken from the program."""
    parsed = Arch.parse(arch)
    own, here = canonical_cc(parsed.cc), canonical_cc(device)
    if parsed.virtual:
        tier = {"a": 5, "f": 6, "": 7}[parsed.suffix]
    elif own == here:
        tier = {"a": 0, "f": 1, "": 2}[parsed.suffix]
    else:
        tier = 3 if parsed.suffix == "f" else 4
    return tier, -own, parsed.cc != device, arch
