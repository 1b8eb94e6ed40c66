"""Finds a module's files: globs, and the closure of project headers that its sources can include.

A module is compiled in a copy of exactly the files found here.  A header that this scan misses is therefore a compile
error, never a stale result of an earlier build.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from hatch_cuda_aot.errors import Problem, SourceError

__all__ = ["SourceTree", "expand", "is_outside", "read_tree", "relative"]


@dataclass(frozen=True)
class SourceTree:
    """The project files that a module's sources can see.

    Attributes:
        files: (path relative to the project, with forward slashes; content), sorted.
        unresolved: names in ``#include`` that are no file of the project: the toolkit's headers, as a rule.

    """

    files: tuple[tuple[str, bytes], ...]
    unresolved: frozenset[str] = frozenset()

    @cached_property
    def digest(self) -> str:
        """SHA-256 over paths and contents."""
        state = hashlib.sha256()
        for path, content in self.files:
            state.update(f"{len(path.encode())}:{path}:{len(content)}:".encode())
            state.update(content)
        return state.hexdigest()

    def text(self, path: str) -> str:
        """Return a file of the tree as text."""
        return dict(self.files)[path].decode("utf-8", errors="replace")

    def texts(self) -> list[str]:
        """Return every file of the tree as text."""
        return [content.decode("utf-8", errors="replace") for _, content in self.files]

    @classmethod
    def of_texts(cls, texts: Mapping[str, str]) -> SourceTree:
        """Return the tree of files given as text by path."""
        files = tuple(sorted((path, text.encode()) for path, text in texts.items()))
        names = {PurePosixPath(path).name for path in texts}
        included = {name for _, content in files for name in _includes(content)}
        return cls(files, frozenset(name for name in included if PurePosixPath(name).name not in names))


def expand(root: Path, patterns: Sequence[str], place: str) -> tuple[list[str], list[Problem]]:
    """Return the files below `root` that glob patterns match, as sorted relative paths, and what is wrong with any.

    ``**`` matches any number of folders.  Every pattern must match a file, and none may leave the project: the sdist
    could not carry what lies outside.
    """
    found: set[str] = set()
    problems: list[Problem] = []
    for number, pattern in enumerate(patterns, 1):
        where = place if len(patterns) == 1 else f"{place} #{number}"
        if is_outside(root, pattern):
            problems.append(
                Problem(where, f"{pattern!r} lies outside the project {root}: sdists cannot carry it. {_MOVE}")
            )
            continue
        matches = [path for path in glob.glob(pattern, root_dir=root, recursive=True) if (root / path).is_file()]
        if not matches:
            problems.append(Problem(where, f"{pattern!r} matches no file in {root}. {_suggest(root)}"))
        found.update(relative(root, path) for path in matches)
    return sorted(found), problems


def is_outside(root: Path, path: str) -> bool:
    """Tell whether a path or pattern given relative to `root` leaves it."""
    normal = os.path.normpath(root / path)
    return not (normal == str(root) or normal.startswith(os.path.join(root, "")))


def relative(root: Path, path: str) -> str:
    """Return the path of a file in the project relative to `root`, with forward slashes, however it was given."""
    return os.path.relpath(root / path, root).replace(os.sep, "/")


def read_tree(root: Path, sources: Iterable[str], include_dirs: Sequence[str]) -> SourceTree:
    """Read `sources` and every project header that they can include, directly or not.

    Which of several headers of one name the compiler takes is left to the compiler: all of them are in the tree, where it
    searches in the same order.

    Raises:
        SourceError: if a header lies outside the project.

    """
    contents: dict[str, bytes] = {}
    unresolved: set[str] = set()
    sources = tuple(sources)
    beside_sources = sorted({str(PurePosixPath(source).parent) for source in sources})
    waiting = list(sources)
    while waiting:
        path = waiting.pop()
        if path in contents:
            continue
        try:
            contents[path] = (root / path).read_bytes()
        except OSError as error:
            message = f"cannot read {path}: {error.strerror}"
            raise SourceError(message) from error
        for name in _includes(contents[path]):
            folders = dict.fromkeys([str(PurePosixPath(path).parent), *beside_sources, *include_dirs])
            found = [header for folder in folders if (root / (header := os.path.join(folder, name))).is_file()]
            if not found:
                unresolved.add(name)
            elif is_outside(root, found[0]):
                raise SourceError(_outside(root, name, found[0], path))
            waiting += [relative(root, header) for header in found if not is_outside(root, header)]
    return SourceTree(tuple(sorted(contents.items())), frozenset(unresolved))


_MOVE = "Move the file into the project, or build from the folder that holds both"
_INCLUDE = re.compile(
    rb"""(?:^[ \t]*\#[ \t]*(?:include|include_next)[ \t]*|__has_include[ \t]*\([ \t]*)[<"]([^>"\n]+)[>"]""",
    re.MULTILINE,
)


def _includes(content: bytes) -> list[str]:
    joined = content.replace(b"\\\r\n", b"").replace(b"\\\n", b"")
    return [match[1].decode("utf-8", errors="replace").strip() for match in _INCLUDE.finditer(joined)]


def _outside(root: Path, name: str, header: str, included_from: str) -> str:
    return (
        f"{included_from} includes {name!r}, which lies outside the project {root} (at {os.path.normpath(root / header)}): "
        f"sdists cannot carry it. {_MOVE}"
    )


def _suggest(root: Path) -> str:
    """Name the project's CUDA sources, which the pattern was most likely meant for."""
    present = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.cu")
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
    )
    if not present:
        return "There is no .cu file in the project"
    shown = ", ".join(present[:5]) + (f" and {len(present) - 5} more" if len(present) > 5 else "")
    return f"Sources in the project: {shown}"
