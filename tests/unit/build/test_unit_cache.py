"""The cache: everything that a result depends on is in its key, and what is damaged is no result."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from hatch_cuda_aot import cache as cache_module
from hatch_cuda_aot.cache import Cache, is_cacheable, key_of, open_cache
from hatch_cuda_aot.compile.tasks import (
    AssembleResult,
    AssembleTask,
    Compiler,
    FloorResult,
    FloorTask,
    FrontResult,
    FrontTask,
    Resources,
)
from hatch_cuda_aot.locations import default_folder
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.scratch import try_lock
from hatch_cuda_aot.sources import SourceTree
from hatch_cuda_aot.toolchain import Needs, Toolchain

TREE = SourceTree.of_texts({"k.cu": '#include "a.h"', "a.h": "int x;"})
FRONT = FrontTask(
    compiler=Compiler("12.9"),
    module="k",
    arch=Arch(90, virtual=True),
    tree=TREE,
    sources=("k.cu",),
    expressions=(("f<int>", "k.cu"),),
    nvrtc=("--std=c++17",),
    nvjitlink=("-ftz=1",),
    prune=True,
)
ASSEMBLE = AssembleTask(compiler=Compiler("12.9"), module="k", arch=Arch(90), ptx=b".version 8.8", ptxas=("-O3",))
TOOLCHAIN = Toolchain(
    line="12.9",
    nvrtc="12.9.86",
    ptxas="12.9.86",
    ptxas_path="/venv/ptxas",
    cccl="3000003",
    include_dirs=(("include", "/venv/include"),),
    archs=(75, 80, 90),
    nvjitlink="12.9.86",
    bindings="12.9.2",
    headers=(("include", "nvidia_cuda_runtime_cu12-12.9.79"), ("curand", "nvidia_curand_cu12-10.3.10.19")),
)
LINKED = dataclasses.replace(FRONT, sources=("k.cu", "a.h"))
FRONT_RESULT = FrontResult(b".version 8.8\n", {"f<int>": "_Z1fIiEvv"}, 12090, "a warning")
FLOOR = FloorTask(compiler=Compiler("12.9"), module="k", arch=Arch(90, virtual=True), ptx=ASSEMBLE.ptx, ptxas=("-O3",))
FLOOR_RESULT = FloorResult("7.8", 11080)
ASSEMBLE_RESULT = AssembleResult(b"\x7fELF", {"_Z1fIiEvv": Resources(registers=8)}, "")


def changed(value: Any, **changes: object) -> Any:
    """Return a value with some fields changed."""
    return dataclasses.replace(value, **changes)


@pytest.mark.parametrize(
    "task",
    [
        changed(FRONT, arch=Arch(80, virtual=True)),
        changed(FRONT, arch=Arch(90, "a", virtual=True)),
        changed(FRONT, tree=SourceTree.of_texts({"k.cu": '#include "a.h"', "a.h": "int y;"})),
        changed(FRONT, tree=SourceTree.of_texts({"k.cu": '#include "a.h"', "b.h": "int x;"})),
        changed(FRONT, tree=SourceTree.of_texts({"k.cu": '#include "a.h"', "a.h": "int x;", "z.h": ""})),
        changed(FRONT, sources=("a.h",)),
        changed(FRONT, sources=("k.cu", "a.h")),
        changed(FRONT, expressions=()),
        changed(FRONT, expressions=(("f<float>", "k.cu"),)),
        changed(FRONT, expressions=(("f<int>", "a.h"),)),
        changed(FRONT, nvrtc=("--std=c++20",)),
        changed(FRONT, nvrtc=("--std=c++17", "--restrict")),
        changed(FRONT, nvrtc=("--std=c++17 --restrict",)),
        changed(FRONT, nvjitlink=()),
        changed(FRONT, prune=False),
    ],
)
def test_what_a_front_end_pass_depends_on(task: FrontTask) -> None:
    """A front-end pass has another key as soon as one input of it differs."""
    assert key_of(task, TOOLCHAIN) != key_of(FRONT, TOOLCHAIN)


@pytest.mark.parametrize(
    "task",
    [
        changed(ASSEMBLE, arch=Arch(86)),
        changed(ASSEMBLE, arch=Arch(90, "a")),
        changed(ASSEMBLE, ptx=b".version 8.7"),
        changed(ASSEMBLE, ptxas=()),
        changed(ASSEMBLE, ptxas=("-O3", "-v")),
        changed(ASSEMBLE, ptxas=("-O3,-v",)),
    ],
)
def test_what_an_assembly_depends_on(task: AssembleTask) -> None:
    """An assembly has another key as soon as one input of it differs."""
    assert key_of(task, TOOLCHAIN) != key_of(ASSEMBLE, TOOLCHAIN)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"line": "13.0"}, {"front", "linked", "assemble", "floor"}),
        ({"nvrtc": "12.9.41"}, {"front", "linked"}),
        ({"ptxas": "12.9.41"}, {"front", "linked", "assemble", "floor"}),
        ({"nvjitlink": "12.9.41"}, {"linked"}),
        ({"nvjitlink": ""}, {"linked"}),
        ({"bindings": "12.9.4"}, {"front", "linked", "floor"}),
        ({"cccl": "3000004"}, {"front", "linked"}),
        ({"headers": (("include", "nvidia_cuda_runtime_cu12-12.9.37"), TOOLCHAIN.headers[1])}, {"front", "linked"}),
        ({"headers": (*TOOLCHAIN.headers, ("crt", "nvidia_cuda_nvcc_cu12-12.9.86"))}, {"front", "linked"}),
        ({"headers": (("cccl", TOOLCHAIN.headers[0][1]), TOOLCHAIN.headers[1])}, {"front", "linked"}),
        ({"headers": (TOOLCHAIN.headers[0], ("curand", "another"))}, set()),
        ({"headers": TOOLCHAIN.headers[:1]}, set()),
        ({"ptxas_path": "/elsewhere/ptxas"}, set()),
        ({"include_dirs": (("include", "/elsewhere/include"),)}, set()),
        ({"archs": (90,)}, set()),
    ],
    ids=lambda value: str(sorted(value)),
)
def test_what_of_the_compiler_counts(changes: dict[str, Any], counts: set[str]) -> None:
    """The exact versions of what a task uses are in its key; where they are installed, and what others use, is not."""
    tasks: dict[str, Any] = {"front": FRONT, "linked": LINKED, "assemble": ASSEMBLE, "floor": FLOOR}
    toolchain = changed(TOOLCHAIN, **changes)
    assert {name for name, task in tasks.items() if key_of(task, toolchain) != key_of(task, TOOLCHAIN)} == counts


def test_curand_counts_where_it_is_included() -> None:
    """The folder of cuRAND's headers is in the key of the sources that see it."""
    task = changed(FRONT, tree=SourceTree(TREE.files, frozenset({"curand_kernel.h"})))
    other = changed(TOOLCHAIN, headers=(TOOLCHAIN.headers[0], ("curand", "another")))
    assert key_of(task, other) != key_of(task, TOOLCHAIN)
    assert key_of(task, TOOLCHAIN) != key_of(FRONT, TOOLCHAIN)


@pytest.mark.parametrize("path", ["compile/ptx.py", "compile/run.py", "sources.py", "toolchain.py", "runtime/arch.py"])
def test_program_is_in_the_key(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Another version of the code that makes results from tasks does not meet entries of this one."""
    read = Path.read_bytes
    edited = Path(cache_module.__file__).parent / path
    cache_module.program_digest.cache_clear()
    before = key_of(FRONT, TOOLCHAIN)
    monkeypatch.setattr(Path, "read_bytes", lambda file: read(file) + (b"# edited" if file == edited else b""))
    cache_module.program_digest.cache_clear()
    try:
        assert key_of(FRONT, TOOLCHAIN) != before
    finally:
        cache_module.program_digest.cache_clear()


def test_what_cannot_be_cached() -> None:
    """Where a key cannot say all, nothing is kept: a part of unknown version, or a source that may read other files."""
    assert all(is_cacheable(task, TOOLCHAIN) for task in (FRONT, ASSEMBLE, FLOOR))
    unknown = changed(TOOLCHAIN, unknown=("NVRTC",))
    assert not any(is_cacheable(task, unknown) for task in (FRONT, ASSEMBLE, FLOOR))
    unidentified = changed(TOOLCHAIN, headers=())
    assert not is_cacheable(FRONT, unidentified)
    assert is_cacheable(ASSEMBLE, unidentified)
    computed = changed(FRONT, tree=SourceTree.of_texts({"k.cu": "#include CONFIG"}))
    assert is_cacheable(computed, TOOLCHAIN)
    known = ("--std=c++17", '--define-macro=CONFIG="config.h"')
    assert is_cacheable(changed(computed, nvrtc=known), TOOLCHAIN)
    elsewhere = ('--define-macro=CONFIG="/home/me/config.h"',)
    assert not is_cacheable(changed(computed, nvrtc=elsewhere), TOOLCHAIN)


@pytest.mark.parametrize(
    ("function", "value"),
    [("sys.platform", "win32"), ("platform.machine", lambda: "aarch64")],
    ids=["system", "processor"],
)
def test_platform_is_in_the_key(monkeypatch: pytest.MonkeyPatch, function: str, value: object) -> None:
    """The platform counts, as one cache may serve several: a `long` of a kernel has another size on Windows."""
    before = key_of(FRONT, TOOLCHAIN), key_of(ASSEMBLE, TOOLCHAIN)
    monkeypatch.setattr(function, value)
    after = key_of(FRONT, TOOLCHAIN), key_of(ASSEMBLE, TOOLCHAIN)
    assert not set(before) & set(after)


def test_schema_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of how tasks are run leaves old entries behind."""
    before = key_of(FRONT, TOOLCHAIN), key_of(ASSEMBLE, TOOLCHAIN)
    monkeypatch.setattr(cache_module, "SCHEMA", "another")
    after = key_of(FRONT, TOOLCHAIN), key_of(ASSEMBLE, TOOLCHAIN)
    assert not set(before) & set(after)


@pytest.mark.parametrize(
    "task",
    [
        changed(FRONT, tree=SourceTree.of_texts({"a.h": "int x;", "k.cu": '#include "a.h"'})),
        changed(FRONT, tree=SourceTree(TREE.files, frozenset({"cuda_fp16.h"}))),
        changed(FRONT, module="another"),
        changed(FRONT, compiler=Compiler("12.9", Needs(curand=True))),
    ],
)
def test_what_does_not_count(task: FrontTask) -> None:
    """The order of files, the module's name and what other modules need change nothing in the result, nor in the key."""
    assert key_of(task, TOOLCHAIN) == key_of(FRONT, TOOLCHAIN)


def test_kinds_do_not_meet() -> None:
    """A key is a digest in hex, which two kinds of task never share, even of the same fields."""
    same = AssembleTask(FLOOR.compiler, FLOOR.module, FLOOR.arch, FLOOR.ptx, FLOOR.ptxas)
    keys = {key_of(task, TOOLCHAIN) for task in (FRONT, ASSEMBLE, FLOOR, same)}
    assert len(keys) == 4
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in keys)


@pytest.mark.parametrize("result", [FRONT_RESULT, ASSEMBLE_RESULT, FLOOR_RESULT])
def test_round_trip(tmp_path: Path, result: FrontResult | AssembleResult | FloorResult) -> None:
    """What is put is got, also by another process's cache of the same folder; hits are counted."""
    cache = Cache(tmp_path / "new" / "folder")
    assert cache.get("ab12") is None
    cache.put("ab12", result)
    assert cache.get("ab12") == result
    assert cache.get("ab13") is None
    assert cache.hits == 1
    assert Cache(tmp_path / "new" / "folder").get("ab12") == result


def entry(folder: Path) -> Path:
    """Return the file of the only entry."""
    (path,) = (path for path in folder.rglob("*") if path.is_file())
    return path


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "replaced", "swapped"])
def test_damaged_entry(tmp_path: Path, damage: str) -> None:
    """An entry that was damaged, or is another key's, is dropped, and can be written anew."""
    cache = Cache(tmp_path)
    cache.put("ab13", FRONT_RESULT)
    other = entry(tmp_path).read_bytes()
    entry(tmp_path).unlink()
    cache.put("ab12", FRONT_RESULT)
    path = entry(tmp_path)
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncated": content[:-1],
            "empty": b"",
            "flipped": content[:-1] + bytes([content[-1] ^ 1]),
            "replaced": bytes(32) + content[32:],
            "swapped": other,
        }[damage]
    )
    assert cache.get("ab12") is None
    assert cache.hits == 0
    assert not path.exists()
    cache.put("ab12", FRONT_RESULT)
    assert cache.get("ab12") == FRONT_RESULT


def test_entry_under_another_name(tmp_path: Path) -> None:
    """An entry is good only under its own key, however it came to another name."""
    cache = Cache(tmp_path)
    cache.put("ab12", FRONT_RESULT)
    (tmp_path / "ab" / "ab13").write_bytes((tmp_path / "ab" / "ab12").read_bytes())
    assert cache.get("ab13") is None
    assert cache.get("ab12") == FRONT_RESULT


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_what_a_killed_build_left(tmp_path: Path) -> None:
    """A file that a killed build was writing is removed after the next build; one that is being written now is not."""
    cache = Cache(tmp_path)
    cache.put("ab12", FRONT_RESULT)
    left, live = tmp_path / "ab" / "tmpleft", tmp_path / "ab" / "tmplive"
    left.write_bytes(b"half")
    with live.open("wb") as file:
        assert try_lock(file.fileno())
        cache.trim()
        assert sorted(path.name for path in (tmp_path / "ab").iterdir()) == ["ab12", "tmplive"]
    assert cache.get("ab12") == FRONT_RESULT


def test_unwritable_folder(tmp_path: Path) -> None:
    """A cache that cannot be written to only costs the next build time."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    cache = Cache(tmp_path / "file" / "cache")
    cache.put("ab12", FRONT_RESULT)
    assert cache.get("ab12") is None
    cache.trim(0)


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails on the way, as on a full disk, leaves no entry and no temporary file."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    cache = Cache(tmp_path)
    cache.put("ab12", FRONT_RESULT)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert cache.get("ab12") is None


def test_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during a write is not swallowed, and leaves no half entry."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Cache(tmp_path).put("ab12", FRONT_RESULT)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_trim(tmp_path: Path) -> None:
    """Beyond the limit the least recently used entries go, and a read counts as a use."""
    cache = Cache(tmp_path)
    keys = ["aa1", "bb2", "cc3", "dd4"]
    for age, key in enumerate(keys):
        cache.put(key, FRONT_RESULT)
        os.utime(tmp_path / key[:2] / key, (1000 + age, 1000 + age))
    size = (tmp_path / "aa" / "aa1").stat().st_size
    assert cache.get("aa1") == FRONT_RESULT
    cache.trim(4 * size)
    assert all((tmp_path / key[:2] / key).exists() for key in keys)
    cache.trim(2 * size + 1)
    assert [key for key in keys if (tmp_path / key[:2] / key).exists()] == ["aa1", "dd4"]
    cache.trim(0)
    assert [key for key in keys if (tmp_path / key[:2] / key).exists()] == []


def test_the_end_of_a_build_trims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that wrote something keeps the folder within its limit; one that only read need not look through it."""
    trimmed: list[Cache] = []
    monkeypatch.setattr(Cache, "trim", lambda cache: trimmed.append(cache))  # noqa: PLW0108 -- a method, as it must be bound
    with Cache(tmp_path) as writer:
        writer.put("aa1", FRONT_RESULT)
    with Cache(tmp_path) as reader:
        assert reader.get("aa1") == FRONT_RESULT
    assert trimmed == [writer]


def test_trim_leaves_other_files_alone(tmp_path: Path) -> None:
    """Only entries are removed from the folder that the user chose."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine", encoding="utf-8")
    Cache(tmp_path).trim(0)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "notes.txt"]


@pytest.mark.parametrize("value", ["0", "false", "No", " off "])
def test_turned_off(value: str) -> None:
    """``HATCH_CUDA_AOT_CACHE=0`` means no cache at all."""
    assert open_cache({"HATCH_CUDA_AOT_CACHE": value}) is None


@pytest.mark.parametrize("environ", [{}, {"HATCH_CUDA_AOT_CACHE": "1"}, {"HATCH_CUDA_AOT_CACHE": ""}])
def test_turned_on(environ: dict[str, str]) -> None:
    """Otherwise there is one."""
    assert open_cache(environ) is not None


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's folder wins; the default is the platform's place for caches, under our own name."""
    cache = open_cache({"HATCH_CUDA_AOT_CACHE_DIR": str(tmp_path)})
    assert cache is not None
    cache.put("ab12", FRONT_RESULT)
    assert entry(tmp_path).name == "ab12"
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name, **_: str(tmp_path / name))
    assert default_folder({"HATCH_CUDA_AOT_CACHE_DIR": " "}) == tmp_path / "hatch-cuda-aot" / "build"


def test_the_process_environment_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an environment of its own, `open_cache` reads the process's."""
    monkeypatch.setenv("HATCH_CUDA_AOT_CACHE_DIR", str(tmp_path))
    cache = open_cache()
    assert cache is not None
    cache.put("ab12", FRONT_RESULT)
    assert entry(tmp_path).name == "ab12"
    monkeypatch.setenv("HATCH_CUDA_AOT_CACHE", "0")
    assert open_cache() is None
