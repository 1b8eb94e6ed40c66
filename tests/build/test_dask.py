"""Compilation on a Dask cluster: the same bytes as on one machine, workers that die, and workers that do not fit."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hatch_cuda_aot.errors import ClusterError, CompileError, WorkerCrashError
from tests.build import _dask as remote
from tests.build.conftest import EXAMPLE, LINES, Compiler, make_compiler
from tests.wheels import ROOT

LINE = LINES[-1]

#: Takes a second to compile.
SLOW = """\
#include <cub/block/block_reduce.cuh>
extern "C" __global__ void total_NUMBER(const float* x, float* y) {
    using Reduce = cub::BlockReduce<float, 128>;
    __shared__ typename Reduce::TempStorage storage;
    float total = Reduce(storage).Sum(x[threadIdx.x] + NUMBER);
    if (threadIdx.x == 0) *y = total;
}
"""


@pytest.fixture(scope="module")
def dask_compiler(request: pytest.FixtureRequest) -> Compiler:
    return make_compiler(request.config, LINE)


@pytest.fixture(scope="module")
def running_cluster(dask_compiler: Compiler) -> Iterator[str]:
    """The address of a cluster of two workers, which gives a task up when it lost two workers to it."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1"}
    process = subprocess.Popen(
        [str(dask_compiler.python), "-m", "tests.build._dask"],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:  # leaving closes its stdin, which ends it
        assert process.stdout is not None
        yield process.stdout.readline().strip()


@pytest.fixture
def cluster(running_cluster: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", running_cluster)
    return running_cluster


@pytest.fixture
def slow_project(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    for number in range(4):
        (tmp_path / f"slow{number}.cu").write_text(SLOW.replace("NUMBER", str(number)))
    return tmp_path


SLOW_TABLE = {"sources": ["*.cu"], "archs": ["sm_80"], "cuda": LINE}


@pytest.mark.usefixtures("cluster")
def test_the_same_files(dask_compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of the example package is the same, byte by byte, whoever compiled it."""
    project = Path(shutil.copytree(EXAMPLE, tmp_path / "example"))
    monkeypatch.setenv("HATCH_CUDA_AOT_CUDA", LINE)
    monkeypatch.setenv("HATCH_CUDA_AOT_ARCHS", "sm_80 compute_80")
    here = dask_compiler.call(remote.project_files, project)
    monkeypatch.setenv("HATCH_CUDA_AOT_EXECUTOR", "dask")
    there = dask_compiler.call(remote.project_files, project)
    assert there == here
    assert len([name for name in here if name.endswith((".cubin", ".ptx"))]) == 8


@pytest.mark.usefixtures("cluster")
def test_a_worker_killed_in_the_middle(dask_compiler: Compiler, slow_project: Path) -> None:
    """What it had is compiled elsewhere; the result is the same, and its compilers end with it.

    The sources are sent apart from the tasks, so that some go down with the worker.
    """
    for source in slow_project.glob("*.cu"):
        source.write_text("// a comment of some length\n" * 20_000 + source.read_text())
    here = dask_compiler.call(remote.build, slow_project, SLOW_TABLE, "local")
    there, killed, left = dask_compiler.call(remote.build_and_kill, slow_project, SLOW_TABLE, 1)
    assert killed == 1
    assert there == here
    assert left == []


@pytest.mark.usefixtures("cluster")
def test_a_task_that_loses_every_worker(dask_compiler: Compiler, slow_project: Path) -> None:
    """Dask gives it up after some; the error names the task and is no hang."""
    with pytest.raises(WorkerCrashError) as caught:
        dask_compiler.call(
            remote.build_while_something_dies, slow_project, {**SLOW_TABLE, "sources": ["slow0.cu"]}, compilers=False
        )
    assert str(caught.value).startswith(
        "2 Dask workers died one after the other while they had module 'slow0' for compute_"
    )
    assert (caught.value.module, caught.value.stage) == ("slow0", "NVRTC")


@pytest.mark.usefixtures("cluster")
def test_a_compiler_that_dies(dask_compiler: Compiler, slow_project: Path) -> None:
    """A crash of the compiler leaves the Dask worker alone, and is the error that it is without a cluster."""
    with pytest.raises(WorkerCrashError) as caught:
        dask_compiler.call(
            remote.build_while_something_dies, slow_project, {**SLOW_TABLE, "sources": ["slow0.cu"]}, compilers=True
        )
    error = caught.value
    assert (error.module, error.arch, error.stage, error.log) == ("slow0", "compute_80", "NVRTC", "SIGKILL")
    assert str(error).startswith("NVRTC crashed on module 'slow0' (slow0.cu) for compute_80, with SIGKILL. ")


@pytest.mark.usefixtures("cluster")
def test_one_cache_for_both(dask_compiler: Compiler, tmp_path: Path) -> None:
    """Results of the cluster land in the user's cache, and what is there is not sent, whoever compiled it."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "k.cu").write_text('extern "C" __global__ void k() {}')
    table = {"sources": ["k.cu"], "archs": ["sm_80", "compute_80"], "cuda": LINE}
    hits = [
        dask_compiler.call(remote.build_cached, tmp_path, table, executor, tmp_path / "cache")
        for executor in ("dask", "local", "dask")
    ]
    assert hits == [(3, 0), (3, 3), (3, 3)]


@pytest.mark.usefixtures("cluster")
def test_an_error_in_a_source(dask_compiler: Compiler, tmp_path: Path) -> None:
    """It is the error that the same build gives locally, with all that is on it, however long."""
    (tmp_path / "pkg").mkdir()
    body = "\n".join(f'int x{number} = "a value that is no number";' for number in range(90))
    (tmp_path / "bad.cu").write_text(f"__global__ void k() {{\n{body}\n}}\n")
    table = {"sources": ["bad.cu"], "archs": ["sm_80", "sm_90"], "cuda": LINE}
    errors = []
    for executor in ("local", "dask"):
        with pytest.raises(CompileError) as caught:
            dask_compiler.call(remote.build, tmp_path, table, executor)
        errors.append(caught.value)
    here, there = errors
    assert type(there) is type(here)
    assert str(there) == str(here)
    assert len(str(here)) > 10_000  # beyond this Dask cuts the text of exceptions
    assert there.__dict__ == here.__dict__


OTHER_CODE = r"  - tcp://[0-9.:]+ \(.+\): hatch-cuda-aot [0-9.]+ \(code \w+\) instead of [0-9.]+ \(code \w+\)"
NO_CODE = r"  - tcp://[0-9.:]+ \(.+\): hatch-cuda-aot is not installed"


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("kind", "reason"), [("other", OTHER_CODE), ("none", NO_CODE)], ids=["other", "none"])
def test_a_worker_that_does_not_fit(
    dask_compiler: Compiler,
    slow_project: Path,
    tmp_path_factory: pytest.TempPathFactory,
    *,
    kind: str,
    reason: str,
    late: bool,
) -> None:
    """Another hatch-cuda-aot, or none: the error names the worker, the versions and the remedy, also if it joined late."""
    site = tmp_path_factory.mktemp("site")
    if kind == "other":
        copied = shutil.copytree(ROOT / "hatch_cuda_aot", site / "hatch_cuda_aot")
        with (copied / "compile" / "ptx.py").open("a") as file:
            file.write("# another version\n")
    with pytest.raises(ClusterError) as caught:
        dask_compiler.call(remote.build_with_guest, slow_project, SLOW_TABLE, str(site), late=late)
    first, second, *_, last = str(caught.value).splitlines()
    which = "a Dask worker that joined" if late else "1 of 3 Dask workers"
    assert first == f"{which} cannot take part in this build:"
    assert re.fullmatch(reason, second)
    assert re.fullmatch(r"  pip install 'hatch-cuda-aot\[dask\]==[0-9.]+' .*'nvidia-cuda-nvrtc==13\.5\.\d+'.*", last)
    assert len(caught.value.workers) == 1
    assert caught.value.workers[0] in second


@pytest.mark.usefixtures("cluster")
def test_workers_without_the_compiler(dask_compiler: Compiler, slow_project: Path) -> None:
    """Where no worker has the compiler of the line, each is named with what it lacks."""
    with pytest.raises(ClusterError) as caught:
        dask_compiler.call(remote.build, slow_project, {**SLOW_TABLE, "cuda": "12.9"}, "dask")
    first, second, *_, last = str(caught.value).splitlines()
    assert first == "2 of 2 Dask workers cannot take part in this build:"
    assert "the compiler of CUDA 12.9 is not complete in this environment" in second
    assert "ptxas 12.9 (" in second
    assert "'nvidia-cuda-nvrtc-cu12==12.9.*'" in last


def test_no_address(dask_compiler: Compiler, slow_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an address no cluster is started: the error says how to give one."""
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    with pytest.raises(ClusterError) as caught:
        dask_compiler.call(remote.build, slow_project, SLOW_TABLE, "dask")
    assert str(caught.value) == (
        '`executor = "dask"` needs the address of a Dask scheduler, and Dask\'s configuration has none. Set one of\n'
        "  - the environment variable DASK_SCHEDULER_ADDRESS, for instance to tcp://build-server:8786\n"
        "  - `scheduler-address: tcp://build-server:8786` in a YAML file in ~/.config/dask\n"
        "or build on this machine: HATCH_CUDA_AOT_EXECUTOR=local"
    )


def test_no_scheduler(dask_compiler: Compiler, slow_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address at which nobody answers is named."""
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:1")
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT", "1s")
    with pytest.raises(
        ClusterError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:1, which is `scheduler-addr"
    ):
        dask_compiler.call(remote.build, slow_project, SLOW_TABLE, "dask")


@pytest.fixture
def scheduler(dask_compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a scheduler without workers."""
    file = tmp_path / "scheduler.json"
    options = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
    command = [str(dask_compiler.python), "-m", "distributed.cli.dask_scheduler", *options]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}  # for what the tests ask it
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (file.exists() and (address := re.search(r'"address": "(.+?)"', file.read_text()))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", address[1])
        yield address[1]
        process.kill()


def test_no_workers(
    dask_compiler: Compiler, slow_project: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster without a worker is an error, not a hang."""
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT", "1s")
    with pytest.raises(ClusterError) as caught:
        dask_compiler.call(remote.build, slow_project, SLOW_TABLE, "dask")
    message = f"no worker has been connected to the Dask scheduler at {scheduler} for 1 seconds. Start some,"
    assert str(caught.value).startswith(message)


def test_a_scheduler_that_ends(dask_compiler: Compiler, slow_project: Path, scheduler: str) -> None:
    """A scheduler that is gone ends the build with an error that names it."""
    with pytest.raises(ClusterError) as caught:
        dask_compiler.call(remote.build_while_the_scheduler_ends, slow_project, SLOW_TABLE)
    assert str(caught.value) == f"the connection to the Dask scheduler at {scheduler} was lost"


@pytest.mark.usefixtures("cluster")
def test_interrupt(dask_compiler: Compiler, slow_project: Path) -> None:
    """Ctrl-C ends a build at once, and the cluster forgets it."""
    script = (
        "from pathlib import Path\n"
        "from tests.build import _dask as remote\n"
        "class Loud(remote.Silence):\n"
        "    def done(self, *_, **__): print('done', flush=True)\n"
        f"plan = remote.make_plan(Path.cwd(), {SLOW_TABLE}, 'pkg')\n"
        "remote.compile_plan(plan, 2, Loud(), None, executor='dask')\n"
    )
    process = subprocess.Popen(
        [dask_compiler.python, "-c", script],
        cwd=slow_project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert dask_compiler.call(remote.tasks_of_the_scheduler) == 0
