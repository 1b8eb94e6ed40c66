"""The same tree gives the same bytes, wherever it lies and however it is built."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.build import _functions as remote
from tests.build._project import Builder, contents, lay_out
from tests.build.conftest import Compiler
from tests.wheels import ROOT

SOURCE = """\
#include <cuda/std/cassert>
#include "own.cuh"
namespace { __device__ int hidden; }
extern "C" __global__ void k(const char** x, float* y) { *x = __FILE__; assert(y); y[0] = own(y[1]) + hidden; }
template <class T> __global__ void t(T* x) { own_file(x); }
"""

HEADER = """\
#pragma once
#include <cassert>
inline __device__ float own(float x) { assert(x > 0); return x / 3; }
template <class T> __device__ void own_file(T* x) { *x = *__FILE__; }
"""


@pytest.mark.parametrize("settings", [{}, {"lineinfo": True}, {"debug": True}], ids=str)
@pytest.mark.parametrize("linked", [False, True])
def test_same_bytes_in_any_folder(
    compiler: Compiler, tmp_path: Path, settings: dict[str, Any], *, linked: bool
) -> None:
    """Cubins and PTX repeat in another folder, with another number of workers, line numbers and assertions included."""
    results = []
    for number, folder in enumerate((tmp_path / "one", tmp_path / "quite" / "another")):
        (folder / "pkg" / "device").mkdir(parents=True)
        (folder / "pkg" / "a.cu").write_text(SOURCE)
        (folder / "pkg" / "device" / "own.cuh").write_text(HEADER.replace("#include <cassert>\n", ""))
        (folder / "pkg" / "b.cu").write_text('extern "C" __global__ void other() {}\n')
        module = {"name": "m", "sources": ["pkg/*.cu"] if linked else ["pkg/a.cu"], "kernels": ["t<char>"]}
        table = {
            "modules": [module],
            "include-dirs": ["pkg/device"],
            "archs": ["sm_80", "sm_90a", "sm_120@compute_90" if linked else "sm_120", "compute_80"],
            "cuda": compiler.line,
            **settings,
        }
        results.append(compiler.call(remote.build, folder, table, "pkg", jobs=1 + number))
    assert results[0] == results[1]
    (module_result,) = results[0]
    for image in module_result.images:
        assert str(tmp_path).encode() not in image.data
        assert b"/tmp/" not in image.data
    if settings:
        assert b".debug_line" in module_result.images[0].data
        assert b'"pkg/a.cu"' in module_result.images[-1].data


def digest(wheel: Path) -> str:
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


#: Builds without a cache, unless a test sets one.
UNCACHED = {"HATCH_CUDA_AOT_CACHE": "0"}


class Wheels:
    """The tiny project, and a wheel of it to compare others with."""

    def __init__(self, compiler: Compiler, folder: Path, keys: str) -> None:
        self.folder = folder
        self.keys = keys
        self.builder = Builder(compiler, folder)
        self.project = lay_out(folder / "one", compiler.line, keys)
        self.wheel = self.builder.build(self.project, folder / "first", UNCACHED)

    def differences(self, wheel: Path) -> list[str]:
        """Return the names of the files that differ from the first wheel, or that its bytes do."""
        one, two = contents(self.wheel), contents(wheel)
        names = [name for name in sorted({*one, *two}) if one.get(name) != two.get(name)]
        return names or (["bytes"] if digest(self.wheel) != digest(wheel) else [])


@pytest.fixture(params=["", "lineinfo = true", "debug = true"], ids=["plain", "lineinfo", "debug"])
def wheels(request: pytest.FixtureRequest, compiler: Compiler, tmp_path: Path) -> Wheels:
    return Wheels(compiler, tmp_path, f'sources = ["src/tiny/*.cu"]\n{request.param}')


def test_same_wheel_elsewhere(wheels: Wheels, compiler: Compiler) -> None:
    """sha256 of the wheel repeats: in another folder, through a link, for another home, user name, umask, locale, time zone,
    folder for temporary files and current folder, with another number of jobs and order, and other times and modes of
    the sources."""
    keys = wheels.keys.replace('"src/tiny/*.cu"', '"src/tiny/b.cu", "./src/tiny/a.cu"') + "\njobs = 1"
    folder = wheels.folder / "quite" / "an other é"
    copy = lay_out(folder / "project", compiler.line, keys, kernels='"t<int>", "t<char>"')
    for number, path in enumerate(sorted(copy.rglob("*"))):
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
        if path.is_file():
            path.chmod(0o600)
    link = wheels.folder / "link"
    link.symlink_to(copy, target_is_directory=True)
    (folder / "temporary é" / "deep").mkdir(parents=True)
    environ = {
        **UNCACHED,
        "HOME": str(folder / "home"),
        "USER": "someone",
        "LOGNAME": "someone",
        "TMPDIR": str(folder / "temporary é" / "deep"),
        "LC_ALL": "C",
        "LANG": "de_DE.UTF-8",
        "TZ": "Asia/Tokyo",
        "PYTHONHASHSEED": "7",
        "PWD": "/nowhere",
    }
    wheel = wheels.builder.build(link, wheels.folder / "second", environ, cwd=folder, umask=0o077)
    assert wheels.differences(wheel) == []
    assert str(wheels.folder).encode() not in b"".join(contents(wheel).values())
    assert list((folder / "temporary é" / "deep").iterdir()) == []


def test_same_wheel_of_another_user(compiler: Compiler, tmp_path: Path) -> None:
    """sha256 of the wheel repeats for another user of the system; only root can try that."""
    nobody = 65534
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root can run a build as another user")
    ask = [str(compiler.python), "-c", "import hatchling, sys; sys.path.insert(0, sys.argv[1]); import hatch_cuda_aot"]
    if subprocess.run([*ask, str(ROOT)], user=nobody, group=nobody, extra_groups=[], check=False, cwd="/").returncode:
        pytest.skip("another user cannot run this Python, or read this checkout")
    wheels = Wheels(compiler, tmp_path, 'sources = ["src/tiny/*.cu"]')
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        place = Path(folder)
        lay_out(place / "project", compiler.line)
        shutil.copytree(wheels.builder.plugin, place / "plugin")
        wheels.builder.plugin = place / "plugin"
        for path in (place, *place.rglob("*")):
            os.chown(path, nobody, nobody)
        other = {**UNCACHED, "HOME": folder, "USER": "nobody", "TMPDIR": folder}
        wheel = wheels.builder.build(
            place / "project", place / "out", other, user=nobody, group=nobody, extra_groups=[], umask=0o027
        )
        assert wheel.stat().st_uid == nobody
        assert wheels.differences(wheel) == []


def test_source_date_epoch(compiler: Compiler, tmp_path: Path) -> None:
    """SOURCE_DATE_EPOCH sets the times in the wheel and nothing else; the same one gives the same bytes."""
    wheels = Wheels(compiler, tmp_path, 'sources = ["src/tiny/*.cu"]')
    cache = {"HATCH_CUDA_AOT_CACHE_DIR": str(tmp_path / "cache")}
    epochs = {"again": None, "one": "1700000000", "two": "1700000000", "three": "1500000000"}
    made = {
        name: wheels.builder.build(
            wheels.project, tmp_path / name, {**cache, **({"SOURCE_DATE_EPOCH": epoch} if epoch else {})}
        )
        for name, epoch in epochs.items()
    }
    assert digest(made["again"]) == digest(wheels.wheel)
    assert digest(made["one"]) == digest(made["two"])
    assert len({digest(wheel) for wheel in made.values()}) == 3
    assert all(contents(wheel) == contents(wheels.wheel) for wheel in made.values())
