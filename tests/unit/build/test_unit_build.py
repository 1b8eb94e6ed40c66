"""From a plan to results, with a stand-in for the compilers: what is run, kept, put together and reported."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from hatch_cuda_aot import build as build_module
from hatch_cuda_aot.archs import parse_spelling
from hatch_cuda_aot.build import BuildResult, build_project, compile_plan, plan_project
from hatch_cuda_aot.cache import Cache
from hatch_cuda_aot.compile import pool as pool_module
from hatch_cuda_aot.compile.ptx import Variable
from hatch_cuda_aot.compile.starter import Starter
from hatch_cuda_aot.compile.tasks import (
    AssembleResult,
    AssembleTask,
    Compiler,
    FloorResult,
    FloorTask,
    FrontResult,
    FrontTask,
    ProbeTask,
    Resources,
    Task,
)
from hatch_cuda_aot.config import load_config
from hatch_cuda_aot.errors import BuildError, CompileError, NoCompilerError, ResultError
from hatch_cuda_aot.installed import Identity
from hatch_cuda_aot.plan import Plan
from hatch_cuda_aot.shared import SharedLevel
from hatch_cuda_aot.toolchain import Toolchain

TOOLCHAIN = Toolchain(
    "12.9", "12.9.86", "12.9.86", "/venv/ptxas", "3000003", (), (75, 80, 90), headers=(("include", "a"),)
)
ARCHS = ["sm_80", "sm_90", "sm_90a", "compute_75"]

PTX = """\
.version 8.8
.target {target}
.const .align 4 .b8 table[16];
.global .align 4 .u32 _ZN4ours5innerE;
.global .align 1 .b8 $str[6] = {{104, 0}};
.global .align 4 .u32 _ZN3cub4usedE = 1;
.visible .entry _ZN2ns5scaleEPf(
	.param .u64 _ZN2ns5scaleEPf_param_0
)
{{
}}
.weak .entry _Z3sumIiLi4EEvPT_(
	.param .u64 _Z3sumIiLi4EEvPT__param_0,
	.param .u32 _Z3sumIiLi4EEvPT__param_1
)
{{
}}
"""


def front(task: FrontTask) -> FrontResult:
    """Compile in no time."""
    text = PTX.format(target=task.arch.as_real) + f"// of {task.module}\n"
    return FrontResult(text.encode(), {"sum< int, 4 >": "_Z3sumIiLi4EEvPT_"}, 12090, f"warning: {task.arch}")


def assemble(task: AssembleTask) -> AssembleResult:
    """Assemble in no time; the resources tell the architecture."""
    resources = {name: Resources(registers=task.arch.cc) for name in ("_ZN2ns5scaleEPf", "_Z3sumIiLi4EEvPT_")}
    return AssembleResult(f"cubin {task.module} {task.arch}".encode(), resources, "")


class Compilers:
    """Stands in for the pool: does each task at once with functions that a test may replace, and notes it."""

    def __init__(self) -> None:
        self.front: Callable[[FrontTask], FrontResult] = front
        self.assemble: Callable[[AssembleTask], AssembleResult] = assemble
        self.done: list[str] = []
        self.jobs = 0
        self.probes = 0
        self.warm = False
        self.toolchain = TOOLCHAIN

    def __call__(self, jobs: int, *, precompile: bool, starter: Starter | None) -> Compilers:
        self.jobs = jobs
        self.starter = starter
        self.precompile = precompile
        return self

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self.done.append("closed")

    def submit(self, task: Task, *, priority: float = 0.0) -> Future[Any]:  # noqa: ARG002
        future: Future[Any] = Future()
        try:
            future.set_result(self._run(task))
        except BuildError as error:
            future.set_exception(error)
        return future

    def warm_up(self, compiler: Compiler) -> None:
        assert compiler == Compiler("12.9")
        self.warm = True

    def _run(self, task: Task) -> Any:
        if isinstance(task, ProbeTask):
            self.probes += 1
            return self.toolchain if task.identify else dataclasses.replace(self.toolchain, headers=())
        self.done.append(f"{task.module} {task.arch}")
        if isinstance(task, FrontTask):
            return self.front(task)
        if isinstance(task, FloorTask):
            return FloorResult("6.3", 10000)
        return self.assemble(task)


class Reports:
    """Hears what the build does."""

    def __init__(self) -> None:
        self.tasks = 0
        self.lines: list[str] = []

    def planned(self, plan: Plan, tasks: int) -> None:  # noqa: ARG002
        self.tasks = tasks

    def done(self, module: str, arch: str, step: str, log: str, *, cached: bool) -> None:
        self.lines.append(f"{step} {module} {arch}{' cached' if cached else ''}{f': {log}' if log else ''}")


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Compilers:
    """The stand-in, in place of the pool, on any platform."""
    stand_in = Compilers()
    monkeypatch.setattr(pool_module, "WorkerPool", stand_in)
    monkeypatch.setattr(build_module, "check_platform", lambda: None)
    return stand_in


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Two modules for four architectures."""
    root = tmp_path / "project"
    (root / "pkg").mkdir(parents=True)
    for name in ("a", "b"):
        (root / "pkg" / f"{name}.cu").write_text(f"// {name}", encoding="utf-8")
    modules = [{"sources": [f"pkg/{name}.cu"], "kernels": ["sum< int, 4 >"]} for name in ("b", "a")]
    return plan_project(load_config(root, {"modules": modules, "archs": ARCHS}, {}, ["pkg"], {}))


def run(plan: Plan, cache: Cache | None = None, jobs: int = 2) -> tuple[BuildResult, Reports]:
    """Build and listen."""
    reports = Reports()
    return compile_plan(plan, jobs, reporter=reports, cache=cache), reports


def test_everything_is_done(plan: Plan, compilers: Compilers) -> None:
    """Each front end runs once, then each image of it; every step is reported with its warnings; the pool is closed."""
    result, reports = run(plan)
    expected = [
        f"compile {name} compute_{arch}: warning: compute_{arch}" for name in "ab" for arch in ("75", "80", "90", "90a")
    ]
    expected += [f"assemble {name} sm_{arch}" for name in "ab" for arch in ("80", "90", "90a")]
    expected += [f"examine {name} compute_75" for name in "ab"]
    assert sorted(reports.lines) == sorted(expected)
    assert reports.tasks == result.tasks == len(expected)
    assert (result.toolchain, result.hits) == (dataclasses.replace(TOOLCHAIN, headers=()), 0)
    assert compilers.done[-1] == "closed"


@pytest.mark.parametrize(("jobs", "workers"), [(0, 1), (2, 2), (1000, 16)])
def test_number_of_workers(plan: Plan, compilers: Compilers, jobs: int, workers: int) -> None:
    """There are never more workers than tasks, and at least one."""
    run(plan, jobs=jobs)
    assert compilers.jobs == workers


def test_modules(plan: Plan, compilers: Compilers) -> None:  # noqa: ARG001
    """A module has its kernels by name, its own variables, and its images in order, each with its driver's floor."""
    first, second = run(plan)[0].modules
    assert (first.name, second.name) == ("a", "b")
    assert [(kernel.name, kernel.symbol) for kernel in first.kernels] == [
        ("ns::scale", "_ZN2ns5scaleEPf"),
        ("sum<int,4>", "_Z3sumIiLi4EEvPT_"),
    ]
    assert [param.offset for param in first.kernels[1].params] == [0, 8]
    assert first.variables == {
        "ours::inner": Variable("_ZN4ours5innerE", "global", 4, 4),
        "table": Variable("table", "const", 16, 4),
    }
    assert [(str(image.arch), image.min_driver) for image in first.images] == [
        ("sm_80", 12000),
        ("sm_90", 12000),
        ("sm_90a", 12000),
        ("compute_75", 12090),
    ]
    assert first.images[0].data == b"cubin a sm_80"
    assert first.images[0].kernels["ns::scale"] == Resources(registers=80)
    assert first.images[3].kernels == {"ns::scale": None, "sum<int,4>": None}
    isa = first.images[3].isa
    assert isa is not None
    assert (isa.version, isa.floor, isa.floor_driver) == ("8.8", "6.3", 10000)
    assert ("a for compute_90", "warning: compute_90") in first.warnings


def test_headers_are_identified_for_a_cache_only(plan: Plan, compilers: Compilers, tmp_path: Path) -> None:
    """Reading all headers of a toolkit takes long: that is for keys, and without a cache there are none."""
    assert run(plan, None)[0].toolchain.headers == ()
    assert run(plan, Cache(tmp_path / "cache"))[0].toolchain.headers == compilers.toolchain.headers


def test_cached_results(plan: Plan, compilers: Compilers, tmp_path: Path) -> None:
    """A second build of the same runs nothing and gives the same; the first changed input runs what depends on it."""
    cold, _ = run(plan, Cache(tmp_path / "cache"))
    compilers.done.clear()
    warm, reports = run(plan, Cache(tmp_path / "cache"))
    assert compilers.done == ["closed"]
    assert warm.modules == cold.modules
    assert warm.hits == warm.tasks == len(reports.lines)
    assert all(" cached" in line for line in reports.lines)
    (tmp_path / "project/pkg/a.cu").write_text("// changed", encoding="utf-8")
    table = {"sources": ["pkg/*.cu"], "archs": ["sm_80"]}
    changed = plan_project(load_config(tmp_path / "project", table, {}, ["pkg"], {}))
    compilers.done.clear()
    run(changed, Cache(tmp_path / "cache"))
    assert "a compute_80" in compilers.done


class Shared:
    """Machines with a cache of their own each, which share one more in a folder."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("fsspec")
        self.folder = folder / "shared"
        self.own = folder / "own"
        self.warnings: list[str] = []

    def cache(self, machine: str) -> Cache:
        return Cache(self.own / machine, SharedLevel(self.folder.as_uri(), self.warnings.append))

    def entries(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


def test_shared_results(plan: Plan, compilers: Compilers, tmp_path: Path) -> None:
    """What one machine built no other one builds or writes again, and it gives the same; its own cache then has it too."""
    shared = Shared(tmp_path)
    cold, reports = run(plan, shared.cache("a"))
    assert len(shared.entries()) == cold.tasks == len(reports.lines)
    for path in shared.entries():
        os.utime(path, (1, 1))
    compilers.done.clear()
    warm, reports = run(plan, shared.cache("b"))
    assert compilers.done == ["closed"]
    assert warm.modules == cold.modules
    assert warm.hits == warm.tasks == len(reports.lines)
    assert all(" cached" in line for line in reports.lines)
    assert {path.stat().st_mtime for path in shared.entries()} == {1}
    assert run(plan, Cache(shared.own / "b"))[0].hits == cold.tasks
    assert shared.warnings == []


@pytest.mark.parametrize("damage", ["damaged", "swapped", "gone"])
def test_part_of_the_shared_results(plan: Plan, compilers: Compilers, tmp_path: Path, damage: str) -> None:
    """What is missing or wrong in the shared cache is done, and mended there; the rest is taken."""
    shared = Shared(tmp_path)
    cold, _ = run(plan, shared.cache("a"))
    entries = shared.entries()
    for path, other in zip(entries[::2], entries[1::2], strict=True):
        if damage == "damaged":
            path.write_bytes(path.read_bytes()[:-1])
        elif damage == "swapped":
            path.write_bytes(other.read_bytes())
        else:
            path.unlink()
    compilers.done.clear()
    second, _ = run(plan, shared.cache("b"))
    assert second.modules == cold.modules
    assert (second.hits, len(compilers.done) - 1) == (cold.tasks - len(entries[::2]), len(entries[::2]))
    assert len(shared.warnings) == (damage != "gone")
    assert run(plan, shared.cache("c"))[0].hits == cold.tasks


def test_shared_cache_that_cannot_be_reached(plan: Plan, compilers: Compilers, tmp_path: Path) -> None:
    """An unreachable shared cache is one warning, and the build does everything itself."""
    shared = Shared(tmp_path)
    warnings: list[str] = []
    expected = run(plan)[0].modules
    compilers.done.clear()
    result, _ = run(plan, Cache(tmp_path / "own", SharedLevel("nonsense://x", warnings.append)))
    assert result.modules == expected
    assert (result.hits, len(compilers.done) - 1) == (0, result.tasks)
    assert len(warnings) == 1
    assert run(plan, Cache(tmp_path / "own"))[0].hits == result.tasks
    assert shared.entries() == []


def test_a_failed_build_shares_too(plan: Plan, compilers: Compilers, tmp_path: Path) -> None:
    """What a failed build could do is shared like any other result."""
    shared = Shared(tmp_path)
    compilers.front = failing("a compute_90")
    with pytest.raises(CompileError):
        run(plan, shared.cache("a"))
    compilers.front = front
    compilers.done.clear()
    run(plan, shared.cache("b"))
    assert compilers.done == ["a compute_90", "a sm_90", "closed"]


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is installed from wheels, which stay the same."""
    identity = Identity("0", ("/venv",), frozenset({TOOLCHAIN.ptxas_path}))
    monkeypatch.setattr(build_module, "identify", lambda line, needs: identity)  # noqa: ARG005


def test_all_workers_only_where_all_have_work(plan: Plan, compilers: Compilers, tmp_path: Path) -> None:
    """Workers load their compilers ahead of time in a build without a cache; else they wait for what it lacks."""
    run(plan, Cache(tmp_path / "cache"))
    assert not compilers.warm
    run(plan)
    assert compilers.warm


@pytest.mark.usefixtures("remembered")
def test_no_compiler_for_cached_results(plan: Plan, compilers: Compilers, tmp_path: Path) -> None:
    """Where all is in the cache the compiler is not even looked at; where anything is not, it is."""
    cache = Cache(tmp_path / "cache")
    cold, _ = run(plan, cache)
    assert compilers.probes == 1
    warm, _ = run(plan, cache)
    assert compilers.probes == 1
    assert (warm.modules, warm.toolchain) == (cold.modules, cold.toolchain)
    entries = sorted((tmp_path / "cache").glob("??/*"))
    entries[0].unlink()
    run(plan, cache)
    assert compilers.probes == 2


@pytest.mark.usefixtures("remembered")
def test_a_compiler_that_is_not_what_it_was(plan: Plan, compilers: Compilers, tmp_path: Path) -> None:
    """A compiler that changed under its wheels' records never works for the keys of another; the next build is good."""
    cache = Cache(tmp_path / "cache")
    run(plan, cache)
    min((tmp_path / "cache").glob("??/*")).unlink()
    compilers.toolchain = dataclasses.replace(TOOLCHAIN, nvrtc="12.9.87")
    compilers.done.clear()
    with pytest.raises(BuildError, match=r"^the compiler of CUDA 12\.9 was changed without its wheels: build again$"):
        run(plan, cache)
    assert compilers.done == ["closed"]
    again, _ = run(plan, cache)
    assert again.toolchain.nvrtc == "12.9.87"
    assert again.hits <= len(plan.images)  # which depend on the PTX alone


class SlowToAnswer(Compilers):
    """A compiler that says what it is only when the first front end was asked for."""

    def __init__(self, answer: Toolchain | BuildError, seconds: float = 0.0) -> None:
        super().__init__()
        self.answer = answer
        self.seconds = seconds
        self.asked: Future[Any] = Future()
        self.patience = threading.Timer(30, self.say, [TimeoutError("no front end came before the answer")])

    def submit(self, task: Task, *, priority: float = 0.0) -> Future[Any]:
        if isinstance(task, ProbeTask):
            self.patience.start()
            return self.asked
        done = super().submit(task, priority=priority)
        if not self.seconds and not self.asked.done():
            self.say(self.answer)
        elif self.seconds and not self.patience.finished.is_set():
            self.patience.cancel()
            threading.Timer(self.seconds, self.say, [self.answer]).start()
        return done

    def say(self, answer: Toolchain | Exception) -> None:
        self.patience.cancel()
        if isinstance(answer, Exception):
            self.asked.set_exception(answer)
        else:
            self.asked.set_result(answer)


def test_front_ends_start_before_the_answer(plan: Plan, compilers: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs no key needs not wait until it is known what the compiler is."""
    expected, _ = run(plan)
    slow = SlowToAnswer(TOOLCHAIN)
    monkeypatch.setattr(pool_module, "WorkerPool", slow)
    result, _ = run(plan)
    assert result == dataclasses.replace(expected, toolchain=TOOLCHAIN)
    assert slow.done == compilers.done


@pytest.mark.parametrize("seconds", [0.0, 0.3], ids=["early", "after the last front end"])
def test_what_is_wrong_with_the_compiler_comes_first(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """A compiler that is not there is the cause of whatever its front ends say."""
    slow = SlowToAnswer(NoCompilerError("there is none"), seconds)
    slow.front = failing("a compute_75", "a compute_80", "a compute_90", "a compute_90a")
    monkeypatch.setattr(pool_module, "WorkerPool", slow)
    monkeypatch.setattr(build_module, "check_platform", lambda: None)
    with pytest.raises(NoCompilerError, match=r"^there is none$"):
        run(plan)
    assert slow.done[-1] == "closed"


def failing(*modules_and_archs: str) -> Callable[[FrontTask], FrontResult]:
    """Return a front end that refuses some jobs."""

    def compile_it(task: FrontTask) -> FrontResult:
        if f"{task.module} {task.arch}" in modules_and_archs:
            message = f"NVRTC cannot compile {task.module} for {task.arch}"
            raise CompileError(message, module=task.module, arch=str(task.arch), stage="NVRTC", log="")
        return front(task)

    return compile_it


def test_one_failure(plan: Plan, compilers: Compilers, tmp_path: Path) -> None:
    """One job that fails fails the build, in its own words; all others are done and kept for the next try."""
    compilers.front = failing("a compute_90")
    with pytest.raises(CompileError) as caught:
        run(plan, Cache(tmp_path))
    assert str(caught.value) == "NVRTC cannot compile a for compute_90"
    assert compilers.done[-1] == "closed"
    compilers.front = front
    compilers.done.clear()
    run(plan, Cache(tmp_path))
    assert compilers.done == ["a compute_90", "a sm_90", "closed"]


def test_several_failures(plan: Plan, compilers: Compilers) -> None:
    """Of several the first of the plan is shown in full, and the others are counted and named."""
    compilers.front = failing("b compute_75", "a compute_90a", "a compute_80", "b compute_90")
    with pytest.raises(CompileError) as caught:
        run(plan)
    assert caught.value.arch == "compute_80"
    assert str(caught.value) == (
        "NVRTC cannot compile a for compute_80\n"
        "3 other jobs failed too: a for compute_90a, b for compute_75, b for compute_90"
    )


def test_two_failures(plan: Plan, compilers: Compilers) -> None:
    """One other job is one job."""
    compilers.front = failing("a compute_80", "b compute_90")
    with pytest.raises(CompileError, match=r"\n1 other job failed too: b for compute_90$"):
        run(plan)


def test_a_failed_assembly(plan: Plan, compilers: Compilers) -> None:
    """An image that cannot be made fails the build, the front end's other images and those after it are still made."""

    def refuse(task: AssembleTask) -> AssembleResult:
        if str(task.arch) == "sm_90" and task.module == "a":
            raise CompileError("no", module="a", arch="sm_90", stage="ptxas", log="")
        return assemble(task)

    compilers.assemble = refuse
    with pytest.raises(CompileError, match=r"^no$"):
        run(plan)
    assert {"a sm_90a", "b sm_90"} <= set(compilers.done)


def test_one_signature_per_kernel(plan: Plan, compilers: Compilers) -> None:
    """A kernel whose parameters depend on the architecture cannot be launched in one way, and is an error."""

    def vary(task: FrontTask) -> FrontResult:
        result = front(task)
        wider = result.ptx.replace(b".param .u32 _Z3sumIiLi4EEvPT__param_1", b".param .u64 _Z3sumIiLi4EEvPT__param_1")
        return FrontResult(wider if task.arch.suffix else result.ptx, result.symbols, result.ptx_driver, "")

    compilers.front = vary
    with pytest.raises(ResultError) as caught:
        run(plan)
    assert str(caught.value) == (
        "module 'a': for compute_90a the kernel 'sum<int,4>' has other parameters than for the architectures before. "
        "One kernel must have one signature: give the variants different names"
    )


def test_one_symbol_per_expression(plan: Plan, compilers: Compilers) -> None:
    """A name expression that lowers to another symbol on another architecture is an error."""

    def vary(task: FrontTask) -> FrontResult:
        result = front(task)
        symbols = {"sum< int, 4 >": "_ZN2ns5scaleEPf"} if task.arch.suffix == "a" else result.symbols
        return FrontResult(result.ptx, symbols, result.ptx_driver, "")

    compilers.front = vary
    with pytest.raises(ResultError, match="the kernel 'sum< int, 4 >' has another symbol"):
        run(plan)


def test_kernels_of_one_architecture_only(plan: Plan, compilers: Compilers) -> None:
    """A kernel that exists for some architectures only is in those images only."""

    def vary(task: FrontTask) -> FrontResult:
        result = front(task)
        if task.arch.suffix == "a":
            return result
        text = result.ptx.replace(b".visible .entry _ZN2ns5scaleEPf(", b".func _ZN2ns5scaleEPf(")
        return FrontResult(text, result.symbols, result.ptx_driver, "")

    compilers.front = vary
    first, _ = run(plan)[0].modules
    assert [kernel.name for kernel in first.kernels] == ["ns::scale", "sum<int,4>"]
    holders = [str(image.arch) for image in first.images if "ns::scale" in image.kernels]
    assert holders == ["sm_90a"]


def test_variables_of_one_name(plan: Plan, compilers: Compilers) -> None:
    """Variables that share a name of the source are each known by their symbol."""

    def vary(task: FrontTask) -> FrontResult:
        result = front(task)
        twins = ".global .align 4 .u32 _ZZ1fvE1x;\n.global .align 4 .u32 _ZZ1fvE1x_0;\n"
        return FrontResult(twins.encode() + result.ptx, result.symbols, result.ptx_driver, "")

    compilers.front = vary
    first, _ = run(plan)[0].modules
    assert list(first.variables) == ["_ZZ1fvE1x", "_ZZ1fvE1x_0", "ours::inner", "table"]


def test_images_are_those_asked_for(plan: Plan, compilers: Compilers) -> None:  # noqa: ARG001
    """Every image of the list is in the result, and no other."""
    wanted = {str(target) for text in ARCHS for target in parse_spelling(text)}
    for module in run(plan)[0].modules:
        assert {str(image.arch) for image in module.images} == wanted


@pytest.mark.parametrize("value", [True, False])
def test_precompiled_headers(compilers: Compilers, tmp_path: Path, *, value: bool) -> None:
    """The key reaches the workers' queue."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/a.cu").touch()
    table = {"sources": ["pkg/a.cu"], "archs": ["sm_80"], "precompiled-headers": value}
    build_project(load_config(tmp_path, table, {}, ["pkg"], {}), Reports(), None)
    assert compilers.precompile is value
