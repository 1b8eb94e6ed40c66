"""Compilation without a project: `compile_source`, the pipeline of the build hook on a string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hatch_cuda_aot.build import compile_plan
from hatch_cuda_aot.cache import open_cache
from hatch_cuda_aot.compile.parts import installed_line
from hatch_cuda_aot.compile.ptx import Variable
from hatch_cuda_aot.compile.starter import default_jobs
from hatch_cuda_aot.config import ModuleConfig, load_settings
from hatch_cuda_aot.native import visible_ccs
from hatch_cuda_aot.plan import Module, Plan, make_plan, select_line
from hatch_cuda_aot.results import Image, Kernel
from hatch_cuda_aot.sources import SourceTree

__all__ = ["CompiledSource", "compile_source"]


@dataclass(frozen=True, slots=True)
class CompiledSource:
    """What `compile_source` made.

    Attributes:
        images: a cubin or PTX for each architecture; `Image.data` are the bytes, `Image.kernels` the resources by name.
        kernels: the kernels, with symbol (lowered name) and parameters.
        variables: the ``__device__`` and ``__constant__`` variables of the source, by name.
        log: the compilers' warnings, each under the architecture that it came from.
        cuda: the CUDA line that compiled.

    """

    images: tuple[Image, ...]
    kernels: tuple[Kernel, ...]
    variables: dict[str, Variable]
    log: str
    cuda: str

    def image(self, arch: str) -> Image:
        """Return the image for an architecture, such as ``"sm_90"`` or ``"compute_75"``.

        Raises:
            KeyError: naming the architectures that there are.

        """
        found = {str(image.arch): image for image in self.images}
        if arch not in found:
            message = f"no image for {arch!r}; there are {', '.join(found)}"
            raise KeyError(message)
        return found[arch]

    def symbol(self, kernel: str) -> str:
        """Return the symbol (lowered name) of a kernel; the spacing in its name does not matter.

        Raises:
            KeyError: naming the kernels that there are.

        """
        from hatch_cuda_aot.runtime.manifest import canonical_name

        found = {each.name: each.symbol for each in self.kernels}
        if canonical_name(kernel) not in found:
            message = f"no kernel {kernel!r}; there are {', '.join(found)}"
            raise KeyError(message)
        return found[canonical_name(kernel)]


def compile_source(
    text: str,
    *,
    archs: Sequence[str],
    kernels: Sequence[str] = (),
    name: str = "source.cu",
    headers: Mapping[str, str] | None = None,
    cuda: str | None = None,
    std: str = "c++17",
    defines: Mapping[str, str | int | float | bool] | None = None,
    options: Sequence[str] = (),
    prune: bool = True,
    lineinfo: bool = False,
    debug: bool = False,
    jobs: int | None = None,
) -> CompiledSource:
    """Compile CUDA C++ for several architectures; neither GPU nor driver is needed.

    Results are kept in the user's cache, as those of builds are.

    Args:
        text: the source.
        archs: as the key ``archs`` takes them, such as ``["sm_80", "sm_90a", "compute_75"]``.
        kernels: name expressions of template instantiations, such as ``"axpy<float>"``; other kernels are found by
            themselves.
        name: what diagnostics and ``__FILE__`` call the source.
        headers: further files by path, for ``#include "path"`` relative to `name`.
        cuda: the CUDA line, which must be installed; default the installed one.
        std: the language standard.
        defines: macros by name.
        options: further compiler options.
        prune: drop the toolkit's unused constants.
        lineinfo: keep line numbers.
        debug: compile for the debugger.
        jobs: number of worker processes; default one a CPU.

    Raises:
        ConfigError: if an argument is wrong.
        NoCompilerError: if no compiler of that line is installed.
        UnsupportedArchError: if the line does not know an architecture.
        CompileError: if the source does not compile.

    """
    table: dict[str, Any] = {
        "archs": list(archs),
        "std": std,
        "defines": dict(defines or {}),
        "options": list(options),
        "prune": prune,
        "lineinfo": lineinfo,
        "debug": debug,
    }
    module = ModuleConfig(
        "source", (name,), tuple(kernels), load_settings(table, "compile_source()"), "compile_source()"
    )
    tree = SourceTree.of_texts({**(headers or {}), name: text})
    result = compile_plan(_plan(Module(module, tree), cuda), jobs or default_jobs(), _Silence(), open_cache())
    (built,) = result.modules
    log = "\n".join(f"{place}:\n{words}" for place, words in built.warnings)
    return CompiledSource(built.images, built.kernels, built.variables, log, result.toolchain.line)


def _plan(module: Module, cuda: str | None) -> Plan:
    chosen = installed_line().version if cuda is None else cuda
    return make_plan([module], select_line(chosen, [module.config], visible_ccs), visible_ccs)


class _Silence:
    """A `Reporter` that says nothing; the log is in the result."""

    def planned(self, plan: Plan, tasks: int) -> None:
        pass

    def done(self, module: str, arch: str, step: str, log: str, *, cached: bool) -> None:
        pass
