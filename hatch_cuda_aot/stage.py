"""Lays a build's files out: the runtime, the manifest and the images, in a folder of their own.

The folder is written beside its place and then moved there, so that a build that fails leaves the one before it as it
was.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from hatch_cuda_aot.errors import SourceError
from hatch_cuda_aot.stub import make_stub

__all__ = ["FOLDER", "remove_folder", "runtime_files", "write_folder"]

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
    """Make `folder` hold exactly `files`, or leave it as it is.  A file that is there already is not written again.

    Raises:
        SourceError: if the place cannot be written.

    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        message = f"cannot write to {folder.parent}: {error.strerror}"
        raise SourceError(message) from error
    old = staging.with_name(f"{staging.name}-old")
    try:
        for name, content in files.items():
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not _linked(path, folder / name, content):
                path.write_bytes(content)
            path.chmod(0o644)
        staging.chmod(0o755)
        if folder.exists():
            os.rename(folder, old)
        os.rename(staging, folder)
    except OSError as error:
        message = f"cannot write {folder}: {error.strerror}"
        raise SourceError(message) from error
    finally:
        if old.exists() and not folder.exists():  # it failed, or was interrupted, between the two moves
            os.rename(old, folder)
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


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
