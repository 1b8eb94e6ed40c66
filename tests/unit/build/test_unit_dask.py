"""The Dask executor without a cluster: what is required, and how machines are held against each other."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from hatch_cuda_aot import __version__
from hatch_cuda_aot.compile import dask_worker
from hatch_cuda_aot.compile.dask_pool import REQUIREMENTS, DaskPool
from hatch_cuda_aot.compile.software import PROGRAM, differences, most_common, pins, program, software_of
from hatch_cuda_aot.compile.tasks import AssembleTask, Compiler, FrontTask, Task
from hatch_cuda_aot.errors import ClusterError
from hatch_cuda_aot.project import Project
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.sources import SourceTree
from hatch_cuda_aot.toolchain import Needs, Toolchain, line_named, requirements

REPOSITORY = Path(__file__).parents[3]

EXPECTED = {PROGRAM: "1 (code a)", "NVRTC": "13.5.37", "ptxas": "13.5.37", "nvidia-cuda-crt": "13.5.37"}

PROJECT = """\
[project]
name = "pkg"
version = "1"
[tool.hatch.build.targets.wheel.hooks.cuda-aot]
[tool.cuda-aot]
sources = ["pkg/*.cu"]
"""


def test_extra() -> None:
    """The extra installs what an isolated build asks for."""
    declared = WheelBuilder(str(REPOSITORY)).metadata.core.optional_dependencies["dask"]
    assert declared == list(REQUIREMENTS)


def test_requirements_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build on a cluster fetches Dask and no compiler: that is the workers'."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "k.cu").touch()
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    monkeypatch.delenv("HATCH_CUDA_AOT_EXECUTOR", raising=False)
    assert any("nvrtc" in name for name in Project(WheelBuilder(str(tmp_path))).requirements())
    monkeypatch.setenv("HATCH_CUDA_AOT_EXECUTOR", "dask")
    assert Project(WheelBuilder(str(tmp_path))).requirements() == list(REQUIREMENTS)


def test_without_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is named, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setitem(sys.modules, "dask", None)
    with pytest.raises(ClusterError, match=r"^`executor = \"dask\"` needs the package (dask|distributed)") as caught:
        DaskPool()
    assert str(caught.value).endswith("pip install 'hatch-cuda-aot[dask]'")


def test_differences() -> None:
    """Each part that differs is named with both versions; equal ones are not, nor what one side says nothing of."""
    assert differences(EXPECTED, EXPECTED) == []
    found = {**EXPECTED, "NVRTC": "13.4.92", "nvidia-cuda-crt": "from no wheel"}
    assert differences(found, EXPECTED) == [
        "NVRTC 13.4.92 instead of 13.5.37",
        "nvidia-cuda-crt from no wheel instead of 13.5.37",
    ]
    assert differences({PROGRAM: "2 (code b)"}, EXPECTED) == ["hatch-cuda-aot 2 (code b) instead of 1 (code a)"]


def test_most_common() -> None:
    """What most workers have counts, our own code aside; of equals the first."""
    a, b = {"NVRTC": "13.5.37"}, {"NVRTC": "13.4.92"}
    assert most_common([a, b, b]) == b
    assert most_common([{PROGRAM: "1", **a}, {PROGRAM: "2", **a}, b]) == a
    assert most_common([b, a]) == b


@pytest.mark.parametrize("line", ["12.9", "13.5"])
def test_software(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names our own code and every part of the compiler that is required, but not what only calls the compiler."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"wheel of {name}")
    compiler = Compiler(line, Needs(linker=True, curand=True))
    toolchain = Toolchain(
        line,
        "nvrtc",
        "ptxas",
        "/here/ptxas",
        "cccl",
        (("include", "/here"),),
        (90,),
        bindings="bindings",
        headers=(("include", "a wheel"),),
    )
    found = software_of(toolchain, compiler)
    suffix = line_named(line).suffix
    wheels = ["runtime", "cccl", *(["crt"] if line == "13.5" else [])]
    names = [f"nvidia-cuda-{wheel}{suffix}" for wheel in wheels]
    names += [f"nvidia-nvjitlink{suffix}", f"nvidia-curand{suffix}", *(["nvidia-nvvm"] if line == "13.5" else [])]
    assert found == {
        PROGRAM: program(),
        "NVRTC": "nvrtc",
        "ptxas": "ptxas",
        "CCCL": "cccl",
        "cuda.bindings": "bindings",
        "headers in include": "a wheel",
        "platform": f"{sys.platform} {platform.machine()}",
        **{name: f"wheel of {name}" for name in names},
    }
    assert program().startswith(f"{__version__} (code ")


def test_pins() -> None:
    """The remedy pins each part to the version expected; parts that are from no wheel are required as in any build."""
    compiler = Compiler("13.5")
    expected = {**EXPECTED, "nvidia-nvvm": "from no wheel", "nvidia-cuda-runtime": "13.5.37"}
    found = pins(compiler, expected)
    assert found[:1] == [f"hatch-cuda-aot[dask]=={__version__}"]
    assert len(found) == 1 + len(requirements(line_named("13.5"), Needs()))
    assert {"nvidia-cuda-nvrtc==13.5.37", "nvidia-cuda-nvcc==13.5.37", "nvidia-cuda-crt==13.5.37"} <= set(found)
    assert {"nvidia-nvvm==13.5.*", "nvidia-cuda-cccl==13.3.5.*", "cuda-bindings==13.*"} <= set(found)


class StubPool:
    """Stands in for a compiler process: answers with its own number, when it may."""

    made: list[StubPool]
    go: threading.Event

    def __init__(self, jobs: int) -> None:
        assert jobs == 1
        self.closed = threading.Event()
        self.made.append(self)

    def submit(self, task: Task) -> Future[Any]:  # noqa: ARG002
        future: Future[Any] = Future()
        assert self.go.wait(60)
        future.set_result(self.made.index(self))
        return future

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> type[StubPool]:
    StubPool.made, StubPool.go = [], threading.Event()
    StubPool.go.set()
    monkeypatch.setattr(dask_worker, "WorkerPool", StubPool)
    return StubPool


def front(*options: str) -> FrontTask:
    compiler = Compiler("13.5")
    return FrontTask(compiler, "k", Arch(80, virtual=True), SourceTree(()), (), (), options, (), prune=True)


ASSEMBLE = AssembleTask(Compiler("13.5"), "k", Arch(80), b"", ())


@pytest.mark.usefixtures("stubs")
def test_processes_are_kept() -> None:
    """Tasks one after the other share a process."""
    processes: Any = dask_worker._Processes()
    assert [processes.run(task) for task in (ASSEMBLE, front(), ASSEMBLE, front())] == [0, 0, 0, 0]


def test_as_many_processes_as_tasks(stubs: type[StubPool]) -> None:
    """Tasks at the same time have a process each; then each goes where its options are remembered, if it can."""
    processes: Any = dask_worker._Processes()
    stubs.go.clear()
    tasks = [front("--restrict"), front("-a"), front("-b")]
    found: dict[FrontTask, object] = {}
    threads = [threading.Thread(target=lambda task=task: found.update({task: processes.run(task)})) for task in tasks]
    for thread in threads:
        thread.start()
    while len(stubs.made) < 3:
        time.sleep(0.01)
    stubs.go.set()
    for thread in threads:
        thread.join()
    assert sorted(found.values(), key=str) == [0, 1, 2]
    assert {task: processes.run(task) for task in tasks} == found
    processes.run(front("-c"))
    assert len(stubs.made) == 3


def test_idle_processes_end(stubs: type[StubPool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that had no task for a while is ended, and the next task gets a new one."""
    monkeypatch.setattr(dask_worker, "IDLE", 0.01)
    processes: Any = dask_worker._Processes()
    processes.run(ASSEMBLE)
    assert stubs.made[0].closed.wait(60)
    assert processes.run(ASSEMBLE) == 1
