"""Finds the kernel templates that CUDA C++ sources declare.  Pure.

It reads tokens, not the language: a template behind a macro is not found, and that only means that it cannot be
instantiated at run time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["kernel_templates"]


def kernel_templates(sources: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the ``__global__`` function templates in `sources`, with their namespaces, sorted."""
    return tuple(sorted({name for source in sources for name in _Reader(source).names()}))


class _Reader:
    """Goes through the tokens of one source once, and keeps the namespaces that are open."""

    def __init__(self, source: str) -> None:
        self._tokens: list[str] = _TOKEN.findall(_NO_CODE.sub(" ", source))
        self._at = 0
        #: For each open brace the namespaces that it opened, and whether each is inline; none for any other brace.
        self._open: list[list[tuple[str, bool]]] = []

    def names(self) -> Iterable[str]:
        while self._at < len(self._tokens):
            word = self._take()
            if word == "namespace":
                self._namespace(inline=self._tokens[max(0, self._at - 2)] == "inline")
            elif word == "{":
                self._open.append([])
            elif word == "}":
                self._open[-1:] = []
            elif word == "template" and self._peek() == "<":
                self._skip("<", ">")
                name = self._kernel()
                if name:
                    spaces = [space for spaces in self._open for space in spaces]
                    yield "::".join([*(space for space, _ in spaces), name])
                    yield "::".join([*(space for space, inline in spaces if not inline), name])

    def _namespace(self, *, inline: bool) -> None:
        spaces: list[tuple[str, bool]] = []
        while self._peek() not in ("{", ";", "=", ""):
            word = self._take()
            if word == "[":
                self._skip_rest("[", "]")
            elif word == "inline":
                inline = True
            elif word.isidentifier():
                spaces.append((word, inline))
                inline = False
        if self._peek() == "{":
            self._at += 1
            self._open.append(spaces)

    def _kernel(self) -> str | None:
        """Return the name of the kernel whose declaration follows; None where something else does."""
        is_kernel, name = False, None
        while self._peek() not in ("{", "}", ";", "template", "namespace", ""):
            word = self._take()
            is_kernel = is_kernel or word == "__global__"
            if self._peek() == "(":
                self._skip("(", ")")
                if name is None and word.isidentifier() and word not in _WITH_ARGUMENTS:
                    name = word
        return name if is_kernel else None

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _skip(self, start: str, end: str) -> None:
        """Go past what the next token opens."""
        self._at += 1
        self._skip_rest(start, end)

    def _skip_rest(self, start: str, end: str) -> None:
        depth = 1
        while depth and self._at < len(self._tokens):
            word = self._take()
            if word == "(" and start == "<":  # a comparison in parentheses closes nothing
                self._skip_rest("(", ")")
            depth += (word == start) - (word == end)


#: What is followed by parentheses in a declaration without being the function's name.
_WITH_ARGUMENTS = frozenset(
    {
        "__launch_bounds__",
        "__cluster_dims__",
        "__block_size__",
        "__maxnreg__",
        "__attribute__",
        "__declspec",
        "alignas",
        "decltype",
        "explicit",
        "noexcept",
        "requires",
    }
)

#: Comments, preprocessor lines with their continuations, and literals.
_NO_CODE = re.compile(
    r"""//(?:\\\n|[^\n])*|/\*.*?\*/|^[ \t]*\#(?:\\\n|[^\n])*|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'""",
    re.DOTALL | re.MULTILINE,
)
_TOKEN = re.compile(r"\w+|::|\S")
