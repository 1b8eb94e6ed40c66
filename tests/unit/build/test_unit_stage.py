"""Laying files out: all or nothing, and nothing that is not ours is ever removed."""

from __future__ import annotations

import ast
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hatch_cuda_aot import runtime
from hatch_cuda_aot.errors import SourceError
from hatch_cuda_aot.stage import FOLDER, remove_folder, remove_leftovers, runtime_files, write_folder
from hatch_cuda_aot.stub import make_stub

FILES = {"loader.py": b"new", "manifest.json": b"{}", "k.sm_90.cubin": b"\x7fELF"}
OLD = {"loader.py": b"old", "manifest.json": b"{}", "gone.sm_75.cubin": b"old"}


def contents(folder: Path) -> dict[str, bytes]:
    """Return a folder's files by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a package gets its folder; the package exists."""
    (tmp_path / "pkg").mkdir()
    return tmp_path / "pkg" / FOLDER


def test_new_folder(folder: Path) -> None:
    """The folder holds exactly the files, and nothing else is left beside it."""
    write_folder(folder, FILES)
    assert contents(folder) == FILES
    assert [path.name for path in folder.parent.iterdir()] == [FOLDER]


def test_missing_parents(tmp_path: Path) -> None:
    """Folders above are made."""
    write_folder(tmp_path / "a" / "b" / FOLDER, FILES)
    assert contents(tmp_path / "a" / "b" / FOLDER) == FILES


def test_replacement(folder: Path) -> None:
    """Of the build before nothing is left: a stale image never ships."""
    write_folder(folder, OLD)
    write_folder(folder, FILES)
    assert contents(folder) == FILES
    assert [path.name for path in folder.parent.iterdir()] == [FOLDER]


def test_files_that_did_not_change_are_not_written(folder: Path) -> None:
    """Of a build that changes one file, the others keep their place on disk and their times."""
    write_folder(folder, FILES)
    os.utime(folder / "loader.py", ns=(10**18, 10**18))
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    write_folder(folder, {**FILES, "manifest.json": b"[]"})
    after = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert {name for name in after if after[name] == before[name]} == {"loader.py", "k.sm_90.cubin"}
    assert contents(folder)["manifest.json"] == b"[]"


def test_file_system_without_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no links, files are written."""

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    write_folder(folder, FILES)
    monkeypatch.setattr(os, "link", refuse)
    write_folder(folder, FILES)
    assert contents(folder) == FILES


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_modes(folder: Path) -> None:
    """Files and folder get the same modes whatever the umask, so that wheels repeat."""
    before = os.umask(0o077)
    try:
        write_folder(folder, FILES)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}


def failing(monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException) -> None:
    """Make a step fail: a write, the move of the old folder out of the way, or that of the new one into place."""
    rename, write_bytes = os.rename, Path.write_bytes
    calls: list[object] = []

    def fail_write(path: Path, data: bytes) -> int:
        calls.append(path)
        if len(calls) == 2:
            raise error
        return write_bytes(path, data)

    def fail_rename(source: Path, target: Path) -> None:
        if (where == "move out" and source.name == FOLDER) or (
            where == "move in" and target.name == FOLDER and source.name != "old"
        ):
            raise error
        rename(source, target)

    if where == "write":
        monkeypatch.setattr(Path, "write_bytes", fail_write)
    else:
        monkeypatch.setattr(os, "rename", fail_rename)


@pytest.mark.parametrize("where", ["write", "move out", "move in"])
@pytest.mark.parametrize(
    ("error", "seen"), [(OSError(28, "No space left on device"), SourceError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_failure_leaves_the_build_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException, seen: type[BaseException]
) -> None:
    """Whichever step fails, by the disk or by Ctrl-C, the old folder is as it was and nothing lies about."""
    write_folder(folder, OLD)
    with monkeypatch.context() as patch:
        failing(patch, where, error)
        with pytest.raises(seen) as caught:
            write_folder(folder, FILES)
    assert contents(folder) == OLD
    assert [path.name for path in folder.parent.iterdir()] == [FOLDER]
    if seen is SourceError:
        assert str(caught.value) == f"cannot write {folder}: No space left on device"


def test_failure_without_a_build_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first build that fails leaves no folder at all."""
    with monkeypatch.context() as patch:
        failing(patch, "write", OSError(28, "No space left on device"))
        with pytest.raises(SourceError):
            write_folder(folder, FILES)
    assert list(folder.parent.iterdir()) == []


def test_what_a_killed_build_left(folder: Path) -> None:
    """What builds left that were killed in the middle is gone after the next build, with or without a folder in place."""
    for name in ("_cuda_aot.1.tmp/new/loader.py", "_cuda_aot.1.tmp/old/loader.py", "_cuda_aot.22.tmp/new/k.ptx"):
        path = folder.parent / "__pycache__" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"half")
    (folder.parent / "__pycache__" / "mine.pyc").write_bytes(b"")
    write_folder(folder, FILES)
    assert contents(folder) == FILES
    assert sorted(path.name for path in folder.parent.rglob("*") if FOLDER not in str(path.parent)) == sorted(
        [FOLDER, "__pycache__", "mine.pyc"]
    )


def test_removing_leftovers(folder: Path) -> None:
    """Builds that write no folder remove leftovers too; where there are none, nothing is touched."""
    remove_leftovers(folder)
    assert list(folder.parent.iterdir()) == []
    (folder.parent / "__pycache__" / "_cuda_aot.1.tmp" / "new").mkdir(parents=True)
    remove_leftovers(folder)
    assert list(folder.parent.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_two_builds_at_once(folder: Path) -> None:
    """However many processes write the folder at once, each succeeds, and at the end it is one of theirs, whole."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom hatch_cuda_aot.stage import write_folder\n"
        "files = {f'{n}.cubin': sys.argv[2].encode() * 1000 for n in range(50)}\n"
        "for _ in range(20): write_folder(Path(sys.argv[1]), {**files, f'{sys.argv[2]}.ptx': b''})\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", script, str(folder)]
    builds = [subprocess.Popen([*command, name], env=environ, stderr=subprocess.PIPE, text=True) for name in "abcd"]
    errors = [build.communicate(timeout=120)[1] for build in builds]
    assert errors == [""] * 4
    found = contents(folder)
    assert len(found) == 51
    (winner,) = {data[:1].decode() for name, data in found.items() if name.endswith(".cubin")}
    assert f"{winner}.ptx" in found
    assert [path.name for path in folder.parent.iterdir()] == [FOLDER]


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A parent that is no folder is an error with the place."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match=r"^cannot write to .*file: "):
        write_folder(tmp_path / "file" / FOLDER, FILES)


def test_remove(folder: Path) -> None:
    """What a build wrote is removed; doing so twice is no error."""
    write_folder(folder, FILES)
    remove_folder(folder)
    assert not folder.exists()
    remove_folder(folder)


@pytest.mark.parametrize("missing", ["loader.py", "manifest.json"])
def test_remove_leaves_what_is_not_ours(folder: Path, missing: str) -> None:
    """A folder that does not look like a build's is left alone, whatever its name."""
    write_folder(folder, {name: data for name, data in FILES.items() if name != missing})
    before = contents(folder)
    remove_folder(folder)
    assert contents(folder) == before


def test_remove_a_folder_of_someone_else(tmp_path: Path) -> None:
    """A user's own folder of the same name survives."""
    (tmp_path / "mine.txt").write_bytes(b"mine")
    remove_folder(tmp_path)
    assert (tmp_path / "mine.txt").exists()


def test_runtime_files() -> None:
    """The loader goes in as it is, byte for byte, with the marker for type checkers and a stub; no tests, no caches."""
    files = runtime_files(["axpy<float>"])
    source = Path(str(runtime.__file__)).parent
    assert set(files) == {path.name for path in source.glob("*.py")} | {"py.typed", "__init__.pyi"}
    assert {"__init__.py", "loader.py", "manifest.py", "select.py", "arch.py"} <= set(files)
    assert all(files[path.name] == path.read_bytes() for path in source.glob("*.py"))
    assert files["__init__.pyi"] == make_stub(files["__init__.py"].decode(), ["axpy<float>"]).encode()


@pytest.fixture
def stub() -> Callable[..., ast.Module]:
    """Return a function that makes the real loader's stub for some kernels, and parses it."""
    source = runtime_files(["k"])["__init__.py"].decode()
    return lambda *names: ast.parse(make_stub(source, names))


def functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Return the functions of a module by name."""
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_stub_has_the_public_functions(stub: Callable[..., ast.Module]) -> None:
    """Every public function has its signature, and every public name is exported."""
    source = ast.parse(runtime_files(["k"])["__init__.py"])
    expected = {name: node for name, node in functions(source).items() if not name.startswith("_")}
    found = functions(stub("axpy<float>"))
    assert list(found) == list(expected)
    for name, node in expected.items():
        assert [each.arg for each in found[name].args.args] == [each.arg for each in node.args.args]
        assert [each.arg for each in found[name].args.kwonlyargs] == [each.arg for each in node.args.kwonlyargs]
        assert ast.dump(found[name].returns or ast.Pass()) == ast.dump(node.returns or ast.Pass())
    exported = next(node.value for node in stub("k").body if isinstance(node, ast.Assign))
    assert set(ast.literal_eval(exported)) == set(runtime.__all__)


def test_stub_knows_the_kernels(stub: Callable[..., ast.Module]) -> None:
    """The kernels' names are literals, sorted, which ``get_kernel`` takes beside any other string."""
    tree = stub("b", "axpy<float>", 'odd"name')
    names = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KernelName"
    )
    assert isinstance(names, ast.Subscript)
    assert ast.literal_eval(names.slice) == ("axpy<float>", "b", 'odd"name')
    (name, *_) = functions(tree)["get_kernel"].args.args
    assert name.annotation is not None
    assert ast.unparse(name.annotation) == "KernelName | str"


def test_stub_needs_no_cuda_at_run_time(folder: Path, stub: Callable[..., ast.Module]) -> None:
    """Names that only annotations need are imported in the stub, too, so that it stands alone."""
    write_folder(folder, {"__init__.pyi": ast.unparse(stub("k")).encode()})
    text = (folder / "__init__.pyi").read_text(encoding="utf-8")
    shutil.rmtree(folder)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in functions(ast.parse(text)).values():
        arguments = [*node.args.args, *node.args.kwonlyargs]
        annotations = [argument.annotation for argument in arguments] + [node.returns]
        used = {name.id for each in annotations if each for name in ast.walk(each) if isinstance(name, ast.Name)}
        assert used <= imported | {
            "KernelName",
            "str",
            "int",
            "float",
            "object",
            "bool",
            "list",
            "tuple",
            "bytes",
            "None",
        }
