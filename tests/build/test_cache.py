"""The cache with real compilers: what changes a result is compiled again, and nothing else is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hatch_cuda_aot.errors import CompileError
from tests.build import _functions as remote
from tests.build.conftest import Compiler

SOURCE = """\
#include "own.cuh"
#ifdef CONFIG
#include CONFIG
#endif
#ifndef VALUE
#define VALUE 1
#endif
#include <cuda_fp16.h>
extern "C" __global__ void k(float* x, __half* y) {
    static_assert(__cplusplus > 0);
    x[threadIdx.x] = own(x[1]) / x[2] * VALUE + __cplusplus % 1000;
    y[0] = __hadd(y[1], y[2]);
}
template <class T> __global__ void t(T* x) { *x += 1; }
"""

TABLE: dict[str, Any] = {
    "modules": [{"name": "m", "sources": ["src/a.cu"], "kernels": ["t<int>", "t<float>"]}],
    "include-dirs": ["inc", "other"],
    "archs": ["sm_80", "sm_90", "compute_80"],
}

#: Front ends, cubins and PTX of `TABLE`.
TASKS = 5


class Project:
    """A project and its cache, built in a compiler's environment past hatchling."""

    def __init__(self, compiler: Compiler, root: Path, cache: Path) -> None:
        self.compiler = compiler
        self.root = root
        self.cache = cache
        self.write("src/a.cu", SOURCE)
        self.write("inc/own.cuh", "#pragma once\n__device__ float own(float x) { return x + 1; }\n")
        self.write("pkg/__init__.py", "")
        self.write("other/unused.h", "")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def build(self, **changes: Any) -> tuple[Any, int]:
        """Return the modules and the number of results that came from the cache."""
        table = {**TABLE, "cuda": self.compiler.line, **changes}
        answer: tuple[Any, int] = self.compiler.call(remote.build_cached, self.root, table, "pkg", self.cache)
        return answer

    def afresh(self, **changes: Any) -> Any:
        """Return the modules as a build without a cache makes them."""
        return self.compiler.call(remote.build, self.root, {**TABLE, "cuda": self.compiler.line, **changes}, "pkg")


@pytest.fixture
def project(compiler: Compiler, tmp_path: Path) -> Project:
    """A project that was built once."""
    made = Project(compiler, tmp_path / "project", tmp_path / "cache")
    assert made.build()[1] == 0
    return made


def test_what_is_compiled_again(project: Project) -> None:
    """After each change of a file or key nothing stale is taken: the result is that of a build without a cache."""
    first, hits = project.build()
    assert hits == TASKS
    seen = [first]
    for file, text in (
        ("src/a.cu", SOURCE.replace("* VALUE", "- VALUE")),
        ("inc/own.cuh", "#pragma once\n__device__ float own(float x) { return x + 2; }\n"),
        ("src/own.cuh", "#pragma once\n__device__ float own(float x) { return x + 3; }\n"),  # found before that in inc/
    ):
        project.write(file, text)
        found, hits = project.build()
        assert hits == 0, file
        assert found not in seen, file
        seen.append(found)
    assert found == project.afresh()
    changes: list[dict[str, Any]] = [
        {"defines": {"VALUE": 3}},
        {"std": "c++20"},
        {"options": ["--use_fast_math"]},
        {"options": ["-Xptxas=-O0"]},
        {"lineinfo": True},
        {"debug": True},
        {"modules": [{**TABLE["modules"][0], "kernels": ["t<int>", "t<double>"]}]},
    ]
    for change in changes:
        found, hits = project.build(**change)
        assert hits == (2 if change == {"options": ["-Xptxas=-O0"]} else 0), change  # nothing new for two front ends
        assert found not in seen, change
        seen.append(found)
    assert seen[-1] == project.afresh(**changes[-1])
    found, hits = project.build()
    assert (found, hits) == (seen[3], TASKS)


def test_what_is_not_compiled_again(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another path, user, environment, order and number of jobs, new times and unused files: all from the cache."""
    first, _ = project.build()
    moved = shutil.copytree(project.root, tmp_path / "quite" / "an other é")
    (moved / "other" / "unused.h").write_text("int unused;", encoding="utf-8")
    (moved / "src" / "a.cu").touch()
    (moved / "inc" / "own.cuh").chmod(0o600)
    project.root = moved
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    monkeypatch.chdir(tmp_path)
    changes: dict[str, Any] = {
        "modules": [{**TABLE["modules"][0], "kernels": ["t<float>", "t<int>"]}],
        "archs": ["compute_80", "sm_90", "sm_80"],
        "jobs": 1,
    }
    assert project.build(**changes) == (first, TASKS)
    assert list((tmp_path / "t").iterdir()) == []


#: Variables that compilers read, each with a value that would show in the result or break the compilation.
ENVIRON = {
    "NVRTC_APPEND_FLAGS": "--define-macro=VALUE=7 --generate-line-info",
    "NVRTC_PREPEND_FLAGS": "--define-macro=VALUE=7 --generate-line-info",
    "NVCC_APPEND_FLAGS": "-DVALUE=7",
    "NVCC_PREPEND_FLAGS": "-DVALUE=7",
    "LLVM_OVERRIDE_PRODUCER": "someone else",
    "NV_NVVM_VERSION": "1",
    "EDG_BASE": "/nowhere",
    "CPATH": "/nowhere",
    "CPLUS_INCLUDE_PATH": "/nowhere",
    "PWD": "/nowhere",
    "HOME": "/nowhere",
    "USER": "someone",
    "LOGNAME": "someone",
    "LC_ALL": "de_DE.UTF-8",
    "LANG": "de_DE.UTF-8",
    "TZ": "Asia/Tokyo",
    "SOURCE_DATE_EPOCH": "1",
    "MAKEFLAGS": "-j1",
    "PYTHONHASHSEED": "7",
}


def test_compilers_are_not_influenced(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says to compilers, a build without a cache gives the same result."""
    first = project.afresh(debug=True)
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    assert project.afresh(debug=True) == first


def test_computed_include_that_was_not_found(project: Project) -> None:
    """A header that is included through a macro is in the project, but not in the tree: an error with advice."""
    project.write("inc/config.cuh", "#undef VALUE\n#define VALUE 4\n")
    with pytest.raises(CompileError) as caught:
        project.build(defines={"CONFIG": '"config.cuh"'})
    assert 'cannot open source file "config.cuh"' in str(caught.value)
    assert (
        "One that is included through a macro, or by a header of the toolkit, is not found by itself: list it in"
        in str(caught.value)
    )


def test_computed_include_that_is_listed(project: Project) -> None:
    """Listed in `headers` it is found, its content counts, and so does what it includes."""
    keys: dict[str, Any] = {"defines": {"CONFIG": '"config.cuh"'}, "headers": ["inc/con*.cuh"]}
    project.write("inc/config.cuh", '#include "deep.h"\n')
    seen = []
    for value in (4, 5):
        project.write("inc/deep.h", f"#define VALUE {value}\n")
        found, hits = project.build(**keys)
        assert hits == 0
        assert found not in seen
        assert project.build(**keys) == (found, TASKS)
        seen.append(found)


def test_include_of_a_file_elsewhere(project: Project, tmp_path: Path) -> None:
    """A macro can lead out of the tree; what is compiled then is not kept, so that it is never stale."""
    keys: dict[str, Any] = {"defines": {"CONFIG": f'"{tmp_path}/elsewhere.h"'}}
    seen = []
    for value in (4, 5):
        (tmp_path / "elsewhere.h").write_text(f"#define VALUE {value}\n", encoding="utf-8")
        found, _ = project.build(**keys)
        assert found not in seen
        seen.append(found)
    entries = sorted(project.cache.rglob("*"))
    assert project.build(**keys)[1] == TASKS - 2  # the front ends run again; their PTX is known
    assert sorted(project.cache.rglob("*")) == entries
