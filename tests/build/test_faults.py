"""Whatever happens to a build, the next one is right: same bytes, and nothing of the accident is left."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.build._project import Builder, contents, lay_out
from tests.build.conftest import LINES, Compiler, make_compiler

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, and signals of POSIX")


def digest(wheel: Path) -> str:
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


class Site:
    """A project, its builds in one environment, and what an undisturbed build made of it in another place."""

    def __init__(self, compiler: Compiler, folder: Path) -> None:
        self.folder = folder
        self.builder = Builder(compiler, folder)
        self.project = lay_out(folder / "project", compiler.line)
        self.cache, self.temporary = folder / "cache", folder / "temporary"
        self.temporary.mkdir()
        self.environ = {"HATCH_CUDA_AOT_CACHE_DIR": str(self.cache), "TMPDIR": str(self.temporary)}
        other = lay_out(folder / "undisturbed", compiler.line)
        started = time.monotonic()
        wheel = self.builder.build(other, folder / "expected", {"HATCH_CUDA_AOT_CACHE": "0"})
        self.seconds = time.monotonic() - started
        self.expected = digest(wheel)
        self.files = {
            name.removeprefix("tiny/_cuda_aot/"): data
            for name, data in contents(wheel).items()
            if name.startswith("tiny/_cuda_aot/")
        }
        self.tree = self.tracked()

    def tracked(self) -> list[str]:
        """Return the files of the project that are not a build's results."""
        found = (path.relative_to(self.project).as_posix() for path in self.project.rglob("*"))
        return sorted(path for path in found if "/_cuda_aot" not in path)

    def start(self, version: str = "standard", **environ: str) -> subprocess.Popen[str]:
        return self.builder.start(self.project, self.folder / "out", {**self.environ, **environ}, version)

    def build(self, version: str = "standard", **environ: str) -> str:
        """Build to the end and return what was printed."""
        process = self.start(version, **environ)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output

    def check(self) -> None:
        """Build once more, for a wheel and in place, and compare everything with the undisturbed build."""
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        self.build()
        (wheel,) = (self.folder / "out").iterdir()
        assert digest(wheel) == self.expected, sorted(contents(wheel))
        self.build("editable")
        assert self.in_place() == self.files
        self.build()
        assert digest(wheel) == self.expected
        assert self.tracked() == self.tree
        assert self.processes() == []
        # hatchling's own unfinished archives are called tmp….whl
        assert [path.name for path in self.temporary.iterdir() if path.suffix != ".whl"] == []
        if self.cache.is_dir():
            assert [path.name for path in self.cache.rglob("tmp*")] == []

    def in_place(self) -> dict[str, bytes]:
        """Return what an editable build wrote, but for the list of sources by which the loader notices edits."""
        folder = self.project / "src" / "tiny" / "_cuda_aot"
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        start, mark, _ = files["manifest.json"].partition(b',"tree":')
        return {**files, "manifest.json": start + b"}\n" if mark else start}

    def processes(self) -> list[int]:
        """Return the processes of builds of this site, told by their environment."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.temporary).encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def wait_for_processes(self) -> None:
        """Wait until the workers have noticed that their build is gone."""
        deadline = time.monotonic() + 60
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.processes() == []


@pytest.fixture(scope="module")
def sites(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Site]:
    """A site for each line."""
    return {line: Site(make_compiler(request.config, line), tmp_path_factory.mktemp(f"site-{line}")) for line in LINES}


@pytest.fixture
def site(sites: dict[str, Site]) -> Iterator[Site]:
    """A site without a cache; what is tested with it does not depend on the line."""
    site = sites[LINES[-1]]
    environ = dict(site.environ)
    shutil.rmtree(site.cache, ignore_errors=True)
    yield site
    site.environ = environ
    with contextlib.suppress(OSError):
        site.cache.unlink()


@pytest.mark.parametrize("chunk", range(4))
def test_kill_at_any_moment(sites: dict[str, Site], chunk: int) -> None:
    """kill -9 at 100 moments in all, of the build alone or of its process group, with a cold cache or a warm one, five
    builds at a time in one tree, for wheels and in place: the builds after them are as if nothing had happened."""
    site = sites[LINES[chunk % len(LINES)]]
    choose = random.Random(chunk)
    for _ in range(5):
        if choose.random() < 0.6:
            shutil.rmtree(site.cache, ignore_errors=True)
        builds = [site.start(choose.choice(["standard", "editable"])) for _ in range(5)]
        moments = sorted(choose.uniform(0, 2.5) * site.seconds for _ in builds)
        started = time.monotonic()
        for build, moment in zip(builds, moments, strict=True):
            time.sleep(max(0, started + moment - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                choose.choice([os.kill, os.killpg])(build.pid, signal.SIGKILL)
        for build in builds:
            build.communicate(timeout=60)
        site.wait_for_processes()
    site.check()


def test_builds_at_once(site: Site) -> None:
    """Three builds for wheels and three in place, at once in one tree with one cache: all succeed and are right."""
    versions = ["standard", "editable"] * 3
    processes = [
        site.builder.start(site.project, site.folder / f"out{number}", site.environ, version)
        for number, version in enumerate(versions)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 6, outputs
    wheels = [next((site.folder / f"out{number}").iterdir()) for number in range(0, 6, 2)]
    assert {digest(wheel) for wheel in wheels} == {site.expected}
    assert site.in_place() == site.files
    site.check()


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "garbage", "exchanged", "folders"])
def test_damaged_cache(site: Site, damage: str) -> None:
    """No damage to entries gets into a wheel or stops a build."""
    site.build()
    entries = sorted(path for path in site.cache.rglob("*") if path.is_file())
    assert len(entries) == 7  # six results, and what the compiler is
    before = [entry.read_bytes() for entry in entries]
    for entry, content, other in zip(entries, before, [*before[1:], before[0]], strict=True):
        if damage == "folders":
            entry.unlink()
            entry.mkdir()
            continue
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        entry.write_bytes(
            {"empty": b"", "cut": content[:-1], "flipped": flipped, "garbage": b"x" * 99, "exchanged": other}[damage]
        )
    site.check()


def test_cache_that_cannot_be_written(site: Site) -> None:
    """A file in the place of the cache, or a folder in which nothing can be made, costs time and nothing else."""
    site.cache.write_bytes(b"no folder")
    site.check()
    assert site.cache.read_bytes() == b"no folder"
    site.environ["HATCH_CUDA_AOT_CACHE_DIR"] = "/proc/nowhere"
    site.check()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a file system of that size on `folder`."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this system does not let root mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_under_the_cache(site: Site) -> None:
    """A cache on a full disk costs time only, and what fits is good."""
    with small_disk(site.cache, "16k"):
        (site.cache / "filler").write_bytes(b"x" * 8192)
        site.check()
    with small_disk(site.cache, "64k"):
        site.check()


def test_full_disk_under_temporary_files(site: Site) -> None:
    """A full disk under TMPDIR ends the build with one message that says what to do; with space the next build is right."""
    for size in ("8k", "64k"):  # a worker's sources do not fit, or what goes into the wheel does not
        with small_disk(site.temporary, size):
            process = site.start()
            output, _ = process.communicate(timeout=300)
            assert process.returncode != 0
            assert "Free some space, or set TMPDIR" in output
            assert "Traceback" not in output
            assert list(site.temporary.iterdir()) == []
    site.check()


def test_full_disk_under_the_project(site: Site) -> None:
    """A build in place that does not fit leaves the one before it as it was."""
    place = site.project / "src" / "tiny"
    saved = shutil.copytree(place, site.folder / "saved")
    with small_disk(place, "1m"):
        shutil.copytree(saved, place, dirs_exist_ok=True)
        site.build("editable")
        assert site.in_place() == site.files
        with (place / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(b"x" * 4096)
        process = site.start("editable", HATCH_CUDA_AOT_LINEINFO="1")  # unchanged files would need no space
        output, _ = process.communicate(timeout=300)
        assert process.returncode != 0
        assert f"cuda-aot: cannot write {place / '_cuda_aot'}: No space left on device" in output
        assert site.in_place() == site.files
        assert not (place / "__pycache__").exists()
        (place / "filler").unlink()
        site.check()
    site.check()
