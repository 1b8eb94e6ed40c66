"""What a build makes, as values: modules with their kernels, variables and images."""

from __future__ import annotations

from dataclasses import dataclass

from hatch_cuda_aot.compile.ptx import Param, Variable
from hatch_cuda_aot.compile.ptxas import Resources
from hatch_cuda_aot.runtime.arch import Arch

__all__ = ["Image", "Kernel", "ModuleResult"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a module: its name, symbol and parameters."""

    name: str
    symbol: str
    params: tuple[Param, ...]


@dataclass(frozen=True, slots=True)
class Image:
    """One cubin or PTX text.

    Attributes:
        arch: what it is for; a virtual architecture means PTX.
        front: the virtual architecture that its source was compiled for.
        data: the bytes of the file.
        min_driver: CUDA version (13000 for 13.0) of the oldest driver that can load it.
        ptx_version: version of the PTX ISA, for PTX.
        kernels: the kernels in it by name, with what each takes (None in PTX, where that is not known yet).

    """

    arch: Arch
    front: Arch
    data: bytes
    min_driver: int
    ptx_version: str | None
    kernels: dict[str, Resources | None]

    @property
    def kind(self) -> str:
        """``"ptx"`` or ``"cubin"``."""
        return "ptx" if self.arch.virtual else "cubin"


@dataclass(frozen=True, slots=True)
class ModuleResult:
    """One module: kernels sorted by name, variables by source name, images in the order of the plan, warnings by place."""

    name: str
    kernels: tuple[Kernel, ...]
    variables: dict[str, Variable]
    images: tuple[Image, ...]
    warnings: tuple[tuple[str, str], ...]
