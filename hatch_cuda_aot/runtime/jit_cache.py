"""Keeps machine code that was compiled on this machine in files, so that the next process need not compile it again.

It knows keys and bytes, and nothing of CUDA.  Whatever is wrong with the folder costs time and never a kernel: it is
said once per process in the log, and the caller compiles.  Bytes that fail their digest are never handed out.
"""

from __future__ import annotations

import os
import stat
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CACHE", "CACHE_DIR", "LIMIT", "JitCache", "key_of"]

#: Environment variable: 0 turns the cache off.
CACHE = "CUDA_AOT_CACHE"

#: Environment variable: the folder of the cache, in place of the platform's own for caches.
CACHE_DIR = "CUDA_AOT_CACHE_DIR"

#: Bytes that the entries may hold together before those that were read longest ago go.
LIMIT = 256 * 1024**2


class JitCache:
    """A folder with one file per entry.

    Any number of threads and processes may share it without a lock: an entry appears whole, under its name, or not at
    all, and of several writers the last wins.  Nothing is synced to the disk: what a power failure tears is caught by
    its digest like any other damage.

    The folder is used only if it belongs to the user of this process and nobody else may write to it, not even its
    group or in a folder with the sticky bit: whoever can write there can hand us code.  On Windows, where a folder in
    the user's profile is closed to others, the mode is not looked at.
    """

    def __init__(self, folder: str | None, logger: str, limit: int = LIMIT) -> None:
        """Keep entries in `folder`, made when the first is stored; None for no cache.

        Args:
            folder: absolute path.
            logger: name of the logger that gets the one warning.
            limit: in bytes.

        """
        self.folder = folder
        self.limit = limit
        self._logger = logger
        self._readable = self._writable = folder is not None
        self._checked = False
        self._silent = threading.Lock()  # held for ever once the warning is out

    @classmethod
    def from_environment(cls, logger: str) -> JitCache:
        """Return the cache that the environment asks for: by default one in the user's own folder for caches."""
        if os.environ.get(CACHE, "").strip().lower() in {"0", "false", "no", "off"}:
            return cls(None, logger)
        chosen = os.environ.get(CACHE_DIR, "").strip()
        if chosen:
            return cls(os.path.abspath(os.path.expanduser(chosen)), logger)
        try:
            from platformdirs import user_cache_dir
        except ImportError:
            cache = cls(None, logger)
            cache._warn(f"platformdirs is not installed: pip install platformdirs, or set {CACHE_DIR} to a folder")
            return cache
        return cls(user_cache_dir("cuda-aot", appauthor=False), logger)

    def get(self, key: str) -> bytes | None:
        """Return what was stored under `key`, or None; an entry that is damaged is removed."""
        if not self._may_read():
            return None
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError:
            return None  # not there; or not readable, and then `put` replaces it or says why it cannot
        payload = _unwrap(key, content)
        if payload is None:
            _remove(path)
            return None
        with suppress(OSError):  # a folder that is read-only is never trimmed either
            os.utime(path)  # eviction goes by the last read
        return payload

    def put(self, key: str, payload: bytes) -> None:
        """Store `payload` under `key`, and remove the entries that were read longest ago where it gets too much."""
        if not self._writable:
            return
        try:
            os.makedirs(self._folder, 0o700, exist_ok=True)
            if self._may_read():
                self._write(self._path(key), _wrap(key, payload))
                self._trim()
        except OSError as error:
            self._writable = False  # what is there can still be read
            self._warn(f"{self.folder} cannot be written to: {error.strerror or error}")

    def drop(self, key: str) -> None:
        """Remove what was stored under `key`, if there is anything and it can be removed."""
        if self._readable:
            _remove(self._path(key))

    def _may_read(self) -> bool:
        """Tell whether the folder is there and safe, and look only once."""
        if not self._readable or self._checked:
            return self._readable
        try:
            problem = _problem(self._folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            problem = f"{self.folder} cannot be used: {error.strerror or error}"
        if problem:
            self._readable = self._writable = False
            self._warn(problem)
        self._checked = True
        return self._readable

    def _write(self, path: str, content: bytes) -> None:
        import tempfile

        descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except BaseException as error:
            _remove(temporary)
            # Windows replaces no file that another process has open; then that one just stored the same.
            if not (os.name == "nt" and isinstance(error, PermissionError) and os.path.exists(path)):
                raise

    def _trim(self) -> None:
        entries = sorted(self._entries(), reverse=True)
        total = 0
        for _, size, path in entries:
            total += size
            if total > self.limit:
                _remove(path)

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """Yield time of the last read, size and path of each entry; files that a killed process left are removed."""
        import time

        stale = time.time() - _STALE_SECONDS
        with os.scandir(self._folder) as items:
            for item in items:
                with suppress(FileNotFoundError):  # another process was faster
                    if item.name.endswith(_SUFFIX):
                        status = item.stat()
                        yield status.st_mtime, status.st_size, item.path
                    elif item.name.startswith(_TEMPORARY) and item.stat().st_mtime < stale:
                        _remove(item.path)

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, key + _SUFFIX)

    @property
    def _folder(self) -> str:
        assert self.folder is not None
        return self.folder

    def _warn(self, why: str) -> None:
        import logging

        if self._silent.acquire(blocking=False):
            logger = logging.getLogger(self._logger)
            logger.warning(
                "kernels that are compiled on this machine are not cached: %s (%s=0 turns this off)", why, CACHE
            )


def key_of(**fields: object) -> str:
    """Return the key of what depends on `fields` alone, each data that `json` can write."""
    import json
    from hashlib import sha256

    return sha256(json.dumps([_SCHEMA, fields], sort_keys=True).encode()).hexdigest()


#: Part of every key: a change of what is stored must not meet old entries.
_SCHEMA = 1

_MAGIC = b"cuda-aot jit 1\n\0"
_DIGEST_BYTES = 32
_SUFFIX = ".jit"
_TEMPORARY = "tmp-"
_STALE_SECONDS = 3600


def _wrap(key: str, payload: bytes) -> bytes:
    return _MAGIC + _digest(key, payload) + payload


def _unwrap(key: str, content: bytes) -> bytes | None:
    """Return the payload in `content`, or None where it is not what `_wrap` made for `key`."""
    start = len(_MAGIC) + _DIGEST_BYTES
    payload = content[start:]
    return payload if content[:start] == _MAGIC + _digest(key, payload) else None


def _digest(key: str, payload: bytes) -> bytes:
    """Return the SHA-256 of `payload`, bound to its key so that no entry passes under another's name."""
    from hashlib import sha256

    digest = sha256(key.encode())
    digest.update(payload)
    return digest.digest()


def _problem(folder: str) -> str | None:
    """Say why the existing `folder` must not be used; None where it may be.

    Raises:
        OSError: if it cannot be looked at.

    """
    status = os.stat(folder)
    if os.name == "nt":
        return None
    if status.st_uid != os.geteuid():
        return f"{folder} belongs to another user, who could put code there"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {folder}, and could put code there: chmod go-w {folder}"
    return None


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
