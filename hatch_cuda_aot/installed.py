"""Remembers what a probe found out about the installed compiler, for builds that turn out to need nothing of it.

It holds for exactly the same files: the records of the compiler's wheels (which have the digest of each file), and size and
time of its libraries and programs.  A compiler that is not installed from wheels is never remembered, but asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hatch_cuda_aot.cache import program_digest
from hatch_cuda_aot.locations import known_compilers
from hatch_cuda_aot.toolchain import Line, Needs, Toolchain, requirements

__all__ = ["Identity", "identify", "recall", "remember"]

#: So many environments' compilers are remembered; those of isolated builds do not come again.
LIMIT = 20


@dataclass(frozen=True, slots=True)
class Identity:
    """The wheels that hold a compiler: a digest of what they are, where they are, and their libraries and programs."""

    digest: str
    folders: tuple[str, ...]
    programs: frozenset[str]


def identify(line: Line, needs: Needs) -> Identity | None:
    """Return the identity of the installed compiler of `line`; None if some part is not a wheel with its files in place."""
    state = hashlib.sha256(repr((program_digest(), sys.version, line.version, needs)).encode())
    folders: set[str] = set()
    programs: set[str] = set()
    for requirement in requirements(line, needs):
        try:
            distribution = importlib.metadata.distribution(requirement.partition("==")[0])
        except importlib.metadata.PackageNotFoundError:
            return None
        record = distribution.read_text("RECORD")
        if not record:
            return None
        folder = str(distribution.locate_file(""))
        state.update(repr((requirement, folder, len(record))).encode())
        state.update(record.encode(errors="surrogateescape"))
        folders.add(folder)
        for name in _programs(record):
            path = os.path.join(folder, name)
            try:
                stat = os.stat(path)
            except OSError:
                return None
            state.update(repr((path, stat.st_size, stat.st_mtime_ns)).encode())
            programs.add(os.path.realpath(path))
    return Identity(state.hexdigest(), tuple(sorted(folders)), frozenset(programs))


def _programs(record: str) -> list[str]:
    """Return the paths of libraries and programs in a RECORD."""
    words = [word for word in ("nvrtc", "nvJitLink", "ptxas") if word in record]  # there are none in CCCL's 3,000 lines
    paths = (
        line.partition(",")[0] for line in (record.splitlines() if words else ()) if any(word in line for word in words)
    )
    return [path for path in paths if path.endswith(("/ptxas", ".exe", ".dll", ".pyd")) or ".so" in path]


def recall(folder: Path, identity: Identity | None) -> Toolchain | None:
    """Return what is remembered of a compiler in the cache's `folder`, or None."""
    if identity is None:
        return None
    try:
        table: dict[str, Any] = json.loads(_file(folder, identity).read_text(encoding="utf-8"))
        digest = table.pop("digest")
        whole = digest == _digest(table) and table.keys() == {field.name for field in dataclasses.fields(Toolchain)}
        return Toolchain(**_tuples(table)) if whole else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # absent, damaged, or of another version
        return None


def remember(folder: Path, identity: Identity | None, toolchain: Toolchain) -> None:
    """Keep what a probe said, if every part of it is of the wheels that `identity` stands for."""
    if identity is None or os.path.realpath(toolchain.ptxas_path) not in identity.programs:
        return
    inside = tuple(os.path.join(os.path.realpath(each), "") for each in identity.folders)
    if not all(os.path.realpath(path).startswith(inside) for _, path in toolchain.include_dirs):
        return
    table: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(toolchain)))
    path = _file(folder, identity)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({**table, "digest": _digest(table)}, file)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        for old in sorted(path.parent.iterdir(), key=os.path.getmtime)[:-LIMIT]:
            old.unlink(missing_ok=True)


def _file(folder: Path, identity: Identity) -> Path:
    return known_compilers(folder) / identity.digest


def _digest(table: object) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def _tuples(value: Any) -> Any:
    """Give lists of JSON back as the tuples that they were."""
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return {key: _tuples(each) for key, each in value.items()} if isinstance(value, dict) else value
