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

__all__ = ["HEADERS", "SOURCES", "SourceTree", "expand", "is_outside", "read_tree", "relative"]

#: What files are called that a message may propose, as glob patterns.
SOURCES = ("*.cu",)
HEADERS = ("*.cuh", "*.h", "*.hpp", "*.hxx", "*.inc", "*.inl")


@dataclass(frozen=True)
class SourceTree:
    """The project files that a module's sources can see.

    Attributes:
        files: (path relative to the project, with forward slashes; content), sorted.
        unresolved: names in ``#include`` that are no file of the project: the toolkit's headers, as a rule.
        closed: no ``#include`` names a place outside the project, where there is nothing now but may be later.

    """

    files: tuple[tuple[str, bytes], ...]
    unresolved: frozenset[str] = frozenset()
    closed: bool = True

    @cached_property
    def digest(self) -> str:
        """SHA-256 over paths and contents."""
        state = hashlib.sha256()
        for path, content in self.files:
            state.update(f"{len(path.encode())}:{path}:{len(content)}:".encode())
            state.update(content)
        return state.hexdigest()

    @property
    def includes_curand(self) -> bool:
        """Some file includes cuRAND's device headers."""
        return any(name.startswith("curand") for name in self.unresolved)

    def is_closed(self, defines: Mapping[str, str]) -> bool:
        """Tell whether no ``#include`` can lead to a file that is neither in the tree nor the toolkit's.

        Of what a compilation reads elsewhere the digest knows nothing.  Names that are written out were followed.  A
        macro may stand for a name only where all its definitions, in `defines` and in the tree, are relative paths; one
        that has none is an error if it is reached, or the toolkit's.
        """
        values = {token: [defines[token]] if token in defines else [] for token in self._computed}
        for _, content in self.files if values else ():
            for token, value in _definitions(content):
                values.get(token, []).append(value)
        return self.closed and all(_MACRO.fullmatch(token) and all(map(_is_inside, values[token])) for token in values)

    @cached_property
    def _computed(self) -> frozenset[str]:
        """What stands in the place of names in ``#include`` lines."""
        return frozenset(token for _, content in self.files for token in _computed(content))

    def text(self, path: str) -> str:
        """Return a file of the tree as text."""
        return dict(self.files)[path].decode("utf-8", errors="replace")

    def texts(self) -> list[str]:
        """Return every file of the tree as text."""
        return [content.decode("utf-8", errors="replace") for _, content in self.files]

    def prologue(self, path: str) -> str:
        """Return the directives of a file before its first other line; empty if some of them are conditional."""
        found = []
        for line in _code(dict(self.files)[path]).splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                break
            found.append(line.strip())
        directives = "\n".join(filter(None, found))
        return "" if re.search(r"^#\s*(if|el|endif)", directives, re.MULTILINE) else directives

    @classmethod
    def of_texts(cls, texts: Mapping[str, str]) -> SourceTree:
        """Return the tree of files given as text by path."""
        files = tuple(sorted((path, text.encode()) for path, text in texts.items()))
        names = {PurePosixPath(path).name for path in texts}
        unresolved = {
            (path, name)
            for path, content in files
            for name in _includes(content)
            if PurePosixPath(name).name not in names
        }
        climbing = any(
            is_outside(Path("/tree"), os.path.join(os.path.dirname(path), name)) for path, name in unresolved
        )
        return cls(files, frozenset(name for _, name in unresolved), closed=not climbing)


def expand(
    root: Path, patterns: Sequence[str], place: str, usual: Sequence[str] = SOURCES
) -> tuple[list[str], list[Problem]]:
    """Return the files below `root` that glob patterns match, as sorted relative paths, and what is wrong with any.

    ``**`` matches any number of folders.  Every pattern must match a file, and none may leave the project: the sdist
    could not carry what lies outside.  Where one matches nothing, files that are called as `usual` are proposed.
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
            problems.append(Problem(where, f"{pattern!r} matches no file in {root}. {_suggest(root, usual)}"))
        found.update(relative(root, path) for path in matches)
    return sorted(found), problems


def is_outside(root: Path, path: str) -> bool:
    """Tell whether a path or pattern given relative to `root` leaves it."""
    normal = os.path.normpath(root / path)
    return not (normal == str(root) or normal.startswith(os.path.join(root, "")))


def relative(root: Path, path: str) -> str:
    """Return the path of a file in the project relative to `root`, with forward slashes, however it was given."""
    return os.path.relpath(root / path, root).replace(os.sep, "/")


def read_tree(
    root: Path, sources: Iterable[str], include_dirs: Sequence[str], headers: Iterable[str] = ()
) -> SourceTree:
    """Read `sources`, `headers` and every project header that they can include, directly or not.

    Which of several headers of one name the compiler takes is left to the compiler: all of them are in the tree, where it
    searches in the same order.

    Raises:
        SourceError: if a header lies outside the project.

    """
    contents: dict[str, bytes] = {}
    unresolved: set[str] = set()
    climbing = False
    sources = tuple(sources)
    beside_sources = sorted({str(PurePosixPath(source).parent) for source in sources})
    waiting = [*sources, *headers]
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
                climbing |= any(is_outside(root, os.path.join(folder, name)) for folder in folders)
            elif is_outside(root, found[0]):
                raise SourceError(_outside(root, name, found[0], path))
            waiting += [relative(root, header) for header in found if not is_outside(root, header)]
    return SourceTree(tuple(sorted(contents.items())), frozenset(unresolved), closed=not climbing)


_MOVE = "Move the file into the project, or build from the folder that holds both"
_INCLUDE = re.compile(
    rb"""(?:^[ \t]*\#[ \t]*(?:include|include_next)[ \t]*|__has_include[ \t]*\([ \t]*)[<"]([^>"\n]+)[>"]""",
    re.MULTILINE,
)


def _includes(content: bytes) -> list[str]:
    return [match[1].decode("utf-8", errors="replace").strip() for match in _INCLUDE.finditer(_joined(content))]


def _joined(content: bytes) -> bytes:
    """Return a file's content with each directive on one line."""
    return content.replace(b"\\\r\n", b"").replace(b"\\\n", b"")


#: Everything that reads a file or asks for one, however its name is given.
_DIRECTIVE = re.compile(
    r"""(?:^[^\S\n]*(?:\#|%:|\?\?=)\s*(?:include|include_next|import|embed)(?!\w)|\b__has_(?:include|include_next|embed)\s*\()
    [ \t]*([^\n]*)""",
    re.VERBOSE | re.MULTILINE,
)
_WRITTEN_OUT = re.compile(r"""<[^>\n]+>|"[^"\n]+\"""")
_MACRO = re.compile(r"[A-Za-z_]\w*")
_DEFINITION = re.compile(r"(?:\#|%:|\?\?=)[^\S\n]*define[^\S\n]+([A-Za-z_]\w*)(?!\w|\()[^\S\n]*([^\n]*)")

#: A comment, or what only looks like one.
_COMMENT = re.compile(
    r"""(?P<kept>(?:\#|%:|\?\?=)[ \t]*include(?:_next)?[ \t]*<[^>\n]+> | R"([^\s()\\]{0,16})\(.*?\)\2"
    | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*')
    | //[^\n]* | /\*.*?\*/""",
    re.VERBOSE | re.DOTALL,
)


def _code(content: bytes) -> str:
    """Return the text of a file without comments, and with each directive on one line."""
    text = _joined(content).decode("utf-8", errors="replace").replace("\r\n", "\n")
    return _COMMENT.sub(lambda match: match["kept"] or " ", text)


def _computed(content: bytes) -> Iterable[str]:
    """Return what stands in the place of names in a file's ``#include`` lines; empty where all are written out."""
    followed, joined = _includes(content), _joined(content)
    if joined.count(b"include") + joined.count(b"import") + joined.count(b"embed") == len(followed):
        return  # the quick way, for nearly all files
    for match in _DIRECTIVE.finditer(_code(content)):
        written = _WRITTEN_OUT.match(match[1])
        if written is None:
            token = match[1].strip()
            yield token.partition(")")[0].strip() if match[0].startswith("__has") else token
        elif written[0][1:-1].strip() not in followed:
            yield written[0]


def _definitions(content: bytes) -> Iterable[tuple[str, str]]:
    """Return the macros without arguments that a file defines, each with its value."""
    return ((match[1], match[2].strip()) for match in _DEFINITION.finditer(_code(content)))


def _is_inside(value: str) -> bool:
    """Tell whether the value of a macro is a name that can be no place outside the staged files."""
    name = value[1:-1].strip()
    return (
        _WRITTEN_OUT.fullmatch(value) is not None
        and not os.path.isabs(name)
        and not re.match(r"[A-Za-z]:|[\\/]", name)
        and ".." not in re.split(r"[\\/]", name)
    )


def _outside(root: Path, name: str, header: str, included_from: str) -> str:
    return (
        f"{included_from} includes {name!r}, which lies outside the project {root} (at {os.path.normpath(root / header)}): "
        f"sdists cannot carry it. {_MOVE}"
    )


def _suggest(root: Path, usual: Sequence[str]) -> str:
    """Name the project's files of the kind that the pattern was most likely meant for."""
    present = sorted(
        path.relative_to(root).as_posix()
        for pattern in usual
        for path in root.rglob(pattern)
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
    )
    if not present:
        return f"There is no {'.cu file' if usual is SOURCES else 'header'} in the project"
    shown = ", ".join(present[:5]) + (f" and {len(present) - 5} more" if len(present) > 5 else "")
    return f"{'Sources' if usual is SOURCES else 'Headers'} in the project: {shown}"
