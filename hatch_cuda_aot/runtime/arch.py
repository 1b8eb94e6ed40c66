"""GPU architectures and the rules by which an image of one runs on a device of another.

This is the one home of NVIDIA's compatibility rules: the loader and the build side both import them from here.  It
knows nothing of files, manifests or drivers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "FAMILIES",
    "TEGRA",
    "Arch",
    "canonical_cc",
    "format_cc",
    "format_cuda",
    "parse_cc",
    "runs_cubin",
    "runs_ptx",
]


class Arch(NamedTuple):
    """One GPU architecture in NVIDIA's own spelling: ``sm_90``, ``sm_100f``, ``compute_90a``.

    Attributes:
        cc: compute capability as ``major * 10 + minor``, so 90 for 9.0 and 120 for 12.0.
        suffix: ``""`` (portable), ``"f"`` (family-specific) or ``"a"`` (architecture-specific).
        virtual: True for ``compute_XY`` (PTX), False for ``sm_XY`` (machine code).

    """

    cc: int
    suffix: str = ""
    virtual: bool = False

    @classmethod
    def parse(cls, text: str) -> Arch:
        """Return the architecture that `text` (``sm_XY[a|f]`` or ``compute_XY[a|f]``) names.

        Raises:
            ValueError: if `text` is anything else.

        """
        kind, _, rest = text.partition("_")
        digits = rest.rstrip("af")
        suffix = rest[len(digits) :]
        number = digits if digits.isascii() and digits.isdecimal() and len(digits) in (2, 3) else "0"
        if kind not in _KINDS or number[0] == "0" or len(suffix) > 1:
            message = f"{text!r} is not an architecture: expected sm_XY or compute_XY, with an optional suffix a or f"
            raise ValueError(message)
        return cls(int(number), suffix, kind == "compute")

    def __str__(self) -> str:
        return f"{'compute' if self.virtual else 'sm'}_{self.cc}{self.suffix}"

    def __lt__(self, other: tuple[Any, ...]) -> bool:
        return self._order < Arch(*other)._order

    def __gt__(self, other: tuple[Any, ...]) -> bool:
        return self._order > Arch(*other)._order

    @property
    def major(self) -> int:
        """The major number of the compute capability."""
        return self.cc // 10

    @property
    def minor(self) -> int:
        """The minor number of the compute capability."""
        return self.cc % 10

    @property
    def as_virtual(self) -> Arch:
        """The ``compute_XY`` of the same compute capability and suffix."""
        return Arch(self.cc, self.suffix, virtual=True)

    @property
    def as_real(self) -> Arch:
        """The ``sm_XY`` of the same compute capability and suffix."""
        return Arch(self.cc, self.suffix, virtual=False)

    @property
    def _order(self) -> tuple[bool, int, str]:
        return (self.virtual, self.cc, self.suffix)


_KINDS = ("sm", "compute")

#: Compute capabilities of the Tegra and Jetson line (CUDA C++ Programming Guide, "Binary compatibility": "the binary
#: compatibility is not supported between desktop and Tegra").  10.1 is Thor before CUDA 13 renamed it to 11.0.
TEGRA = frozenset({53, 62, 72, 87, 110})

#: Desktop architectures whose machine code NVIDIA documents as running on their own compute capability alone.
_EXACT_ONLY = frozenset({88})

#: Family-specific targets: family -> compute capabilities that run it (CUDA C++ Programming Guide, "Family-specific
#: features").  A family equals a major version only by accident, so this is a table.
FAMILIES: dict[int, frozenset[int]] = {
    100: frozenset({100, 103, 107}),
    103: frozenset({103, 107}),
    107: frozenset({107}),
    110: frozenset({110}),
    120: frozenset({120, 121}),
    121: frozenset({121}),
}


def canonical_cc(cc: int) -> int:
    """Return `cc` with the renamed 10.1 (Thor, CUDA 12) as 11.0 (Thor, CUDA 13)."""
    return 110 if cc == 101 else cc


def runs_cubin(arch: Arch, cc: int, *, tegra: bool = False) -> str | None:
    """Say why a cubin of `arch` does not run on a device of compute capability `cc`; None where it does.

    `tegra` marks an integrated Tegra or Jetson device whose compute capability does not tell.
    """
    own, device = canonical_cc(arch.cc), canonical_cc(cc)
    if own == device:
        return None
    if arch.suffix == "a":
        return f"{arch} runs on compute capability {format_cc(arch.cc)} only"
    if arch.suffix == "f":
        if device in FAMILIES.get(own, ()):
            return None
        return f"{arch} runs on the family {_family(own)} only"
    if own // 10 != device // 10:
        return f"machine code for {format_cc(arch.cc)} runs on {own // 10}.x devices only"
    if tegra or own in TEGRA or device in TEGRA:
        return f"between Tegra and desktop GPUs machine code is exact: {format_cc(arch.cc)} is not {format_cc(cc)}"
    if own in _EXACT_ONLY or device in _EXACT_ONLY:
        return f"machine code for {format_cc(arch.cc)} and {format_cc(cc)} is not exchangeable"
    if own > device:
        return f"needs compute capability {format_cc(arch.cc)} or a higher {arch.major}.x"
    return None


def runs_ptx(arch: Arch, cc: int) -> str | None:
    """Say why PTX of `arch` cannot be compiled for a device of compute capability `cc`; None where it can."""
    own, device = canonical_cc(arch.cc), canonical_cc(cc)
    if own == device:
        return None
    if arch.suffix == "a":
        return f"{arch} compiles for compute capability {format_cc(arch.cc)} only"
    if arch.suffix == "f":
        if device in FAMILIES.get(own, ()):
            return None
        return f"{arch} compiles for the family {_family(own)} only"
    # Where one side is spelled 10.1, both of its numbers count: compute_101 is compute_110, and a driver that calls a
    # device 10.1 takes no compute_103.
    if arch.cc > cc or own > device:
        return f"needs compute capability {format_cc(arch.cc)} or higher"
    return None


def format_cc(cc: int) -> str:
    """Return ``"9.0"`` for 90 and ``"12.0"`` for 120."""
    return f"{cc // 10}.{cc % 10}"


def parse_cc(value: int | str | tuple[int, int]) -> int:
    """Return a compute capability given as ``90``, ``"9.0"`` or ``(9, 0)`` in the form ``major * 10 + minor``.

    Raises:
        ValueError: if `value` is none of these.

    """
    if isinstance(value, tuple) and len(value) == 2:
        return int(value[0]) * 10 + int(value[1])
    if isinstance(value, int):
        return value
    major, _, minor = value.partition(".") if isinstance(value, str) else ("", "", "")
    if not (
        f"{major}{minor}".isascii() and major.isdecimal() and minor.isdecimal() and len(major) < 3 and len(minor) == 1
    ):
        message = f"{value!r} is not a compute capability: expected one like (9, 0), '9.0' or 90"
        raise ValueError(message)
    return int(major) * 10 + int(minor)


def format_cuda(version: int) -> str:
    """Return ``"13.0"`` for the CUDA version 13000."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _family(cc: int) -> str:
    return ", ".join(format_cc(member) for member in sorted(FAMILIES.get(cc, ()))) or format_cc(cc)
