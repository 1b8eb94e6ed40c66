"""The spellings of architectures that people know, and what each means.

NVIDIA's tokens are canonical; CMake's and PyTorch's mean here what they mean there.  Pure, but for the word ``native``,
whose answer is passed in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from hatch_cuda_aot.runtime.arch import Arch, runs_ptx
from hatch_cuda_aot.toolchain import Line

__all__ = ["EXPECTED", "SHARING", "WORDS", "Target", "parse_spelling", "resolve", "share_fronts"]

#: Words that stand for several architectures; what they mean depends on the compiler or on the machine.
WORDS = ("all", "all-major", "native")

#: Which cubins are made from one front-end pass: see `share_fronts`.
SHARING = ("none", "major", "all")

EXPECTED = (
    "expected sm_XY[a|f] (cubin), compute_XY[a|f] (PTX), sm_XY@compute_XY (cubin from another front-end pass), CMake's 90, "
    "90-real, 90-virtual, PyTorch's 9.0, 9.0+PTX, or one of " + ", ".join(WORDS)
)


@dataclass(frozen=True, slots=True)
class Target:
    """One image to build: its architecture, and the virtual architecture that its source is compiled for.

    `fixed` says that the user named the latter, so that nothing else may be put in its place.
    """

    image: Arch
    front: Arch
    fixed: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        usual = self.front == self.image.as_virtual
        return str(self.image) if usual else f"{self.image}@{self.front}"

    @property
    def archs(self) -> tuple[Arch, Arch]:
        """Both architectures, which the compiler must know."""
        return self.image, self.front


def parse_spelling(text: str) -> tuple[Target, ...] | str:
    """Return the targets that one item of ``archs`` asks for, or the word itself if it is one of `WORDS`.

    Raises:
        ValueError: saying what is wrong, and what is accepted.

    """
    if text in WORDS:
        return text
    for pattern, meaning in _SPELLINGS:
        if match := re.fullmatch(pattern, text):
            return meaning(match)
    message = f"{text!r} is not an architecture: {EXPECTED}"
    raise ValueError(message)


def resolve(
    items: Iterable[tuple[Target, ...] | str], line: Line | None, native: Callable[[], Sequence[int]]
) -> tuple[Target, ...]:
    """Return the targets of a whole list, in a canonical order and each once.

    Args:
        items: what `parse_spelling` returned.
        line: the CUDA line; None while it is still to be chosen, which only ``all`` and ``all-major`` cannot do with.
        native: gives the compute capabilities of the GPUs of this machine.

    """
    targets: set[Target] = set()
    for item in items:
        if not isinstance(item, str):
            targets.update(item)
        elif item == "native":
            targets.update(_real(cc) for cc in native())
        elif line is not None:
            targets.update(_all(line) if item == "all" else _all_major(line))
    return tuple(sorted(targets, key=lambda target: (target.image.virtual, target.image.cc, str(target))))


def share_fronts(targets: Sequence[Target], sharing: str) -> tuple[Target, ...]:
    """Let cubins be made from the front-end pass of the lowest architecture among them.

    PTX, architectures with a suffix and those whose pass the user named (``sm_86@compute_80``) stay as they are.

    Args:
        targets: the images of a module.
        sharing: ``"none"``, ``"major"`` for the cubins of each major version, or ``"all"``.

    """
    lowest: dict[int, Arch] = {}
    for target in targets:
        if (group := _group(target, sharing)) is not None:
            lowest[group] = min(lowest.get(group, target.front), target.front)
    return tuple(
        target if (group := _group(target, sharing)) is None else replace(target, front=lowest[group])
        for target in targets
    )


def _group(target: Target, sharing: str) -> int | None:
    """Return the number of the group that `target` shares a pass with, or None if it has its own."""
    if sharing == "none" or target.fixed or target.image.virtual or target.image.suffix:
        return None
    return target.image.cc // 10 if sharing == "major" else 0


def _all(line: Line) -> list[Target]:
    """Nvcc's ``-arch=all``: machine code for everything it supports, PTX for its highest major version."""
    return [*map(_real, line.ccs), _virtual(_highest_major(line))]


def _all_major(line: Line) -> list[Target]:
    """Nvcc's ``-arch=all-major``: machine code for its first architecture and each ``X0``, PTX for the highest of them."""
    majors = {line.ccs[0], *(cc for cc in line.ccs if cc % 10 == 0)}
    return [*map(_real, sorted(majors)), _virtual(_highest_major(line))]


def _highest_major(line: Line) -> int:
    return max(cc for cc in line.ccs if cc % 10 == 0)


def _real(cc: int, suffix: str = "") -> Target:
    return Target(Arch(cc, suffix), Arch(cc, suffix, virtual=True))


def _virtual(cc: int, suffix: str = "") -> Target:
    arch = Arch(cc, suffix, virtual=True)
    return Target(arch, arch)


def _nvidia(match: re.Match[str]) -> tuple[Target, ...]:
    arch = Arch.parse(match[1])
    return (_virtual(arch.cc, arch.suffix) if arch.virtual else _real(arch.cc, arch.suffix),)


def _split(match: re.Match[str]) -> tuple[Target, ...]:
    image, front = Arch.parse(match[1]), Arch.parse(match[2])
    if runs_ptx(front, image.cc) is not None or (front.suffix == "a" and image.suffix != "a"):
        message = f"{match[0]!r}: {image} cannot be made from {front}, which it does not run"
        raise ValueError(message)
    return (Target(image, front, fixed=True),)


def _cmake(match: re.Match[str]) -> tuple[Target, ...]:
    cc, suffix, kind = int(match[1]), match[2], match[3]
    both = (_real(cc, suffix), _virtual(cc, suffix))
    return {"-real": both[:1], "-virtual": both[1:], None: both}[kind]


def _pytorch(match: re.Match[str]) -> tuple[Target, ...]:
    cc, suffix = int(match[1]) * 10 + int(match[2]), match[3]
    return (_real(cc, suffix), _virtual(cc, suffix)) if match[4] else (_real(cc, suffix),)


_SPELLINGS: tuple[tuple[str, Callable[[re.Match[str]], tuple[Target, ...]]], ...] = (
    (r"((?:sm|compute)_[1-9][0-9]{1,2}[af]?)", _nvidia),
    (r"(sm_[1-9][0-9]{1,2}[af]?)@(compute_[1-9][0-9]{1,2}[af]?)", _split),
    (r"([1-9][0-9]{1,2})([af]?)(-real|-virtual)?", _cmake),
    (r"([1-9][0-9]?)\.([0-9])([af]?)(\+PTX)?", _pytorch),
)
