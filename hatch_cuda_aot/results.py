"""What a build makes, as values: modules with their kernels, variables and images."""

from __future__ import annotations

from dataclasses import dataclass

from hatch_cuda_aot.compile.ptx import Param, Variable
from hatch_cuda_aot.compile.tasks import Resources
from hatch_cuda_aot.runtime.arch import Arch

__all__ = ["Image", "Kernel", "ModuleResult", "PtxIsa", "Source"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a module: its name, symbol and parameters."""

    name: str
    symbol: str
    params: tuple[Param, ...]


@dataclass(frozen=True, slots=True)
class PtxIsa:
    """Versions of the PTX ISA: the one a text declares, and the lowest under which it assembles just as well.

    Attributes:
        version: what its ``.version`` line says, as ``"9.0"``.
        floor: the lowest that ptxas takes in its place.
        floor_driver: CUDA version (13000 for 13.0) of the first driver that reads `floor`.

    """

    version: str
    floor: str
    floor_driver: int


@dataclass(frozen=True, slots=True)
class Image:
    """One cubin or PTX text.

    Attributes:
        arch: what it is for; a virtual architecture means PTX.
        front: the virtual architecture that its source was compiled for.
        data: the bytes of the file.
        min_driver: CUDA version (13000 for 13.0) of the oldest driver that can load it.
        isa: the versions of the PTX ISA that matter, for PTX; None for a cubin.
        kernels: the kernels in it by name, with what each takes (None in PTX, where that is not known yet).

    """

    arch: Arch
    front: Arch
    data: bytes
    min_driver: int
    isa: PtxIsa | None
    kernels: dict[str, Resources | None]

    @property
    def kind(self) -> str:
        """``"ptx"`` or ``"cubin"``."""
        return "ptx" if self.arch.virtual else "cubin"


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a module, for compiling it again where the package is used.

    Attributes:
        main: the file that is compiled.
        options: NVRTC's, but for ``-arch`` and the toolkit's header folders.
        ptxas: ptxas's.
        files: (path relative to the project, content) of `main` and of every project header that it can include.
        templates: names of the kernel templates in them.

    """

    main: str
    options: tuple[str, ...]
    ptxas: tuple[str, ...]
    files: tuple[tuple[str, bytes], ...]
    templates: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModuleResult:
    """One module: kernels sorted by name, variables by source name, images in the order of the plan, warnings by place.

    `source` is there where the package is to carry it.
    """

    name: str
    kernels: tuple[Kernel, ...]
    variables: dict[str, Variable]
    images: tuple[Image, ...]
    warnings: tuple[tuple[str, str], ...]
    source: Source | None = None
