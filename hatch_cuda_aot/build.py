"""The build, from configuration to results: `build_project` reads as the data flow of the design.

Knows nothing of hatchling and of where files go; a `Reporter` hears what happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Protocol

from hatch_cuda_aot.archs import Target
from hatch_cuda_aot.cache import Cache, key_of
from hatch_cuda_aot.collect import collect
from hatch_cuda_aot.compile.pool import WorkerPool, default_jobs
from hatch_cuda_aot.compile.tasks import (
    AssembleResult,
    AssembleTask,
    Compiler,
    FloorTask,
    FrontResult,
    FrontTask,
    ImageResult,
    ImageTask,
    ProbeTask,
    Result,
)
from hatch_cuda_aot.config import Config
from hatch_cuda_aot.errors import BuildError, CompileError
from hatch_cuda_aot.installed import identify, recall, remember
from hatch_cuda_aot.native import visible_ccs
from hatch_cuda_aot.plan import Job, Module, Plan, in_order, make_plan, priority_of, select_line
from hatch_cuda_aot.results import ModuleResult
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
    tasks = len(plan.jobs) + len(plan.images)
    with WorkerPool(max(1, min(jobs, tasks))) as pool:
        compiler = _Compiler(pool, plan, cache)
        toolchain = compiler.known() or compiler.ask()
        reporter.planned(plan, tasks)
        run = _Run(pool, toolchain, reporter, cache, compiler)
        fronts, images = run.all(plan.jobs)
    if cache is not None:
        cache.trim()
    return BuildResult(collect(plan, fronts, images), toolchain, tasks, run.hits)


class _Compiler:
    """What the installed compiler is.

    The answer of an earlier build holds as long as its wheels are the same.  So a build that finds every result in the
    cache starts no worker; any other still has the compiler found, checked and asked whether it knows the architectures.
    """

    def __init__(self, pool: WorkerPool, plan: Plan, cache: Cache | None) -> None:
        self._pool = pool
        self._plan = plan
        self._folder = cache.folder if cache is not None else None
        self._identity = identify(plan.line, plan.needs) if cache is not None else None
        self._known: Toolchain | None = None
        self._asked = False

    def known(self) -> Toolchain | None:
        """Return what is remembered of it, if that still holds."""
        if self._folder is not None:
            self._known = recall(self._folder, self._identity)
        return self._known

    def ask(self) -> Toolchain:
        """Have a worker find it."""
        found = self._pool.submit(
            ProbeTask(Compiler(self._plan.line.version, self._plan.needs), self._plan.archs)
        ).result()
        assert isinstance(found, Toolchain)
        self._asked = True
        if self._folder is not None and found != self._known:
            remember(self._folder, self._identity, found)
        return found

    def confirm(self) -> None:
        """Ask it, if nobody did yet, before it has to work."""
        if not self._asked and self.ask() != self._known:
            message = f"the compiler of CUDA {self._plan.line.version} was changed without its wheels: build again"
            raise BuildError(message)


class _Run:
    """The jobs under way: a front end's images are started as soon as it is done."""

    def __init__(
        self,
        pool: WorkerPool,
        toolchain: Toolchain,
        reporter: Reporter,
        cache: Cache | None,
        compiler: _Compiler,
    ) -> None:
        self._pool = pool
        self._compiler = compiler
        self._toolchain = toolchain
        self._reporter = reporter
        self._cache = cache
        self._waiting: dict[Future[Result], tuple[int, Job, Target | None, FrontTask | ImageTask]] = {}
        self._failures: dict[tuple[int, str], BuildError] = {}
        self._fronts: dict[int, FrontResult] = {}
        self._images: dict[tuple[int, Target], ImageResult] = {}
        self.hits = 0

    def all(self, jobs: Sequence[Job]) -> tuple[dict[int, FrontResult], dict[tuple[int, Target], ImageResult]]:
        """Do every job, failed ones or not; then raise what the first failing one said."""
        for number in in_order(jobs):
            self._start(number, jobs[number], None, jobs[number].front)
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
                    assert not isinstance(result, Toolchain)
                    self._cache.put(key_of(task, self._toolchain), result)
                self._finish(number, job, target, task, result, cached=False)
        if self._failures:
            raise _first_of(self._failures)
        return self._fronts, self._images

    def _start(self, number: int, job: Job, target: Target | None, task: FrontTask | ImageTask) -> None:
        result = self._cache.get(key_of(task, self._toolchain)) if self._cache is not None else None
        if result is not None:
            self.hits += 1
            self._finish(number, job, target, task, result, cached=True)
            return
        self._compiler.confirm()
        future = self._pool.submit(task, priority=priority_of(task))
        self._waiting[future] = (number, job, target, task)

    def _finish(
        self,
        number: int,
        job: Job,
        target: Target | None,
        task: FrontTask | ImageTask,
        result: Result,
        *,
        cached: bool,
    ) -> None:
        if isinstance(result, FrontResult):
            self._fronts[number] = result
            for each in job.targets:
                kind = FloorTask if each.image.virtual else AssembleTask
                self._start(number, job, each, kind(task.compiler, task.module, each.image, result.ptx, job.ptxas))
        elif target is not None and not isinstance(result, Toolchain):
            self._images[number, target] = result
        log = result.log if isinstance(result, (FrontResult, AssembleResult)) else ""
        step = {FrontTask: "compile", AssembleTask: "assemble", FloorTask: "examine"}[type(task)]
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
