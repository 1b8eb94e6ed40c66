"""Reads files of the package and holds them against the size and digest that the manifest has of them.

The driver takes a cubin that was cut off without a word, and crashes on some that were changed, so nothing that fails here
reaches it.  Large files carry the digests of their parts too: those are read and hashed side by side.
"""

from __future__ import annotations

import os
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from io import RawIOBase

__all__ = ["PART_BYTES", "DamagedError", "read_verified"]

#: Bytes in each part of a large file that has a digest of its own; the last part may have fewer.
PART_BYTES = 1 << 20

#: Threads that read a large file; the memory of most machines is busy with fewer.
_THREADS = 6


class DamagedError(Exception):
    """A file is not the one that was built.

    Attributes:
        path: the file.
        expected: its size, or its digest, as it was written.
        actual: what was found in its place.

    """

    def __init__(self, path: str, expected: str, actual: str) -> None:
        super().__init__(f"{path} is damaged: expected {expected}, found {actual}")
        self.path = path
        self.expected = expected
        self.actual = actual


def read_verified(path: str, size: int, digest: str, parts: Sequence[str] = ()) -> bytes | bytearray:
    """Return the content of the file `path`.

    Args:
        path: the file.
        size: in bytes.
        digest: its SHA-256, in lower-case hex.
        parts: the SHA-256 of each `PART_BYTES` of it, in order, which are then checked in place of `digest`; none for a
            file that is not worth it.

    Raises:
        DamagedError: if it cannot be read, or is not of that size and digest.

    """
    try:
        descriptor = os.open(path, _FLAGS)
        try:
            actual = os.fstat(descriptor).st_size
            if actual != size:
                raise DamagedError(path, f"{size} bytes", f"{actual} bytes")
            if parts:
                return _read_parts(path, size, parts)
            content = os.read(descriptor, size)
            while len(content) < size:  # a read may return less than there is
                more = os.read(descriptor, size - len(content))
                if not more:
                    raise DamagedError(path, f"{size} bytes", f"{len(content)} bytes")
                content += more
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DamagedError(path, f"{size} bytes", error.strerror or str(error)) from error
    found = sha256(content).hexdigest()
    if found != digest:
        raise DamagedError(path, f"SHA-256 {digest}", f"SHA-256 {found}")
    return content


def _read_parts(path: str, size: int, digests: Sequence[str]) -> bytearray:
    """Return the content of `path`, each part read and checked by the next thread that is free."""
    import threading

    count = -(-size // PART_BYTES)
    if len(digests) != count:
        raise DamagedError(path, f"{count} digests of parts", f"{len(digests)} in the manifest")
    content = bytearray(size)
    view = memoryview(content)
    waiting = list(range(count))
    waiting.reverse()  # `pop` takes the first
    errors: list[Exception] = []

    def work() -> None:
        try:
            with open(path, "rb", buffering=0) as file:
                while waiting and not errors:
                    try:
                        number = waiting.pop()
                    except IndexError:  # another thread took the last one
                        return
                    start = number * PART_BYTES
                    _read_part(file, path, start, view[start : start + PART_BYTES], digests[number])
        except Exception as error:  # noqa: BLE001 -- raised by the thread that waits for all
            errors.append(error)

    helpers: list[threading.Thread] = []
    for _ in range(min(_THREADS, _cpus(), count) - 1):
        helper = threading.Thread(target=work, daemon=True)
        try:
            helper.start()
        except RuntimeError:  # the system has no more of them, or the interpreter is about to end: fewer do it as well
            break
        helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return content


def _read_part(file: RawIOBase, path: str, start: int, part: memoryview, digest: str) -> None:
    """Fill `part` from position `start` of `file`, and check it."""
    file.seek(start)
    got = 0
    while got < len(part):  # a read may return less than there is
        more = file.readinto(part[got:])
        if not more:
            raise DamagedError(path, f"{start + len(part)} bytes or more", f"{start + got} bytes")
        got += more
    found = sha256(part).hexdigest()
    if found != digest:
        where = f"bytes {start} to {start + len(part) - 1}"
        raise DamagedError(path, f"SHA-256 {digest} of {where}", f"SHA-256 {found}")


def _cpus() -> int:
    """Return how many CPUs this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


#: On Windows a file is text unless one says otherwise.
_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0)
