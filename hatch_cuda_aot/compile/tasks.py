"""The units of work, as values: everything a task needs travels with it, to another process or another machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.sources import SourceTree
from hatch_cuda_aot.toolchain import Needs, Toolchain

__all__ = [
    "AssembleResult",
    "AssembleTask",
    "Compiler",
    "FloorResult",
    "FloorTask",
    "FrontResult",
    "FrontTask",
    "ImageResult",
    "ImageTask",
    "ProbeTask",
    "Resources",
    "Result",
    "Task",
    "step_of",
]


@dataclass(frozen=True, slots=True)
class Compiler:
    """Which compiler a worker must find in its own environment."""

    line: str
    needs: Needs = field(default_factory=Needs)


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """Find the compiler, say what it is, and refuse what it does not support of `archs`.

    Attributes:
        identify: say exactly which headers it has, too.

    """

    compiler: Compiler
    archs: tuple[Arch, ...] = ()
    identify: bool = True


@dataclass(frozen=True, slots=True)
class FrontTask:
    """CUDA C++ to PTX, for one virtual architecture.

    Attributes:
        module: the module's name, for messages.
        arch: the virtual architecture.
        tree: the files that the sources may see.
        sources: the files to compile, as paths in `tree`; several are device-linked.
        expressions: name expressions to instantiate, and for each the source that does it.
        nvrtc: NVRTC's options but for ``-arch`` and the toolkit's header folders.
        nvjitlink: nvJitLink's options.
        prune: drop the toolkit's unused constants.
        start: what `precompiled.start_of` says, where it shall be precompiled; makes no difference to the result.

    """

    compiler: Compiler
    module: str
    arch: Arch
    tree: SourceTree
    sources: tuple[str, ...]
    expressions: tuple[tuple[str, str], ...]
    nvrtc: tuple[str, ...]
    nvjitlink: tuple[str, ...]
    prune: bool
    start: str = ""

    @property
    def affinity(self) -> tuple[str, ...]:
        """What must be the same for all front ends of one process: NVRTC remembers some options."""
        return self.nvrtc

    @property
    def defines(self) -> dict[str, str]:
        """The macros among NVRTC's options."""
        flag = "--define-macro="
        pairs = (option[len(flag) :].partition("=") for option in self.nvrtc if option.startswith(flag))
        return {name: value for name, _, value in pairs}

    def visible(self, folders: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return those of the toolkit's header folders, given with their short names, that the sources may see.

        cuRAND's is not for all, since whether it is there depends on the other modules of the build.
        """
        return [(short, what) for short, what in folders if short != "curand" or self.tree.includes_curand]


@dataclass(frozen=True, slots=True)
class FrontResult:
    """The PTX (pruned where asked for), each expression's symbol, the driver its ISA needs, and the warnings."""

    ptx: bytes
    symbols: dict[str, str]
    ptx_driver: int
    log: str


@dataclass(frozen=True, slots=True)
class AssembleTask:
    """PTX to the cubin of one real architecture."""

    compiler: Compiler
    module: str
    arch: Arch
    ptx: bytes
    ptxas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes: registers a thread, shared memory a block and local memory and spills a thread, in bytes."""

    registers: int = 0
    shared: int = 0
    local: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


@dataclass(frozen=True, slots=True)
class AssembleResult:
    """The cubin, the resources of each kernel by symbol, and the warnings."""

    cubin: bytes
    resources: dict[str, Resources]
    log: str


@dataclass(frozen=True, slots=True)
class FloorTask:
    """Find the lowest version of the PTX ISA under which a PTX text still assembles."""

    compiler: Compiler
    module: str
    arch: Arch
    ptx: bytes
    ptxas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FloorResult:
    """That version, and the CUDA version (13000 for 13.0) of the first driver that reads it."""

    version: str
    driver: int


#: What follows a front end, once for each image: a cubin is made, or PTX is examined.
ImageTask = AssembleTask | FloorTask
ImageResult = AssembleResult | FloorResult

Task = ProbeTask | FrontTask | ImageTask
Result = Toolchain | FrontResult | ImageResult


def step_of(task: Task) -> str:
    """Return what a task does, in one word for people."""
    return {ProbeTask: "probe", FrontTask: "compile", AssembleTask: "assemble", FloorTask: "examine"}[type(task)]
