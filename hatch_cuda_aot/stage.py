"""Lays a build's files out: the runtime, the manifest and the images, in a folder of their own.

The folder is written beside its place and then moved there, so that a build that fails leaves the one before it as it
was.  What a killed build leaves beside it, the next one removes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hatch_cuda_aot.errors import SourceError
from hatch_cuda_aot.scratch import locked
from hatch_cuda_aot.stub import make_stub

__all__ = ["FOLDER", "remove_folder", "remove_leftovers", "runtime_files", "write_folder", "write_new_folder"]

#: Name of the folder inside the package.
FOLDER = "_cuda_aot"

_RUNTIME = Path(__file__).parent / "runtime"


def runtime_files(kernels: Iterable[str]) -> dict[str, bytes]:
    """Return the loader's files by name, with a stub that knows the names of `kernels`."""
    files = {path.name: path.read_bytes() for path in sorted(_RUNTIME.glob("*.py"))}
    files["py.typed"] = b""
    files["__init__.pyi"] = make_stub(files["__init__.py"].decode(), kernels).encode()
    return files


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make `folder` hold exactly `files`, or leave it as it is; builds that do so at once wait for each other.

    A file that is there already is not written again.

    Raises:
        SourceError: if the place cannot be written.

    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot write to {folder.parent}: {error.strerror}"
        raise SourceError(message) from error
    aside = folder.parent / "__pycache__" / f"{folder.name}.{os.getpid()}.tmp"  # hatchling ships no __pycache__
    with locked(folder.parent) as alone:
        if alone:
            _sweep(folder)
        try:
            _write(aside / "new", files, folder)
            _replace(folder, aside / "new", aside / "old")
        except OSError as error:
            message = f"cannot write {folder}: {error.strerror}"
            raise SourceError(message) from error
        finally:
            _remove(aside)


def write_new_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make `folder`, in a place that only this build knows.

    Raises:
        SourceError: if the place cannot be written.

    """
    try:
        _write(folder, files)
    except OSError as error:
        message = f"cannot write {folder}: {error.strerror}. Free some space, or set TMPDIR"
        raise SourceError(message) from error


def _write(folder: Path, files: Mapping[str, bytes], before: Path | None = None) -> None:
    """Make `folder`; what the folder `before` has already is linked."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if before is None or not _linked(path, before / name, content):
            path.write_bytes(content)
        path.chmod(0o644)
    folder.chmod(0o755)


def _replace(folder: Path, new: Path, old: Path) -> None:
    try:
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
    finally:
        if old.exists() and not folder.exists():  # it failed, or was interrupted, between the two moves
            os.rename(old, folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what builds that were killed while they wrote `folder` left beside it."""
    if any(_leftovers(folder)):
        with locked(folder.parent) as alone:
            if alone:
                _sweep(folder)


def _leftovers(folder: Path) -> Iterator[Path]:
    return (folder.parent / "__pycache__").glob(f"{folder.name}.*.tmp")


def _sweep(folder: Path) -> None:
    for aside in _leftovers(folder):
        _remove(aside)


def _remove(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):
        aside.parent.rmdir()  # unless Python has something in it


def _linked(path: Path, old: Path, content: bytes) -> bool:
    """Make `path` a link to `old` if that holds `content`; tell whether it was done."""
    try:
        if old.is_symlink() or old.stat().st_size != len(content) or old.read_bytes() != content:
            return False
        os.link(old, path)
    except OSError:  # it is not there, or the file system has no links
        return False
    return True


def remove_folder(folder: Path) -> None:
    """Remove what `write_folder` made at `folder`; anything else is left alone."""
    if (folder / "loader.py").is_file() and (folder / "manifest.json").is_file():
        shutil.rmtree(folder)
