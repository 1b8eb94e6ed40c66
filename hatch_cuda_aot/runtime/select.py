"""Ranks the images of a module for one device: which run there, in which order, and why the others do not.

Pure: images and facts in, ranked candidates out.  The rules themselves stand in `arch`; this module adds the driver's
version and the order of preference.  The build side uses it as well, to say what a device would get.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from .arch import TEGRA, canonical_cc, format_cc, format_cuda, runs_cubin, runs_ptx

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .manifest import Image

__all__ = [
    "CHOSEN",
    "JIT",
    "JIT_LOWERED",
    "LOAD",
    "NVJITLINK",
    "REFUSED",
    "REJECTED",
    "USABLE",
    "Candidate",
    "DeviceFacts",
    "advise",
    "exact",
    "is_tegra",
    "rank",
]

#: The best image for the device: the one that is loaded.
CHOSEN = "chosen"
#: Runs on the device as well, and would be taken if the better ones were not there.
USABLE = "usable"
#: Was tried, and the driver refused it although the rules allow it.
REFUSED = "refused"
#: Does not run on the device.
REJECTED = "rejected"

#: The ways in which an image becomes what the device runs: machine code is loaded as it is;
LOAD = "load"
#: PTX is compiled by the driver,
JIT = "jit"
#: or compiled by the driver once its version line says the lowest version under which it still assembles,
JIT_LOWERED = "jit-lowered"
#: or, where the driver cannot read it at all, compiled by nvJitLink.
NVJITLINK = "nvjitlink"


class DeviceFacts(NamedTuple):
    """What decides which images run.

    Attributes:
        cc: compute capability as ``major * 10 + minor``.
        driver: the CUDA version of the driver as ``cuDriverGetVersion`` counts (13000 for 13.0), or None for a driver
            that is new enough for everything.
        tegra: whether the GPU is integrated in a Tegra or Jetson system.
        ordinal: the device's number in the process, None for a device that is not there.
        name: the device's name, such as ``"NVIDIA H200"``; empty for a device that is not there.
        nvjitlink: the CUDA version of the nvJitLink that is installed (13050 for 13.5); None where there is none, or where
            nobody has asked for it yet.

    """

    cc: int
    driver: int | None = None
    tegra: bool = False
    ordinal: int | None = None
    name: str = ""
    nvjitlink: int | None = None

    def __str__(self) -> str:
        parts = [f"compute capability {format_cc(self.cc)}"]
        if self.tegra:
            parts.append("Tegra")
        parts.append("any driver" if self.driver is None else f"driver of CUDA {format_cuda(self.driver)}")
        if self.ordinal is None:
            return ", ".join(parts)
        return f"device {self.ordinal} ({', '.join([self.name, *parts] if self.name else parts)})"


class Candidate(NamedTuple):
    """One image as seen by one device.

    Attributes:
        image: the image.
        verdict: `CHOSEN`, `USABLE`, `REFUSED` or `REJECTED`.
        reason: why, in a few words.
        needs_driver: the CUDA version of the driver (13000 for 13.0) that the image waits for, where that alone stands
            between it and the device; else None.
        forced_out: whether only the wish for PTX stands between it and the device.
        way: `LOAD`, `JIT`, `JIT_LOWERED` or `NVJITLINK`; empty where it does not run.

    """

    image: Image
    verdict: str
    reason: str
    needs_driver: int | None = None
    forced_out: bool = False
    way: str = ""

    @property
    def awaits_linker(self) -> bool:
        """Whether it is PTX that the driver is too old for, so that nvJitLink decides whether it runs."""
        return self.needs_driver is not None and self.image.arch.virtual


def rank(
    images: Iterable[Image],
    device: DeviceFacts,
    *,
    kernel: str | None = None,
    force_ptx: bool = False,
    refused: Mapping[str, str] | None = None,
) -> list[Candidate]:
    """Return a candidate for each of `images`: what runs on `device`, best first, then the refused, then the others.

    The order of preference is: machine code for exactly this compute capability (``a`` before ``f`` before plain), then
    for its family, then of the same major version with the highest minor version not above; then PTX (``a`` exact, then
    the family's, then plain) of the highest version not above.  The order of `images` does not matter.

    Args:
        images: of one module.
        device: what to rank them for.
        kernel: canonical name of a kernel that the image must hold; None for any.
        force_ptx: whether to pass over machine code (``CUDA_AOT_FORCE_PTX``).
        refused: file name of an image -> what the driver said when it refused it.

    """
    running: list[tuple[_Key, Candidate]] = []
    refusals: list[tuple[_Key, Candidate]] = []
    others: list[tuple[_Key, Candidate]] = []
    for image in images:
        tier = _tier(image, device)
        candidate = _judge(image, device, tier, force_ptx=force_ptx, kernel=kernel)
        # 10.1 and 11.0 are one compute capability under two names: the device's own name first.  Where all else ties,
        # the spelling decides, so that the manifest's order never does.
        cc = image.arch.cc
        key = (tier, -canonical_cc(cc), cc != device.cc, str(image.arch), image.file)
        if candidate.verdict == REJECTED:
            others.append((key, candidate))
        elif refused and image.file in refused:
            refusals.append((key, candidate._replace(verdict=REFUSED, reason=refused[image.file])))
        else:
            running.append((key, candidate))
    ranked = [candidate for group in (running, refusals, others) for _, candidate in sorted(group, key=itemgetter(0))]
    if running:
        ranked[0] = ranked[0]._replace(verdict=CHOSEN)
    return ranked


def exact(
    images: Iterable[Image], device: DeviceFacts, kernel: str | None = None, refused: Mapping[str, str] | None = None
) -> Image | None:
    """Return the image that `rank` puts first if that is machine code for exactly the device's compute capability.

    Nothing outranks such an image, so the others need no judgement: loading a kernel takes half as long for that.
    """
    if device.cc in _TWO_NAMES:  # between the two more than the suffix decides
        return None
    best: Image | None = None
    for image in images:
        arch = image.arch
        if (
            arch.cc == device.cc
            and not arch.virtual
            and (kernel is None or kernel in image.kernels)
            and (device.driver is None or image.min_driver <= device.driver)
            and not (refused and image.file in refused)
            and (best is None or _SUFFIXES.index(arch.suffix) < _SUFFIXES.index(best.arch.suffix))
        ):
            best = image
    return best


def advise(candidates: Sequence[Candidate], device: DeviceFacts, package: str) -> list[str]:
    """Return what to change so that one of `candidates`, none of which runs, would: one sentence each, best first."""
    advice = []
    if any(candidate.forced_out for candidate in candidates):
        advice.append("Unset CUDA_AOT_FORCE_PTX: machine code for this device is there.")
    waiting = [candidate for candidate in candidates if candidate.needs_driver is not None]
    if waiting:
        first = min(waiting, key=lambda candidate: (candidate.needs_driver, str(candidate.image.arch)))
        needed = format_cuda(first.needs_driver or 0)
        image = first.image
        because = f"PTX {image.ptx_version} of {image.arch}" if image.ptx_version else str(image.arch)
        advice.append(f"Upgrade the NVIDIA driver to one of CUDA {needed} or newer, which takes {because}.")
    advice += _advise_nvjitlink(candidates, device)
    if any(candidate.verdict == REFUSED for candidate in candidates):
        advice.append(f"The driver refused an image that should run: reinstall {package}, or report it to its authors.")
    ask = "Or ask" if advice else "Ask"
    advice.append(f'{ask} the authors of {package} to add "sm_{device.cc}" to archs under [tool.cuda-aot].')
    return advice


def is_tegra(cc: int) -> bool:
    """Tell whether devices of compute capability `cc` are integrated in a Tegra or Jetson system."""
    return canonical_cc(cc) in TEGRA


#: In order of preference; the position in this tuple is the first part of the sort key.
_TIERS = (
    "exact, architecture-specific",
    "exact, family-specific",
    "exact",
    "of the same family",
    "of the same major version",
    "architecture-specific",
    "family-specific",
    "",
)
_SAME_FAMILY, _SAME_MAJOR, _FIRST_PTX = 3, 4, 5
_SUFFIXES = ("a", "f", "")

#: One compute capability, as CUDA 12 and as CUDA 13 call it.
_TWO_NAMES = (101, 110)

_Key = tuple[int, int, bool, str, str]


def _judge(image: Image, device: DeviceFacts, tier: int, *, force_ptx: bool, kernel: str | None) -> Candidate:
    """Return `image` as seen by `device`: `USABLE` where it runs, else `REJECTED`."""
    arch = image.arch
    fit = runs_ptx(arch, device.cc) if arch.virtual else runs_cubin(arch, device.cc, tegra=device.tegra)
    if fit is not None:
        return Candidate(image, REJECTED, fit)
    if kernel is not None and kernel not in image.kernels:
        return Candidate(image, REJECTED, f"was built without {kernel}")
    way = _way(image, device)
    if not way:
        needed, reason = _too_old(image, device)
        return Candidate(image, REJECTED, reason, needs_driver=needed)
    if force_ptx and not arch.virtual:
        return Candidate(image, REJECTED, "CUDA_AOT_FORCE_PTX is set", forced_out=True)
    words = (_how(image, device, way), _TIERS[tier])
    return Candidate(image, USABLE, ", ".join(filter(None, words)), way=way)


def _way(image: Image, device: DeviceFacts) -> str:
    """Return the way in which `image` gets past the driver of `device`; empty where there is none."""
    driver = device.driver
    if driver is None or image.min_driver <= driver:
        return JIT if image.arch.virtual else LOAD
    if image.ptx_floor is not None and image.floor_driver is not None and image.floor_driver <= driver:
        return JIT_LOWERED
    linker = device.nvjitlink
    # The machine code of one CUDA release runs on the drivers of all releases of the same major version.
    if image.arch.virtual and linker is not None and image.min_driver <= linker and linker // 1000 <= driver // 1000:
        return NVJITLINK
    return ""


def _how(image: Image, device: DeviceFacts, way: str) -> str:
    """Say in words in which `way` `image` becomes what `device` runs."""
    if way == LOAD:
        return f"machine code for {format_cc(image.arch.cc)}"
    ptx = f"PTX {image.ptx_version}" if image.ptx_version else "PTX"
    if way == JIT_LOWERED:
        return f"{ptx}, its version line lowered to {image.ptx_floor} for this driver"
    if way == NVJITLINK:
        return f"{ptx}, compiled by nvJitLink {format_cuda(device.nvjitlink or 0)} for this older driver"
    return f"{ptx}, compiled by the driver"


def _too_old(image: Image, device: DeviceFacts) -> tuple[int, str]:
    """Return the CUDA version of the first driver that takes `image`, and why the one of `device` does not."""
    needed, what = image.min_driver, f"PTX {image.ptx_version} needs" if image.ptx_version else "needs"
    if image.ptx_floor is not None and image.floor_driver is not None and image.floor_driver < needed:
        needed, what = image.floor_driver, f"PTX {image.ptx_version}, lowered to {image.ptx_floor}, needs"
    return needed, f"{what} a driver of CUDA {format_cuda(needed)}; this one is of {format_cuda(device.driver or 0)}"


def _advise_nvjitlink(candidates: Iterable[Candidate], device: DeviceFacts) -> list[str]:
    """Return the advice to install nvJitLink, where that would compile PTX of `candidates` for the driver there is."""
    versions = [candidate.image.min_driver for candidate in candidates if candidate.awaits_linker]
    versions = [version for version in versions if version // 1000 == (device.driver or 0) // 1000]
    if not versions:
        return []
    major, needed = min(versions) // 1000, format_cuda(min(versions))
    name = "nvidia-nvjitlink-cu12" if major == 12 else "nvidia-nvjitlink"
    packages = f'"cuda-bindings=={major}.*" "{name}=={major}.*,>={needed}"'
    return [f"Or install nvJitLink, which compiles it in the driver's place: pip install {packages}"]


def _tier(image: Image, device: DeviceFacts) -> int:
    """Return the position in `_TIERS` that `image` has if it runs on `device` at all."""
    arch = image.arch
    suffix = _SUFFIXES.index(arch.suffix)
    if arch.virtual:
        return _FIRST_PTX + suffix
    if canonical_cc(arch.cc) == canonical_cc(device.cc):
        return suffix
    return _SAME_FAMILY if arch.suffix else _SAME_MAJOR
