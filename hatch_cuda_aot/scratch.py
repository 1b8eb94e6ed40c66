"""Temporary folders and files that do not outlive their build for long, however it ends.

Who makes one holds a lock on it.  The system drops the lock with the process, even after ``kill -9``, so a later build
knows what nobody will come back for.  Windows has no such locks: there, what a killed build leaves stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from hatch_cuda_aot.errors import BuildError

if sys.platform != "win32":
    import fcntl

__all__ = ["Scratch", "is_abandoned", "locked", "try_lock"]

_PREFIX = "hatch-cuda-aot-build-"


class Scratch:
    """A new folder below ``TMPDIR``; it goes with `close` or the end of the process, or else with the next build.

    Raises:
        BuildError: if it cannot be made.

    """

    def __init__(self) -> None:
        try:
            self.path, descriptor = _make()
        except OSError as error:
            message = f"cannot make a temporary folder: {error.strerror}. Set TMPDIR to a folder with free space"
            raise BuildError(message) from error
        self._finalizer = weakref.finalize(self, _remove, self.path, descriptor)
        _sweep(self.path.parent)

    def close(self) -> None:
        """Remove the folder with all that is in it."""
        self._finalizer()


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed; False if another process has it, or if it cannot be locked."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_abandoned(path: Path) -> bool:
    """Tell whether nobody holds the lock on a file or folder, and so the process that made it is gone."""
    with _taken_over(path) as abandoned:
        return abandoned


@contextlib.contextmanager
def _taken_over(path: Path) -> Iterator[bool]:
    """Hold the lock on a file or folder in the block, if nobody else does; say whether that is so."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Wait until no other process is in this block for the same folder; False where folders cannot be locked."""
    descriptor, alone = -1, False
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            alone = True
    try:
        yield alone
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _make() -> tuple[Path, int]:
    """Return a new folder and the descriptor that holds its lock, or -1 where there are no locks."""
    for _ in range(100 if sys.platform != "win32" else 0):
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with contextlib.suppress(FileNotFoundError):  # another build swept it away before it was locked
            descriptor = os.open(folder, os.O_RDONLY)
            if try_lock(descriptor) and folder.is_dir():
                return folder, descriptor
            os.close(descriptor)  # the same; or nothing can be locked there
            folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=_PREFIX)), -1


def _remove(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if descriptor >= 0:
        os.close(descriptor)


def _sweep(parent: Path) -> None:
    """Remove what killed builds of this user left."""
    if sys.platform == "win32":
        return
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                # With the lock held until it is gone: whoever just made it sees that, and makes another.
                with _taken_over(folder) as abandoned:
                    if abandoned:
                        shutil.rmtree(folder, ignore_errors=True)
