"""The build, from configuration to results: `build_project` reads as the data flow of the design.

Knows nothing of hatchling and of where files go; a `Reporter` hears what happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Protocol

from hatch_cuda_aot.archs import Target
from hatch_cuda_aot.cache import Cache, key_of
from hatch_cuda_aot.compile import ptx
from hatch_cuda_aot.compile.pool import WorkerPool, default_jobs
from hatch_cuda_aot.compile.ptxas import Resources
from hatch_cuda_aot.compile.tasks import (
    AssembleResult,
    AssembleTask,
    Compiler,
    FrontResult,
    FrontTask,
    ProbeTask,
    Result,
)
from hatch_cuda_aot.config import Config
from hatch_cuda_aot.errors import BuildError, CompileError, ResultError
from hatch_cuda_aot.names import kernel_names, source_name
from hatch_cuda_aot.native import visible_ccs
from hatch_cuda_aot.plan import Job, Module, Plan, make_plan, select_line
from hatch_cuda_aot.results import Image, Kernel, ModuleResult
from hatch_cuda_aot.sources import read_tree
from hatch_cuda_aot.toolchain import Toolchain, check_platform

__all__ = ["BuildResult", "Reporter", "build_project", "compile_plan", "plan_project"]


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a build made, the compiler that made it, and how many tasks the cache answered."""

    modules: tuple[ModuleResult, ...]
    toolchain: Toolchain
    tasks: int
    hits: int


class Reporter(Protocol):
    """Hears what a build does."""

    def planned(self, plan: Plan, tasks: int) -> None:
        """Work is about to start; `tasks` compilations and assemblies will be reported."""

    def done(self, module: str, arch: str, step: str, log: str, *, cached: bool) -> None:
        """One of them is done, with the compiler's warnings."""


def build_project(config: Config, reporter: Reporter, cache: Cache | None) -> BuildResult:
    """Compile a project's modules.

    Raises:
        BuildError: whatever is wrong, after everything that could be compiled was.

    """
    plan = plan_project(config)
    return compile_plan(plan, config.jobs or default_jobs(), reporter, cache)


def plan_project(config: Config) -> Plan:
    """Decide what to compile; no compiler is needed for that."""
    line = select_line(config.cuda, config.modules, visible_ccs)
    modules = [
        Module(module, read_tree(config.root, module.sources, module.settings.include_dirs))
        for module in config.modules
    ]
    return make_plan(modules, line, visible_ccs)


def compile_plan(plan: Plan, jobs: int, reporter: Reporter, cache: Cache | None) -> BuildResult:
    """Run the jobs of `plan` in `jobs` worker processes and put the results together."""
    check_platform()
    tasks = len(plan.jobs) + sum(not target.image.virtual for target in plan.images)
    with WorkerPool(max(1, min(jobs, tasks))) as pool:
        toolchain = pool.submit(ProbeTask(Compiler(plan.line.version, plan.needs))).result()
        assert isinstance(toolchain, Toolchain)
        reporter.planned(plan, tasks)
        run = _Run(pool, toolchain, reporter, cache)
        fronts, cubins = run.all(plan.jobs)
    if cache is not None:
        cache.trim()
    modules = _collect(plan, fronts, cubins)
    return BuildResult(modules, toolchain, tasks, run.hits)


class _Run:
    """The jobs under way: a front end's images are started as soon as it is done."""

    def __init__(self, pool: WorkerPool, toolchain: Toolchain, reporter: Reporter, cache: Cache | None) -> None:
        self._pool = pool
        self._toolchain = toolchain
        self._reporter = reporter
        self._cache = cache
        self._waiting: dict[Future[Result], tuple[int, Job, Target | None, FrontTask | AssembleTask]] = {}
        self._failures: dict[tuple[int, str], BuildError] = {}
        self._fronts: dict[int, FrontResult] = {}
        self._cubins: dict[tuple[int, Target], AssembleResult] = {}
        self.hits = 0

    def all(self, jobs: Sequence[Job]) -> tuple[dict[int, FrontResult], dict[tuple[int, Target], AssembleResult]]:
        """Do every job, failed ones or not; then raise what the first failing one said.

        Front ends are started by options, so that each worker can serve many (see `FrontTask.affinity`).
        """
        for number, job in sorted(enumerate(jobs), key=lambda item: (item[1].front.affinity, item[0])):
            self._start(number, job, None, job.front)
        while self._waiting:
            finished, _ = wait(self._waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                number, job, target, task = self._waiting.pop(future)
                try:
                    result = future.result()
                except BuildError as error:
                    self._failures[number, str(target or "")] = error
                    continue
                if self._cache is not None:
                    assert isinstance(result, (FrontResult, AssembleResult))
                    self._cache.put(key_of(task, self._toolchain), result)
                self._finish(number, job, target, task, result, cached=False)
        if self._failures:
            raise _first_of(self._failures)
        return self._fronts, self._cubins

    def _start(self, number: int, job: Job, target: Target | None, task: FrontTask | AssembleTask) -> None:
        result = self._cache.get(key_of(task, self._toolchain)) if self._cache is not None else None
        if result is not None:
            self.hits += 1
            self._finish(number, job, target, task, result, cached=True)
            return
        # Images come first: they are what front ends are made for, and free the memory of their PTX.
        future = self._pool.submit(task, priority=0 if target is None else -1)
        self._waiting[future] = (number, job, target, task)

    def _finish(
        self,
        number: int,
        job: Job,
        target: Target | None,
        task: FrontTask | AssembleTask,
        result: Result,
        *,
        cached: bool,
    ) -> None:
        if isinstance(result, FrontResult):
            self._fronts[number] = result
            for each in job.targets:
                if not each.image.virtual:
                    next_task = AssembleTask(job.front.compiler, job.front.module, each.image, result.ptx, job.ptxas)
                    self._start(number, job, each, next_task)
        elif isinstance(result, AssembleResult) and target is not None:
            self._cubins[number, target] = result
        log = result.log if isinstance(result, (FrontResult, AssembleResult)) else ""
        step = "compile" if target is None else "assemble"
        self._reporter.done(task.module, str(task.arch), step, log, cached=cached)


def _first_of(failures: Mapping[tuple[int, str], BuildError]) -> BuildError:
    """Return the failure of the first job of the plan, with a count of the others."""
    first = failures[min(failures)]
    others = sorted({_where(error) for key, error in failures.items() if key != min(failures)})
    if others:
        shown = ", ".join(others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
        first.args = (f"{first}\n{len(others)} other {'job' if len(others) == 1 else 'jobs'} failed too: {shown}",)
    return first


def _where(error: BuildError) -> str:
    return f"{error.module} for {error.arch}" if isinstance(error, CompileError) else str(error).partition("\n")[0]


def _collect(
    plan: Plan, fronts: Mapping[int, FrontResult], cubins: Mapping[tuple[int, Target], AssembleResult]
) -> tuple[ModuleResult, ...]:
    by_module: dict[str, list[int]] = {}
    for number, job in enumerate(plan.jobs):
        by_module.setdefault(job.front.module, []).append(number)
    return tuple(_collect_module(name, plan, numbers, fronts, cubins) for name, numbers in sorted(by_module.items()))


def _collect_module(
    name: str,
    plan: Plan,
    numbers: Sequence[int],
    fronts: Mapping[int, FrontResult],
    cubins: Mapping[tuple[int, Target], AssembleResult],
) -> ModuleResult:
    parsed = {number: ptx.parse(fronts[number].ptx.decode()) for number in numbers}
    expressions: dict[str, str] = {}
    for number in numbers:
        for expression, symbol in fronts[number].symbols.items():
            if expressions.setdefault(expression, symbol) != symbol:
                raise _differs(plan.jobs[number], f"the kernel {expression!r} has another symbol")
    names = kernel_names(sorted({symbol for module in parsed.values() for symbol in module.kernels}), expressions)
    kernels: dict[str, Kernel] = {}
    variables: dict[str, ptx.Variable] = {}
    images: list[Image] = []
    warnings: list[tuple[str, str]] = []
    for number in numbers:
        job, front, module = plan.jobs[number], fronts[number], parsed[number]
        for symbol, params in module.kernels.items():
            kernel = Kernel(names[symbol], symbol, params)
            if kernels.setdefault(kernel.name, kernel) != kernel:
                raise _differs(job, f"the kernel {kernel.name!r} has other parameters")
        for variable in module.variables.values():
            if not variable.symbol.startswith("$") and not ptx.is_toolkit_symbol(variable.symbol):
                variables.setdefault(variable.symbol, variable)
        if front.log:
            warnings.append((f"{name} for {job.front.arch}", front.log))
        for target in job.targets:
            held = {names[symbol]: symbol for symbol in module.kernels}
            if target.image.virtual:
                texts = dict.fromkeys(sorted(held))
                images.append(Image(target.image, target.front, front.ptx, front.ptx_driver, module.version, texts))
                continue
            cubin = cubins[number, target]
            if cubin.log:
                warnings.append((f"{name} for {target.image}", cubin.log))
            resources: dict[str, Resources | None] = {
                kernel: cubin.resources[symbol] for kernel, symbol in sorted(held.items())
            }
            images.append(Image(target.image, target.front, cubin.cubin, plan.line.minimum_driver, None, resources))
    images.sort(key=lambda image: (image.arch.virtual, image.arch.cc, image.arch.suffix))
    return ModuleResult(
        name,
        tuple(kernels[key] for key in sorted(kernels)),
        _name_variables(variables.values()),
        tuple(images),
        tuple(warnings),
    )


def _name_variables(variables: Iterable[ptx.Variable]) -> dict[str, ptx.Variable]:
    found: dict[str, list[ptx.Variable]] = {}
    for variable in variables:
        found.setdefault(source_name(variable.symbol), []).append(variable)
    named = {}
    for name, group in found.items():
        for variable in group:
            named[name if len(group) == 1 else variable.symbol] = variable
    return dict(sorted(named.items()))


def _differs(job: Job, what: str) -> ResultError:
    front = job.front
    message = (
        f"module {front.module!r}: for {front.arch} {what} than for the architectures before. One kernel must have one "
        "signature: give the variants different names"
    )
    return ResultError(message, module=front.module, arch=str(front.arch), stage="NVRTC", log="")
