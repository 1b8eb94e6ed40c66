"""Functions that the tests of the Dask executor call in a compiler's environment; as a program it is a cluster.

The cluster prints its address, and lives until its stdin is closed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatch_cuda_aot.build import compile_plan
from hatch_cuda_aot.cache import Cache
from hatch_cuda_aot.project import Project
from hatch_cuda_aot.results import ModuleResult
from tests.build._functions import Silence, make_plan


def serve(workers: int) -> None:
    from distributed import LocalCluster

    with LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()


def project_files(root: Path) -> dict[str, bytes]:
    """Build a project as the hook does, and return the files that its package gets."""
    project = Project.at(root)
    return project.build(project.config(), Silence(), print).files


def build(root: Path, table: dict[str, Any], executor: str) -> tuple[ModuleResult, ...]:
    """Build a project from its table."""
    return compile_plan(make_plan(root, table, "pkg"), 2, Silence(), None, executor=executor).modules


def build_cached(root: Path, table: dict[str, Any], executor: str, folder: Path) -> tuple[int, int]:
    """Build with a cache in `folder`; return the number of tasks and that of hits."""
    result = compile_plan(make_plan(root, table, "pkg"), 2, Silence(), Cache(folder), executor=executor)
    return result.tasks, result.hits


def build_and_kill(root: Path, table: dict[str, Any], times: int) -> tuple[tuple[ModuleResult, ...], int, list[int]]:
    """Kill a Dask worker that is at work, as often as said, each time after something was compiled.

    Returns the modules, how many workers were killed, and which of their compiler processes live on.
    """
    killer = Killer(times)
    modules = compile_plan(make_plan(root, table, "pkg"), 2, killer, None, executor="dask").modules
    deadline = time.monotonic() + 30
    while any(map(_alive, killer.orphans)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return modules, killer.killed, [pid for pid in killer.orphans if _alive(pid)]


class Killer(Silence):
    """A reporter that kills."""

    def __init__(self, times: int) -> None:
        self.killed = 0
        self.orphans: list[int] = []
        self._times = times

    def done(self, *_: Any, **__: Any) -> None:
        if self.killed < self._times and (pids := _kill_one()):
            self.killed += 1
            self.orphans += pids


def build_while_something_dies(root: Path, table: dict[str, Any], *, compilers: bool) -> None:
    """Build, and kill every worker that gets something to compile, or only its compilers."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.2):
            _kill_one(compiling=True, compilers=compilers)

    thread = threading.Thread(target=kill)

    class Start(Silence):
        def planned(self, *_: Any) -> None:
            thread.start()

    try:
        compile_plan(make_plan(root, table, "pkg"), 2, Start(), None, executor="dask")
    finally:
        over.set()
        thread.join()


def build_while_the_scheduler_ends(root: Path, table: dict[str, Any]) -> None:
    """Build, and end the scheduler once it has something to do."""

    def end(client: Any) -> None:
        _until(lambda: client.run_on_scheduler(_count_tasks) > 0)
        client.shutdown()

    thread = threading.Thread(target=_ask, args=(end,))
    thread.start()
    try:
        build(root, table, "dask")
    finally:
        thread.join()


def build_with_guest(
    root: Path, table: dict[str, Any], pythonpath: str, *, late: bool
) -> tuple[ModuleResult, ...] | None:
    """Build while another worker is in the cluster, which joins `late`, after the others were checked, or before."""
    guests: list[subprocess.Popen[bytes]] = []

    def join() -> None:
        before = _ask(lambda client: len(client.nthreads()))
        command = [sys.executable, "-m", "distributed.cli.dask_worker", os.environ["DASK_SCHEDULER_ADDRESS"]]
        options = ["--no-dashboard", "--no-nanny", "--nthreads", "4", "--local-directory", str(root)]
        environ = {**os.environ, "PYTHONPATH": pythonpath}
        guests.append(subprocess.Popen([*command, *options], env=environ, cwd=root, stderr=subprocess.DEVNULL))
        _ask(lambda client: client.wait_for_workers(before + 1, timeout=60))

    class Join(Silence):
        def planned(self, *_: Any) -> None:
            if late:
                join()

    try:
        if not late:
            join()
        return compile_plan(make_plan(root, table, "pkg"), 2, Join(), None, executor="dask").modules
    finally:
        for guest in guests:
            guest.kill()
            guest.wait()
        _ask(lambda client: _until(lambda: len(client.nthreads()) == 2))


def tasks_of_the_scheduler() -> int:
    """Return how many tasks a cluster has when it had time to forget those of clients that are gone."""

    def count(client: Any) -> Any:
        _until(lambda: client.run_on_scheduler(_count_tasks) == 0)
        return client.run_on_scheduler(_count_tasks)

    return int(_ask(count))


def _count_tasks(dask_scheduler: Any) -> int:
    return len(dask_scheduler.tasks)


def _kill_one(*, compiling: bool = False, compilers: bool = False) -> list[int]:
    """Kill a worker of the cluster that has work, if any, or only its compilers; return these."""

    def kill(client: Any) -> list[int]:
        pids = client.run(os.getpid)
        for worker, keys in client.processing().items():
            if worker in pids and (not compiling or any("FrontTask" in str(key) for key in keys)):
                children = _children(pids[worker])
                for pid in children if compilers else [pids[worker]]:
                    os.kill(pid, signal.SIGKILL)
                return children
        return []

    return _ask(kill)  # type: ignore[no-any-return]


def _ask(question: Callable[[Any], Any]) -> Any:
    from distributed import Client

    with Client(os.environ["DASK_SCHEDULER_ADDRESS"], set_as_default=False) as client:
        return question(client)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    serve(2)
