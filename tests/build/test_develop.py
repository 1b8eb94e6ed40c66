"""Developing kernels: where the time goes, watching sources, and editable installs that notice an edit."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hatch_cuda_aot.config import HOOK_TABLE
from tests.build.conftest import Compiler
from tests.traces import check_trace
from tests.wheels import ROOT

PROJECT = f"""\
[build-system]
requires = ["hatchling", "hatch-cuda-aot"]
build-backend = "hatchling.build"
[project]
name = "pkg"
version = "1.0"
dependencies = ["cuda-core", "cuda-bindings", "platformdirs"]
[tool.hatch.build.targets.wheel]
packages = ["src/pkg"]
[{HOOK_TABLE}]
[tool.cuda-aot]
sources = ["src/pkg/*.cu"]
archs = ["sm_80", "compute_80"]
"""
COMMAND = "from hatch_cuda_aot.cli import main; main()"

#: Seconds after which something that must happen did not.
DEADLINE = 120


class Project:
    """A small project, and the commands of a developer in it."""

    def __init__(self, root: Path, compiler: Compiler) -> None:
        self.root = root
        self.built = root / "src" / "pkg" / "_cuda_aot"
        self.python = str(compiler.python)
        self.environ = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{root / 'src'}",
            "HATCH_CUDA_AOT_CACHE_DIR": str(root.parent / "cache"),
            "HATCH_CUDA_AOT_CUDA": compiler.line,
        }
        (root / "src" / "pkg").mkdir(parents=True)
        self.write("src/pkg/__init__.py", "")
        self.write("pyproject.toml", PROJECT)
        self.write("src/pkg/a.cu", '#include "a.cuh"\nextern "C" __global__ void a(int* x) { *x = VALUE; }\n')
        self.write("src/pkg/a.cuh", "#define VALUE 1\n")
        self.write("src/pkg/b.cu", 'extern "C" __global__ void b() {}\n')

    def write(self, path: str, text: str) -> None:
        (self.root / path).write_text(text)

    def build(self, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [self.python, "-c", COMMAND, "build", str(self.root), *options]
        return subprocess.run(command, env=self.environ, cwd=self.root, capture_output=True, text=True, check=check)

    def use(self) -> subprocess.CompletedProcess[str]:
        """Use the package in a new process."""
        code = (
            "import logging; logging.basicConfig(level='INFO')\n"
            "from pkg._cuda_aot import kernel_names; print(kernel_names(), kernel_names())"
        )
        command = [self.python, "-c", code]
        return subprocess.run(command, env=self.environ, cwd=self.root, capture_output=True, text=True, check=False)

    def written(self) -> dict[str, tuple[int, int]]:
        """Return when each file of the build was written, and where it lies on disk."""
        stats = {path.name: path.stat() for path in self.built.iterdir()}
        return {name: (stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


@pytest.fixture
def project(tmp_path: Path, compiler: Compiler) -> Project:
    return Project(tmp_path / "project", compiler)


def test_profile(project: Project) -> None:
    """Every task is on the track of its worker with each of its phases, and no time is counted twice or lost."""
    done = project.build("--profile=trace.json")
    assert "open it at https://ui.perfetto.dev" in done.stdout
    assert "NVRTC" in done.stdout
    events = check_trace((project.root / "trace.json").read_text())
    build = [event for event in events if event["tid"] == 1]
    workers = [event for event in events if event["tid"] != 1]
    tasks = [event for event in workers if "waited_ms" in event["args"]]
    assert sorted(event["name"] for event in tasks) == [
        *(f"assemble {name} sm_80" for name in "ab"),
        *(f"compile {name} compute_80" for name in "ab"),
        *(f"examine {name} compute_80" for name in "ab"),
        "probe",
    ]
    inside = {
        "compile": {"stage", "NVRTC", "prune", "check"},
        "assemble": {"ptxas", "check"},
        "examine": {"ptxas"},
        "probe": set(),
    }
    once = {"load compiler", "start worker"}
    seen = 0
    for task in tasks:
        parts = [event for event in workers if event not in tasks and within(event, task)]
        assert {event["cat"] for event in parts} - once == inside[task["cat"]]
        assert sum(event["dur"] for event in parts) <= task["dur"] + 1e-3
        seen += len(parts)
    assert seen + len(tasks) == len(workers)
    names = [event["cat"] for event in build]
    assert {name: names.count(name) for name in ("cache get", "cache put")} == {"cache get": 6, "cache put": 6}
    assert {"configure", "plan", "wait for workers", "collect", "write files"} <= set(names)
    assert min(event["ts"] for event in build) <= min(event["ts"] for event in workers)
    assert max(ends(event) for event in build) >= max(ends(event) for event in workers)


def within(inner: dict[str, float], outer: dict[str, float]) -> bool:
    same = inner["tid"] == outer["tid"]
    return same and outer["ts"] - 1e-3 <= inner["ts"] and ends(inner) <= ends(outer) + 1e-3


def ends(event: dict[str, float]) -> float:
    return event["ts"] + event["dur"]


def test_profile_changes_no_result(project: Project) -> None:
    """What was built with a profile is what is built without, and its results in the cache are the same ones."""
    project.build("--profile=trace.json")
    first = {path.name: path.read_bytes() for path in project.built.iterdir()}
    done = json.loads(project.build("--json", "--profile=again.json").stdout)
    assert (done["tasks"], done["hits"], done["profile"]) == (6, 6, "again.json")
    assert {path.name: path.read_bytes() for path in project.built.iterdir()} == first
    events = check_trace((project.root / "again.json").read_text())
    assert not [event for event in events if event["tid"] != 1]  # no worker is started for results from the cache


def test_profile_of_a_build_that_fails(project: Project) -> None:
    """The trace shows what was done until then, the compilation that failed too."""
    project.write("src/pkg/a.cu", "no C++")
    done = project.build("--profile=trace.json", check=False)
    assert done.returncode == 1
    assert "error: NVRTC cannot compile src/pkg/a.cu" in done.stderr
    events = check_trace((project.root / "trace.json").read_text())
    assert "compile a compute_80" in {event["name"] for event in events}


class Watch:
    """`build --watch` in a process of its own."""

    def __init__(self, project: Project, *options: str) -> None:
        self._lines: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            [project.python, "-u", "-c", COMMAND, "build", "--watch", str(project.root), *options],
            env=project.environ,
            cwd=project.root.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self._lines.put(line.rstrip("\n"))

    def until(self, start: str) -> list[str]:
        """Return the lines up to the one that starts like this."""
        lines: list[str] = []
        deadline = time.monotonic() + DEADLINE
        while not lines or not lines[-1].startswith(start):
            try:
                lines.append(self._lines.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                pytest.fail(f"no line starts with {start!r}: {lines}")
        return lines

    def interrupt(self) -> tuple[int, list[str]]:
        """Press Ctrl-C; return the exit code, and what is written after that."""
        while not self._lines.empty():
            self._lines.get()
        os.killpg(self.process.pid, signal.SIGINT)
        return self.stop(), list(self._lines.queue)

    def stop(self) -> int:
        code = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return code


@pytest.fixture
def watch(project: Project) -> Iterator[Callable[..., Watch]]:
    started: list[Watch] = []

    def start(*options: str) -> Watch:
        started.append(Watch(project, *options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.stop()


def test_watch(project: Project, watch: Callable[..., Watch]) -> None:
    """Each edit builds what it touches and writes no other file; errors are shown, and Ctrl-C ends it without a word."""
    watching = watch()
    assert "6 of 6" not in watching.until("built 2 kernels")[-1]
    watching.until("watching")
    before = project.written()

    project.write("src/pkg/a.cuh", "#define VALUE 2\n")
    assert watching.until("changed:")[-1] == "changed: src/pkg/a.cuh"
    assert "3 of 6 results from the cache" in watching.until("built 2 kernels")[-1]
    watching.until("written to")
    after = project.written()
    assert {name for name in after if after[name] != before[name]} == {
        "a.json",
        "a.sm_80.cubin",
        "a.compute_80.ptx",
        "manifest.json",
    }

    project.write("src/pkg/a.cu", 'extern "C" __global__ void a(int* x) { *x = UNKNOWN; }\n')
    assert watching.until("changed:")[-1] == "changed: src/pkg/a.cu, src/pkg/a.cuh"
    watching.until("error: NVRTC cannot compile src/pkg/a.cu")
    assert 'src/pkg/a.cu(1): error: identifier "UNKNOWN" is undefined' in watching.until("  src/pkg/a.cu(1)")[-1]

    project.write("src/pkg/c.cu", '#include "new.cuh"\nextern "C" __global__ void c() {}\n')
    watching.until("changed: src/pkg/c.cu")
    watching.until("error: ")
    project.write("src/pkg/a.cu", 'extern "C" __global__ void a(int* x) { *x = 3; }\n')
    watching.until("changed: src/pkg/a.cu")
    watching.until("error: NVRTC cannot compile src/pkg/c.cu")
    project.write("src/pkg/new.cuh", "")
    watching.until("changed: src/pkg/new.cuh")
    watching.until("built 3 kernels")
    watching.until("written to")

    project.write("pyproject.toml", PROJECT.replace('"sm_80"', '"sm_80", "sm_90"'))
    watching.until("changed: pyproject.toml")
    watching.until("built 3 kernels in 9 images")
    watching.until("written to")
    assert watching.interrupt() == (0, [])


def test_watch_misses_nothing_during_a_build(project: Project, watch: Callable[..., Watch]) -> None:
    """An edit while the first build runs, before anything is watched, is built as well."""
    watching = watch()
    watching.until("building ")
    project.write("src/pkg/a.cuh", "#define VALUE 2\n")
    watching.until("changed: src/pkg/a.cuh")
    assert "3 of 6" in watching.until("built 2 kernels")[-1]
    watching.until("written to")
    assert watching.interrupt() == (0, [])


def test_watch_for_programs(project: Project, watch: Callable[..., Watch]) -> None:
    """With --json each build is one line on stdout."""
    watching = watch("--json")
    assert json.loads(watching.until("{")[-1])["hits"] == 0
    project.write("src/pkg/b.cu", "no C++")
    watching.until("changed:")
    assert json.loads(watching.until("{")[-1])["error"]["module"] == "b"
    assert watching.interrupt() == (0, [])


def test_watch_interrupted_in_a_build(watch: Callable[..., Watch]) -> None:
    """Ctrl-C in the middle of a build is as quiet."""
    watching = watch()
    watching.until("building ")
    assert watching.interrupt() == (0, [])


def test_editable_notices_a_changed_source(project: Project) -> None:
    """A process that starts after an edit warns once, with the file and the command; after that command it does not."""
    project.build()
    assert project.use().stderr == ""
    project.write("src/pkg/a.cuh", "#define VALUE 2\n")
    done = project.use()
    assert done.stdout == "['a', 'b'] ['a', 'b']\n"
    words = "src/pkg/a.cuh changed after the kernels of pkg were built; build them again with: hatch-cuda-aot build"
    assert done.stderr == f"WARNING:pkg.cuda_aot:{words} {project.root}\n"
    project.build()
    assert project.use().stderr == ""


def test_editable_rebuild(project: Project) -> None:
    """With `editable-rebuild` the process that starts next builds what changed, and a build that fails is its error."""
    project.write("pyproject.toml", PROJECT + "editable-rebuild = true\n")
    project.build()
    project.write("src/pkg/b.cu", 'extern "C" __global__ void added() {}\n')
    done = project.use()
    assert done.stdout == "['a', 'added'] ['a', 'added']\n"
    assert done.stderr.startswith("INFO:pkg.cuda_aot:src/pkg/b.cu changed: built the kernels of pkg again in ")
    assert project.use().stderr == ""
    project.write("src/pkg/b.cu", 'extern "C" __global__ void added() { unknown(); }\n')
    done = project.use()
    assert done.returncode != 0
    assert "ManifestError: src/pkg/b.cu changed, and building the kernels of pkg again (hatch-cuda-aot" in done.stderr
    assert 'src/pkg/b.cu(1): error: identifier "unknown" is undefined' in done.stderr


def test_editable_rebuild_of_many_processes(project: Project) -> None:
    """Of many processes that start after an edit one builds, and all use the new kernels."""
    project.write("pyproject.toml", PROJECT + "editable-rebuild = true\n")
    project.build()
    project.write("src/pkg/b.cu", 'extern "C" __global__ void added() {}\n')
    code = (
        "import logging; logging.basicConfig(level='INFO')\n"
        "from pkg._cuda_aot import kernel_names; print(kernel_names())"
    )
    started = [
        subprocess.Popen(
            [project.python, "-c", code],
            env=project.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    ends = [process.communicate(timeout=DEADLINE) for process in started]
    assert {out for out, _ in ends} == {"['a', 'added']\n"}
    assert sum("built the kernels" in errors for _, errors in ends) == 1
