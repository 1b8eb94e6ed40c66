"""Puts the results of a plan's tasks together to modules, and refuses what does not fit together.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hatch_cuda_aot.archs import Target
from hatch_cuda_aot.compile import ptx
from hatch_cuda_aot.compile.tasks import AssembleResult, FloorResult, FrontResult, ImageResult, Resources
from hatch_cuda_aot.errors import ResultError
from hatch_cuda_aot.names import kernel_names, source_name
from hatch_cuda_aot.plan import Job, Plan
from hatch_cuda_aot.results import Image, Kernel, ModuleResult, PtxIsa, Source
from hatch_cuda_aot.templates import kernel_templates

__all__ = ["collect"]


def collect(
    plan: Plan, fronts: Mapping[int, FrontResult], images: Mapping[tuple[int, Target], ImageResult]
) -> tuple[ModuleResult, ...]:
    """Return the modules of `plan`, sorted by name.

    Args:
        plan: what was to be done.
        fronts: the result of each job's front end, by the job's place in the plan.
        images: the result of each image, by that place and the target.

    Raises:
        ResultError: if a kernel differs between architectures.

    """
    by_module: dict[str, list[int]] = {}
    for number, job in enumerate(plan.jobs):
        by_module.setdefault(job.front.module, []).append(number)
    return tuple(_Module(plan, numbers, fronts, images).result() for _, numbers in sorted(by_module.items()))


class _Module:
    """The jobs of one module and what became of them."""

    def __init__(
        self,
        plan: Plan,
        numbers: Sequence[int],
        fronts: Mapping[int, FrontResult],
        images: Mapping[tuple[int, Target], ImageResult],
    ) -> None:
        self._plan = plan
        self._jobs = {number: plan.jobs[number] for number in numbers}
        self._fronts = fronts
        self._images = images
        self._ptx = {number: ptx.parse(fronts[number].ptx.decode()) for number in numbers}
        symbols = {symbol for module in self._ptx.values() for symbol in module.kernels}
        self._names = kernel_names(sorted(symbols), self._expressions())

    def result(self) -> ModuleResult:
        first = next(iter(self._jobs.values()))
        images = [self._image(number, target) for number, job in self._jobs.items() for target in job.targets]
        return ModuleResult(
            name=first.front.module,
            kernels=self._kernels(),
            variables=self._variables(),
            images=tuple(sorted(images, key=lambda image: (image.arch.virtual, image.arch.cc, image.arch.suffix))),
            warnings=self._warnings(),
            source=_source(first),
        )

    def _expressions(self) -> dict[str, str]:
        """Return the symbol of each name expression, the same on every architecture."""
        found: dict[str, str] = {}
        for number, job in self._jobs.items():
            for expression, symbol in self._fronts[number].symbols.items():
                if found.setdefault(expression, symbol) != symbol:
                    raise _differs(job, f"the kernel {expression!r} has another symbol")
        return found

    def _kernels(self) -> tuple[Kernel, ...]:
        found: dict[str, Kernel] = {}
        for number, job in self._jobs.items():
            for symbol, params in self._ptx[number].kernels.items():
                for name in self._names[symbol]:
                    kernel = Kernel(name, symbol, params)
                    if found.setdefault(name, kernel) != kernel:
                        raise _differs(job, f"the kernel {name!r} has other parameters")
        return tuple(found[name] for name in sorted(found))

    def _variables(self) -> dict[str, ptx.Variable]:
        """Return the project's variables by name; those that share one are called by their symbols."""
        variables = {
            variable.symbol: variable
            for module in self._ptx.values()
            for variable in module.variables.values()
            if not variable.symbol.startswith("$") and not ptx.is_toolkit_symbol(variable.symbol)
        }
        found: dict[str, list[ptx.Variable]] = {}
        for variable in variables.values():
            found.setdefault(source_name(variable.symbol), []).append(variable)
        named = {
            name if len(group) == 1 else variable.symbol: variable
            for name, group in found.items()
            for variable in group
        }
        return dict(sorted(named.items()))

    def _image(self, number: int, target: Target) -> Image:
        front, module, result = self._fronts[number], self._ptx[number], self._images[number, target]
        held = dict(sorted((name, symbol) for symbol in module.kernels for name in self._names[symbol]))
        if isinstance(result, FloorResult):
            isa = PtxIsa(module.version, result.version, result.driver)
            return Image(target.image, target.front, front.ptx, front.ptx_driver, isa, dict.fromkeys(held))
        taken: dict[str, Resources | None] = {name: result.resources[symbol] for name, symbol in held.items()}
        return Image(target.image, target.front, result.cubin, self._plan.line.minimum_driver, None, taken)

    def _warnings(self) -> tuple[tuple[str, str], ...]:
        return tuple((place, log) for place, log in self._logs() if log)

    def _logs(self) -> Iterable[tuple[str, str]]:
        for number, job in self._jobs.items():
            yield f"{job.front.module} for {job.front.arch}", self._fronts[number].log
            for target in job.targets:
                result = self._images[number, target]
                if isinstance(result, AssembleResult):
                    yield f"{job.front.module} for {target.image}", result.log


def _source(job: Job) -> Source | None:
    """Return what the package needs to compile the job's module again, where it is to carry that."""
    if not job.embed_source:
        return None
    front = job.front
    (main,) = front.sources
    return Source(main, front.nvrtc, job.ptxas, front.tree.files, kernel_templates(front.tree.texts()))


def _differs(job: Job, what: str) -> ResultError:
    front = job.front
    message = (
        f"module {front.module!r}: for {front.arch} {what} than for the architectures before. One kernel must have one "
        "signature: give the variants different names"
    )
    return ResultError(message, module=front.module, arch=str(front.arch), stage="NVRTC", log="")
