"""Keeps the results of compilations, addressed by everything that they depend on.

A key is the digest of a task as the compilers get it: the files it may see, each program's options and the exact versions
of the programs and headers.  Where a key cannot say all of that, nothing is cached.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from hatch_cuda_aot.compile.tasks import FrontResult, FrontTask, ImageResult, ImageTask
from hatch_cuda_aot.toolchain import Toolchain

__all__ = ["Cache", "default_folder", "key_of", "open_cache"]

#: Part of every key: a change of what is stored, or of how a task is run, must not meet old entries.
SCHEMA = "1"

#: Bytes that the folder may hold before the least recently used entries go.
LIMIT = 2 * 1024**3


class Cache:
    """A folder of results; every entry holds the digest of its payload, and what fails it is no entry."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.hits = 0

    @property
    def folder(self) -> Path:
        """Where this user's entries are."""
        return Path(self._folder)

    def get(self, key: str) -> FrontResult | ImageResult | None:
        """Return the result stored under `key`, or None."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, payload = content[:32], content[32:]
        if hashlib.sha256(payload).digest() != digest:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # eviction goes by last use
        self.hits += 1
        return pickle.loads(payload)  # type: ignore[no-any-return]  # noqa: S301 -- written by this user, for this user

    def put(self, key: str, result: FrontResult | ImageResult) -> None:
        """Store a result; a folder that cannot be written to only costs the next build time."""
        payload = pickle.dumps(result)
        path = self._path(key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(hashlib.sha256(payload).digest() + payload)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise

    def trim(self, limit: int = LIMIT) -> None:
        """Remove the least recently used entries beyond `limit` bytes."""
        with contextlib.suppress(OSError):
            entries = [(stat.st_mtime, stat.st_size, path) for path, stat in _entries(self._folder)]
            total = sum(size for _, size, _ in entries)
            for _, size, path in sorted(entries):
                if total <= limit:
                    return
                path.unlink(missing_ok=True)
                total -= size

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key


def key_of(task: FrontTask | ImageTask, toolchain: Toolchain) -> str:
    """Return the digest of everything that the task's result depends on."""
    fields: list[tuple[str, object]] = [
        ("schema", SCHEMA),
        ("program", _program_digest()),
        ("kind", type(task).__name__),
        ("line", toolchain.line),
        ("arch", str(task.arch)),
        ("ptxas-version", toolchain.ptxas),
    ]
    if isinstance(task, FrontTask):
        fields += [
            ("nvrtc-version", toolchain.nvrtc),
            ("cccl-version", toolchain.cccl),
            ("tree", task.tree.digest),
            ("sources", task.sources),
            ("expressions", task.expressions),
            ("nvrtc", task.nvrtc),
            ("nvjitlink", task.nvjitlink),
            ("prune", task.prune),
        ]
    else:
        fields += [("ptx", hashlib.sha256(task.ptx).hexdigest()), ("ptxas", task.ptxas)]
    return hashlib.sha256(repr(fields).encode()).hexdigest()


@functools.cache
def _program_digest() -> str:
    """Return the digest of our own code that stands between a task and its result."""
    from hatch_cuda_aot import compile as package

    state = hashlib.sha256()
    for path in sorted(Path(package.__file__ or "").parent.glob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()


def open_cache(environ: Mapping[str, str] | None = None) -> Cache | None:
    """Return the user's cache; None where ``HATCH_CUDA_AOT_CACHE=0`` turns it off."""
    environ = os.environ if environ is None else environ
    if environ.get("HATCH_CUDA_AOT_CACHE", "").strip().lower() in ("0", "false", "no", "off"):
        return None
    return Cache(default_folder(environ))


def default_folder(environ: Mapping[str, str]) -> Path:
    """Return where results are kept: ``HATCH_CUDA_AOT_CACHE_DIR``, or the platform's place for caches."""
    if chosen := environ.get("HATCH_CUDA_AOT_CACHE_DIR", "").strip():
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("hatch-cuda-aot", appauthor=False)) / "build"


def _entries(folder: Path) -> Iterable[tuple[Path, os.stat_result]]:
    for path in folder.glob("??/*"):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()
