"""Kernels in a source tree: the loader notices that a source changed since the build."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hatch_cuda_aot.runtime
from hatch_cuda_aot.runtime.errors import ManifestError
from hatch_cuda_aot.runtime.loader import Loader

from .conftest import FakePackage

RUNTIME = Path(hatch_cuda_aot.runtime.__file__).parent
SOURCES = {"src/a.cu": b"first", "src/b.cuh": b"second", "src/c.cuh": b"third", "src/d.cuh": b"fourth"}


class Tree:
    """A project in a folder with a built package in it."""

    def __init__(self, root: Path, package: FakePackage) -> None:
        self.root = root
        self.folder = package.add("axpy", {"axpy<float>": "axpy_f"}, {"sm_90": 12000}).write()
        (root / "src").mkdir()
        (root / "pyproject.toml").touch()
        for path, content in SOURCES.items():
            (root / path).write_bytes(content)
        self.rebuild(value=False)

    def rebuild(self, *, value: bool) -> None:
        """Write the manifest as a build into the tree does."""
        index = self.folder / "manifest.json"
        data = json.loads(index.read_text())
        files = {
            path: {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()} for path, text in SOURCES.items()
        }
        data["tree"] = {"root": "../..", "rebuild": value, "files": files}
        index.write_text(json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n")

    def warnings(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        """Use a fresh loader twice; return what it warned of."""
        caplog.clear()
        loader = Loader(str(self.folder), "demo")
        assert loader.kernel_names() == loader.kernel_names() == ["axpy<float>"]
        assert {record.name for record in caplog.records} <= {"demo.cuda_aot"}
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def tree(tmp_path: Path, package: FakePackage) -> Tree:
    return Tree(tmp_path, package)


def test_unchanged(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    """Sources that are as they were built need no word, also if they were touched or checked out again."""
    os.utime(tree.root / "src/a.cu", ns=(10**18, 10**18))
    assert tree.warnings(caplog) == []


def test_changed(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    """One warning names the file and the command, once for a process; contents of the same size count as well."""
    (tree.root / "src/a.cu").write_bytes(b"FIRST")
    words = "src/a.cu changed after the kernels of demo were built; build them again with: hatch-cuda-aot build"
    assert tree.warnings(caplog) == [f"{words} {tree.root}"]


def test_many_changes(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    """However many changed, it is one warning."""
    (tree.root / "src/a.cu").unlink()
    for name in "bcd":
        (tree.root / f"src/{name}.cuh").write_bytes(b"new")
    (warning,) = tree.warnings(caplog)
    assert warning.startswith(
        "src/a.cu was removed, src/b.cuh changed, src/c.cuh changed and 1 more files after the kernels"
    )


def test_package_without_its_project(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    """A copy of the package alone says nothing: nobody there can build again."""
    shutil.rmtree(tree.root / "src")
    (tree.root / "pyproject.toml").unlink()
    assert tree.warnings(caplog) == []


def test_rebuild_without_hatch_cuda_aot(
    tree: Tree, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where hatch_cuda_aot is not installed, `editable-rebuild` can only warn, and says so."""
    tree.rebuild(value=True)
    (tree.root / "src/a.cu").write_bytes(b"new")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (warning,) = tree.warnings(caplog)
    assert warning.endswith("(hatch_cuda_aot, which editable-rebuild needs, is not installed here)")


def test_rebuild_that_fails(tree: Tree) -> None:
    """Old kernels do not run in the place of new ones: the error says why the build failed, and a later call tries again."""
    tree.rebuild(value=True)
    (tree.root / "src/a.cu").write_bytes(b"new")
    loader = Loader(str(tree.folder), "demo")
    for _ in range(2):
        with pytest.raises(ManifestError) as caught:
            loader.kernel_names()
        words = "src/a.cu changed, and building the kernels of demo again (hatch-cuda-aot build "
        assert str(caught.value).startswith(words)
        assert str(caught.value).endswith("failed: pyproject.toml: Missing `project` metadata table in configuration")
    (tree.root / "src/a.cu").write_bytes(SOURCES["src/a.cu"])
    assert loader.kernel_names() == ["axpy<float>"]


def test_one_of_many_processes_builds(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process built while this one waited for it is taken, and not built again."""
    from hatch_cuda_aot.runtime import editable

    tree.rebuild(value=True)
    (tree.root / "src/a.cu").write_bytes(b"new")
    locked = editable._locked

    def waited(folder: str) -> Any:
        monkeypatch.setitem(SOURCES, "src/a.cu", b"new")
        tree.rebuild(value=True)
        return locked(folder)

    monkeypatch.setattr(editable, "_locked", waited)
    monkeypatch.setattr(editable, "_rebuild", lambda *_: pytest.fail("it was built twice"))
    assert Loader(str(tree.folder), "demo").kernel_names() == ["axpy<float>"]


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_lock(tmp_path: Path) -> None:
    """A second process waits until the first is done."""
    import fcntl

    from hatch_cuda_aot.runtime.editable import _locked

    with _locked(str(tmp_path)):
        descriptor = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


@pytest.mark.parametrize("in_tree", [False, True])
def test_wheels_pay_nothing(tmp_path: Path, package: FakePackage, *, in_tree: bool) -> None:
    """The module that looks at sources is imported in a source tree only."""
    tree = Tree(tmp_path, package)
    if not in_tree:
        package.write()
    for source in RUNTIME.glob("*.py"):
        shutil.copy(source, package.folder)
    (package.folder.parent / "__init__.py").touch()
    code = (
        f"import sys; sys.path.insert(0, {str(tree.root)!r})\n"
        "import demo._cuda_aot as kernels\n"
        "kernels.kernel_names()\n"
        "print([name for name in ('demo._cuda_aot.editable', 'logging', 'subprocess') if name in sys.modules])\n"
    )
    output = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    assert ("editable" in output) is in_tree
    assert in_tree or output == "[]\n"
