"""The build, from configuration to results: `build_project` reads as the data flow of the design.

Knows nothing of hatchling and of where files go; a `Reporter` hears what happens.
"""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hatch_cuda_aot.archs import Target
from hatch_cuda_aot.cache import Cache, is_cacheable, key_of
from hatch_cuda_aot.collect import collect
from hatch_cuda_aot.compile.starter import default_jobs
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
    step_of,
)
from hatch_cuda_aot.config import Config
from hatch_cuda_aot.errors import BuildError, ClusterError, CompileError
from hatch_cuda_aot.installed import identify, recall, remember
from hatch_cuda_aot.native import visible_ccs
from hatch_cuda_aot.plan import Job, Module, Plan, in_order, make_plan, priority_of, select_line
from hatch_cuda_aot.results import ModuleResult
from hatch_cuda_aot.sources import read_tree
from hatch_cuda_aot.spans import span
from hatch_cuda_aot.toolchain import Toolchain, check_platform

if TYPE_CHECKING:
    from hatch_cuda_aot.compile.dask_pool import DaskPool
    from hatch_cuda_aot.compile.pool import WorkerPool
    from hatch_cuda_aot.compile.starter import Starter

__all__ = ["BuildResult", "Reporter", "build_project", "compile_plan", "plan_project"]


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a build made, the compiler that made it, and how many tasks the cache answered.

    `sources` is what it was made of: the content of each file of the project, by path.
    """

    modules: tuple[ModuleResult, ...]
    toolchain: Toolchain
    tasks: int
    hits: int
    sources: Mapping[str, bytes] = field(default_factory=dict)


class Reporter(Protocol):
    """Hears what a build does."""

    def planned(self, plan: Plan, tasks: int) -> None:
        """Work is about to start; `tasks` compilations and assemblies will be reported."""

    def done(self, module: str, arch: str, step: str, log: str, *, cached: bool) -> None:
        """One of them is done, with the compiler's warnings."""


def build_project(
    config: Config, reporter: Reporter, cache: Cache | None, starter: Starter | None = None
) -> BuildResult:
    """Compile a project's modules, in workers that `starter` starts.

    Raises:
        BuildError: whatever is wrong, after everything that could be compiled was.

    """
    with span("plan"):
        plan = plan_project(config)
    jobs, precompile = config.jobs or default_jobs(), config.precompiled_headers
    return compile_plan(plan, jobs, reporter, cache, executor=config.executor, precompile=precompile, starter=starter)


def plan_project(config: Config) -> Plan:
    """Decide what to compile; no compiler is needed for that."""
    line = select_line(config.cuda, config.modules, visible_ccs)
    modules = [
        Module(module, read_tree(config.root, module.sources, module.settings.include_dirs, module.settings.headers))
        for module in config.modules
    ]
    return make_plan(modules, line, visible_ccs)


def compile_plan(
    plan: Plan,
    jobs: int,
    reporter: Reporter,
    cache: Cache | None,
    *,
    executor: str = "local",
    precompile: bool = True,
    starter: Starter | None = None,
) -> BuildResult:
    """Run the jobs of `plan` in `jobs` worker processes, or on a Dask cluster, and put the results together."""
    tasks = len(plan.jobs) + len(plan.images)
    places = max(1, min(jobs, tasks))
    with (
        cache or contextlib.nullcontext(),
        _Workers(executor, places, precompile=precompile, starter=starter) as workers,
    ):
        compiler = _Compiler(workers, plan, cache, local=executor == "local")
        reporter.planned(plan, tasks)
        run = _Run(workers, compiler, reporter, cache)
        fronts, images = run.all(plan.jobs)
        toolchain = compiler.toolchain
    with span("collect"):
        modules = collect(plan, fronts, images)
    sources = {path: content for job in plan.jobs for path, content in job.front.tree.files}
    return BuildResult(modules, toolchain, tasks, run.hits, sources)


class _Step(NamedTuple):
    """A task on its way to its result: perhaps fetched from the shared cache, else run.  One without a key is not kept."""

    number: int
    job: Job
    target: Target | None
    task: FrontTask | ImageTask
    key: str = ""
    fetched: bool = False


class _Workers:
    """The pool of workers, which is made when there is something to do: most builds find everything in the cache."""

    def __init__(self, executor: str, jobs: int, *, precompile: bool, starter: Starter | None) -> None:
        self._executor = executor
        self._jobs = jobs
        self._precompile = precompile
        self._starter = starter
        self._made = contextlib.ExitStack()
        if executor == "local":
            check_platform()

    @functools.cached_property
    def pool(self) -> WorkerPool | DaskPool:
        """The pool; it is closed with the context."""
        if self._executor == "dask":
            from hatch_cuda_aot.compile.dask_pool import DaskPool

            return self._made.enter_context(DaskPool())
        from hatch_cuda_aot.compile.pool import WorkerPool

        return self._made.enter_context(WorkerPool(self._jobs, precompile=self._precompile, starter=self._starter))

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._made.close()


class _Compiler:
    """What the installed compiler is.

    The answer of an earlier build holds as long as its wheels are the same.  So a build that finds every result in the
    cache starts no worker; any other still has the compiler found, checked and asked whether it knows the architectures.
    Without a cache, or where others compile, nothing is remembered.

    Attributes:
        answer: what it is asked, or None as long as it need not be.

    """

    def __init__(self, workers: _Workers, plan: Plan, cache: Cache | None, *, local: bool) -> None:
        self._workers = workers
        self._plan = plan
        self._local = local
        self._identify = cache is not None  # only keys need that
        self._folder = cache.folder if cache is not None and local else None
        self._identity = identify(plan.line, plan.needs) if self._folder is not None else None
        self._known = recall(self._folder, self._identity) if self._folder is not None else None
        self.answer = None if self._known is not None else self._ask()

    @functools.cached_property
    def toolchain(self) -> Toolchain:
        """What it is; waits for the answer, if nothing is remembered."""
        return self._known or self._answered()

    def confirm(self) -> None:
        """See to it that it is as remembered, before it has to work; a cluster must have answered before that."""
        if self._known is None:
            if not self._local:
                _ = self.toolchain
        elif self.answer is None:
            self.answer = self._ask()
            if self._answered() != self._known:
                message = f"the compiler of CUDA {self._plan.line.version} was changed without its wheels: build again"
                raise BuildError(message)

    def _ask(self) -> Future[Result]:
        """Have a worker find it."""
        task = ProbeTask(Compiler(self._plan.line.version, self._plan.needs), self._plan.archs, self._identify)
        answer = self._workers.pool.submit(task)
        if self._folder is None:  # nothing can come from the cache: there is work for all workers
            self._workers.pool.warm_up(task.compiler)
        return answer

    def _answered(self) -> Toolchain:
        assert self.answer is not None
        with span("wait for workers"):
            found = self.answer.result()
        assert isinstance(found, Toolchain)
        if self._folder is not None and found != self._known:
            remember(self._folder, self._identity, found)
        return found


class _Run:
    """The jobs under way: a front end's images are started as soon as it is done."""

    def __init__(
        self,
        workers: _Workers,
        compiler: _Compiler,
        reporter: Reporter,
        cache: Cache | None,
    ) -> None:
        self._workers = workers
        self._compiler = compiler
        self._reporter = reporter
        self._cache = cache
        self._waiting: dict[Future[Any], _Step] = {}
        self._done: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._failures: dict[tuple[int, str], BuildError] = {}
        self._fronts: dict[int, FrontResult] = {}
        self._images: dict[tuple[int, Target], ImageResult] = {}
        self.hits = 0

    def all(self, jobs: Sequence[Job]) -> tuple[dict[int, FrontResult], dict[tuple[int, Target], ImageResult]]:
        """Do every job, failed ones or not; then raise what the first failing one said."""
        if self._compiler.answer is not None:
            self._compiler.answer.add_done_callback(self._done.put)
        for number in in_order(jobs):
            self._start(number, jobs[number], None, jobs[number].front)
        while self._waiting:
            with span("wait for workers"):
                future = self._done.get()
            if future is self._compiler.answer:
                _ = self._compiler.toolchain  # if there is none, no job can succeed
                continue
            step = self._waiting.pop(future)
            try:
                result = future.result()
            except ClusterError:
                raise  # no further job can succeed
            except BuildError as error:
                self._failures[step.number, str(step.target or "")] = error
                continue
            if step.fetched and result is None:
                self._run(step)
                continue
            if self._cache is not None and step.key and not step.fetched:
                with span("cache put", **_about(step.task)):
                    self._cache.put(step.key, result)
            self._finish(*step[:4], result, cached=step.fetched)
        _ = self._compiler.toolchain
        if self._failures:
            raise _first_of(self._failures)
        return self._fronts, self._images

    def _start(self, number: int, job: Job, target: Target | None, task: FrontTask | ImageTask) -> None:
        step = _Step(number, job, target, task)
        if self._cache is not None and is_cacheable(task, self._compiler.toolchain):
            with span("cache get", **_about(task)):
                step = step._replace(key=key_of(task, self._compiler.toolchain))
                result = self._cache.get(step.key)
            if result is not None:
                self._finish(number, job, target, task, result, cached=True)
                return
            fetching = self._cache.fetch(step.key)
            if fetching is not None:
                self._wait_for(fetching, step._replace(fetched=True))
                return
        self._run(step)

    def _run(self, step: _Step) -> None:
        self._compiler.confirm()
        future = self._workers.pool.submit(step.task, priority=priority_of(step.task))
        self._wait_for(future, step._replace(fetched=False))

    def _wait_for(self, future: Future[Any], step: _Step) -> None:
        self._waiting[future] = step
        future.add_done_callback(self._done.put)

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
        self.hits += cached
        if isinstance(result, FrontResult):
            self._fronts[number] = result
            for each in job.targets:
                kind = FloorTask if each.image.virtual else AssembleTask
                self._start(number, job, each, kind(task.compiler, task.module, each.image, result.ptx, job.ptxas))
        elif target is not None and not isinstance(result, Toolchain):
            self._images[number, target] = result
        log = result.log if isinstance(result, (FrontResult, AssembleResult)) else ""
        self._reporter.done(task.module, str(task.arch), step_of(task), log, cached=cached)


def _about(task: FrontTask | ImageTask) -> dict[str, str]:
    return {"module": task.module, "arch": str(task.arch)}


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
