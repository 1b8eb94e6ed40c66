"""Says which image each module uses on a device, and why: as a table for people and as data for programs."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .arch import format_cc, format_cuda
from .select import CHOSEN, USABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .manifest import ModuleManifest
    from .select import Candidate, DeviceFacts

__all__ = ["Report", "Row"]

#: A table never gets wider than this many columns.
WIDTH = 100


@dataclass(frozen=True, slots=True)
class Row:
    """One image with its verdict.

    Attributes:
        module: the module.
        image: the image's file name.
        arch: such as ``sm_90``; empty for source, which is compiled for the device.
        kind: ``"cubin"``, ``"ptx"``, or ``"source"`` for the source that travels in the package, which NVRTC compiles.
        verdict: ``"chosen"``, ``"usable"``, ``"refused"`` (by the driver, when it was tried) or ``"rejected"``.
        reason: why.
        way: how it becomes what the device runs: ``"load"``, ``"jit"``, ``"jit-lowered"``, ``"nvjitlink"`` or ``"source"``;
            empty where it does not run.

    """

    module: str
    image: str
    arch: str
    kind: str
    verdict: str
    reason: str
    way: str = ""

    @classmethod
    def of(cls, module: str, candidate: Candidate) -> Row:
        """Return the row of `candidate`, an image of `module`."""
        image = candidate.image
        return cls(module, image.file, str(image.arch), image.kind, candidate.verdict, candidate.reason, candidate.way)

    @classmethod
    def of_source(cls, module: str, file: str, verdict: str) -> Row:
        """Return the row of the source of `module`."""
        return cls(module, file, "", "source", verdict, "compiled by NVRTC, if that is installed", "source")


@dataclass(frozen=True, slots=True)
class Report:
    """Every image of a kernel's module, or of all modules, with its verdict for one device.

    `str()` is a table at most 100 columns wide.

    Attributes:
        device: the device, which may be one that is not there.
        rows: the images, module by module, the one that is loaded first.
        kernel: the kernel that was asked about, or None for all modules.

    """

    device: DeviceFacts
    rows: tuple[Row, ...]
    kernel: str | None = None

    @classmethod
    def of(
        cls, device: DeviceFacts, kernel: str | None, ranked: Iterable[tuple[ModuleManifest, Sequence[Candidate]]]
    ) -> Report:
        """Return the report on modules, each with its images ranked for `device`."""
        rows = []
        for module, candidates in ranked:
            rows += [Row.of(module.name, candidate) for candidate in candidates]
            if module.source is not None:
                needed = not candidates or candidates[0].verdict != CHOSEN
                rows.append(Row.of_source(module.name, module.source["main"], CHOSEN if needed else USABLE))
        return cls(device, tuple(rows), kernel)

    @property
    def chosen(self) -> tuple[Row, ...]:
        """The rows of the images that are loaded, at most one per module."""
        return tuple(row for row in self.rows if row.verdict == "chosen")

    def to_dict(self) -> dict[str, Any]:
        """Return the same as data that `json` can write."""
        device = self.device
        return {
            "kernel": self.kernel,
            "device": {
                "ordinal": device.ordinal,
                "name": device.name,
                "compute_capability": format_cc(device.cc),
                "driver": None if device.driver is None else format_cuda(device.driver),
                "tegra": device.tegra,
            },
            "images": [{field: getattr(row, field) for field in Row.__slots__} for row in self.rows],
        }

    def __str__(self) -> str:
        subject = f"kernel {self.kernel} on " if self.kernel else ""
        return "\n".join([*textwrap.wrap(f"{subject}{self.device}", WIDTH), *self.table()])

    def table(self) -> list[str]:
        """Return the lines of the table, without the line that names the device."""
        header = ("image", "kind", "verdict", "reason")
        return _table([header, *((row.image, row.kind, row.verdict, row.reason) for row in self.rows)])


def _table(rows: Iterable[tuple[str, str, str, str]]) -> list[str]:
    """Lay `rows` out in columns; the first and the last wrap, so that no line exceeds `WIDTH`."""
    rows = list(rows)
    image, kind, verdict = (max(len(row[column]) for row in rows) for column in range(3))
    image = min(image, WIDTH * 2 // 5)
    reason = WIDTH - image - kind - verdict - 6
    lines = []
    for row in rows:
        images = textwrap.wrap(row[0], image) or [""]
        reasons = textwrap.wrap(row[3], reason) or [""]
        for index in range(max(len(images), len(reasons))):
            cells = (
                images[index] if index < len(images) else "",
                row[1] if index == 0 else "",
                row[2] if index == 0 else "",
                reasons[index] if index < len(reasons) else "",
            )
            line = f"{cells[0]:<{image}}  {cells[1]:<{kind}}  {cells[2]:<{verdict}}  {cells[3]}"
            lines.append(line.rstrip())
    return lines
