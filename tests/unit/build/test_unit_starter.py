"""When the process that forks workers is started, and that it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hatch_cuda_aot.compile import starter as starter_module
from hatch_cuda_aot.compile import worker as worker_module
from hatch_cuda_aot.compile.pool import WorkerPool
from hatch_cuda_aot.compile.starter import Starter, start_early
from hatch_cuda_aot.compile.tasks import Compiler
from hatch_cuda_aot.locations import has_compilers, known_compilers
from tests.unit.build.test_unit_forkserver import SERVER, image
from tests.unit.build.test_unit_pool import is_running

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes that are started, with a server whose workers say who they are and what was loaded."""
    processes: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(*args, **options))
        return processes[-1]

    answer = '        send(results, ("result", (os.getppid(), loaded)))\n'
    monkeypatch.setattr(starter_module, "_START_SERVER", SERVER.format(body=answer))
    monkeypatch.setattr(subprocess, "Popen", start)
    yield processes
    assert [process.pid for process in processes if is_running(process.pid)] == []


@linux_only
def test_ahead_of_the_first_worker(started: list[subprocess.Popen[bytes]]) -> None:
    """The process starts before anybody knows the compiler, and then loads that of the first worker."""
    with Starter(fork=True) as starter:
        starter.prepare()
        (server,) = started
        starter.prepare()
        with WorkerPool(2, starter=starter) as pool:
            answer: Any = pool.submit(image("k")).result(timeout=60)
        assert answer == (server.pid, [Compiler("12.9")])
        assert started == [server]


@linux_only
@pytest.mark.parametrize("wait", [0.0, 1.0])
def test_nobody_needs_it(
    started: list[subprocess.Popen[bytes]], capfd: pytest.CaptureFixture[str], wait: float
) -> None:
    """Where no worker is started after all, the process ends with the build, without a word, and its folder is gone."""
    with Starter(fork=True) as starter:
        starter.prepare()
        time.sleep(wait)
        folder = Path(tempfile.gettempdir(), starter._scratch.path.name if starter._scratch else "none")
        assert folder.is_dir()
    assert len(started) == 1
    assert not folder.exists()
    assert capfd.readouterr() == ("", "")


@linux_only
def test_a_build_that_is_killed(tmp_path: Path) -> None:
    """The process ends by itself when its build is gone."""
    script = (
        "import sys\nfrom hatch_cuda_aot.compile.starter import Starter\n"
        "starter = Starter(fork=True)\nstarter.prepare()\n"
        "print(starter._server._process.pid, flush=True)\nsys.stdin.read()"
    )
    errors = tmp_path / "errors"
    with (
        errors.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file
        ) as build,
    ):
        assert build.stdout is not None
        server = int(build.stdout.readline())
        build.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while is_running(server) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(server)
    assert errors.read_bytes() == b""


def test_no_forks(started: list[subprocess.Popen[bytes]]) -> None:
    """Where nothing is forked, there is nothing to prepare."""
    with Starter(fork=False) as starter:
        starter.prepare()
    assert started == []


@pytest.mark.parametrize(
    ("environ", "remembered", "early"),
    [({"HATCH_CUDA_AOT_CACHE": "0"}, True, True), ({}, False, True), ({}, True, False)],
    ids=["no cache", "empty cache", "known compilers"],
)
def test_early(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    environ: dict[str, str],
    remembered: bool,
    early: bool,
) -> None:
    """The process is started at once if the build cannot but ask a compiler what it is."""
    prepared: list[Starter] = []

    def prepare(starter: Starter) -> None:
        prepared.append(starter)

    monkeypatch.setattr(Starter, "prepare", prepare)
    environ = {**environ, "HATCH_CUDA_AOT_CACHE_DIR": str(tmp_path)}
    if remembered:
        known_compilers(tmp_path).mkdir()
    assert has_compilers(environ) == (remembered and "HATCH_CUDA_AOT_CACHE" not in environ)
    with start_early(environ) as starter:
        assert prepared == [starter] * early


def test_early_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That is told by whoever needs one: a build that finds all in the cache does not."""

    def fail(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(subprocess, "Popen", fail)
    monkeypatch.setattr(starter_module, "default_jobs", lambda: 2)
    with start_early({"HATCH_CUDA_AOT_CACHE_DIR": str(tmp_path)}):
        pass


def test_late_imports_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left to whoever needs them."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    called = []

    def fail() -> None:
        called.append(1)
        raise ImportError

    worker_module._later(fail)
    assert called == [1]
