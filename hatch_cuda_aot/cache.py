"""Keeps the results of compilations, addressed by everything that they depend on.

A key is the digest of a task as the compilers get it: the files it may see, each program's options and the exact versions
of the programs and headers.  Where a key cannot say all of that, nothing is cached.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from hatch_cuda_aot.codec import decode, encode
from hatch_cuda_aot.compile.tasks import AssembleTask, FrontResult, FrontTask, ImageResult, ImageTask
from hatch_cuda_aot.locations import default_folder, is_off
from hatch_cuda_aot.scratch import is_abandoned, try_lock
from hatch_cuda_aot.shared import SharedLevel
from hatch_cuda_aot.spans import span
from hatch_cuda_aot.toolchain import Toolchain

__all__ = ["Cache", "is_cacheable", "key_of", "open_cache", "program_digest"]

#: Part of every key: a change of what is stored, or of how a task is run, must not meet old entries.
SCHEMA = "2"

#: Bytes that the folder may hold before the least recently used entries go.
LIMIT = 2 * 1024**3


class Cache:
    """Results in a folder, and below it those that others share, if there is such a level.

    Use it as a context manager: leaving it waits for what is still to be shared, but for no interrupted build, and keeps the
    folder within its limit.
    """

    def __init__(self, folder: Path, shared: SharedLevel | None = None) -> None:
        self._folder = str(folder)
        self._shared = shared
        self._grew = False
        self.hits = 0

    @property
    def folder(self) -> Path:
        """Where this user's entries are."""
        return Path(self._folder)

    def get(self, key: str) -> FrontResult | ImageResult | None:
        """Return the result that the folder has under `key`, or None."""
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                entry = file.read()
        except OSError:
            return None
        result = decode(key, entry)
        with contextlib.suppress(OSError):
            if result is None:
                os.unlink(path)
            else:
                os.utime(path)  # eviction goes by last use
                self.hits += 1
        return result

    def fetch(self, key: str) -> Future[FrontResult | ImageResult | None] | None:
        """Look into the shared level in the background; None if there is none to look into.

        What it has under `key` is put into the folder as well.
        """
        if self._shared is None:
            return None
        return self._shared.read(_name(key), lambda entry: self._take(key, entry))

    def put(self, key: str, result: FrontResult | ImageResult) -> None:
        """Store a result on both levels; what cannot be written only costs the next build time."""
        entry = encode(key, result)
        self._write(key, entry)
        if self._shared is not None:
            self._shared.write(_name(key), entry)

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shared is not None:
            with span("cache share"):
                self._shared.close(wait=kind is None or issubclass(kind, Exception))
        if self._grew:
            with span("cache trim"):
                self.trim()

    def _take(self, key: str, entry: bytes) -> FrontResult | ImageResult | None:
        result = decode(key, entry)
        if result is not None:
            self._write(key, entry)
        return result

    def _write(self, key: str, entry: bytes) -> None:
        self._grew = True
        path = self._path(key)
        folder = os.path.dirname(path)
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True, mode=0o700)
            descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=_UNFINISHED)
            try_lock(descriptor)  # while this process lives; see `trim`
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(entry)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise

    def trim(self, limit: int = LIMIT) -> None:
        """Remove the least recently used entries beyond `limit` bytes, and what killed builds did not finish writing."""
        with contextlib.suppress(OSError):
            folder = Path(self._folder)
            for path in filter(is_abandoned, folder.glob(f"??/{_UNFINISHED}*")):
                path.unlink(missing_ok=True)
            entries = [(stat.st_mtime, stat.st_size, path) for path, stat in _entries(folder)]
            total = sum(size for _, size, _ in entries)
            for _, size, path in sorted(entries):
                if total <= limit:
                    return
                path.unlink(missing_ok=True)
                total -= size

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, _name(key))


#: Begins the names of files that are being written; no key does, as keys are hexadecimal.
_UNFINISHED = "tmp"


def key_of(task: FrontTask | ImageTask, toolchain: Toolchain) -> str:
    """Return the digest of everything that the task's result depends on."""
    fields: list[tuple[str, object]] = [
        ("schema", SCHEMA),
        ("program", program_digest()),
        (
            "platform",
            (sys.platform, platform.machine()),
        ),  # a `long` of the source is that of the compiler's own platform
        ("kind", type(task).__name__),
        ("line", toolchain.line),
        ("arch", str(task.arch)),
        ("ptxas-version", toolchain.ptxas),
    ]
    if not isinstance(task, AssembleTask):
        fields.append(("bindings-version", toolchain.bindings))
    if isinstance(task, FrontTask):
        fields += [
            ("nvrtc-version", toolchain.nvrtc),
            ("nvjitlink-version", toolchain.nvjitlink if len(task.sources) > 1 else ""),
            ("cccl-version", toolchain.cccl),
            ("headers", task.visible(toolchain.headers)),
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


def is_cacheable(task: FrontTask | ImageTask, toolchain: Toolchain) -> bool:
    """Tell whether a key can say all that the task's result depends on."""
    if toolchain.unknown:
        return False
    return not isinstance(task, FrontTask) or (bool(toolchain.headers) and task.tree.is_closed(task.defines))


@functools.cache
def program_digest() -> str:
    """Return the digest of our own code that stands between a task and its result."""
    package = Path(__file__).parent
    used = [package / "sources.py", package / "toolchain.py", package / "runtime" / "arch.py"]
    state = hashlib.sha256()
    for path in [*sorted(package.glob("compile/*.py")), *used]:
        state.update(path.read_bytes())
    return state.hexdigest()


def open_cache(
    environ: Mapping[str, str] | None = None, url: str | None = None, warn: Callable[[str], None] | None = None
) -> Cache | None:
    """Return the user's cache; None where ``HATCH_CUDA_AOT_CACHE=0`` turns it off.

    Args:
        environ: default the process's environment.
        url: where results are shared with others.
        warn: hears of trouble with them, from any thread.

    """
    environ = os.environ if environ is None else environ
    if is_off(environ):
        return None
    return Cache(default_folder(environ), None if url is None else SharedLevel(url, warn or (lambda _: None)))


def _name(key: str) -> str:
    """Return an entry's name, the same on both levels: any such folder can be served to others."""
    return f"{key[:2]}/{key}"


def _entries(folder: Path) -> Iterable[tuple[Path, os.stat_result]]:
    for path in folder.glob("??/*"):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()
