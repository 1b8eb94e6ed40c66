"""Looks entries up in a large JSON index without parsing it.

Parsing an index of 10,000 kernels takes longer than loading one of them, and most processes use a few.  The build writes
canonical JSON, in which a key is found by its bytes; whatever is not written that way, or is small, is left to `json`.
This module knows how the index is laid out, and nothing of what it means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import ManifestError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Table", "scan"]

#: Below this many bytes parsing is as fast.
_LARGE = 50_000


def scan(content: bytes, path: str) -> dict[str, Any] | None:
    """Return the index `content` of the file `path` as if it were parsed; None where it must be."""
    if len(content) < _LARGE or not content.startswith(_START):
        return None
    end = content.rfind(_END)
    modules = content.rfind(_MODULES, 0, max(end, 0))
    kernels = content.find(_KERNELS)
    if not 0 < kernels < modules:
        return None
    # No string can hold one of the marks: a quote in it is written with a backslash.
    try:
        rest: dict[str, Any] = json.loads(b"{" + content[end + 2 :])
    except ValueError:
        return None
    rest["kernels"] = Table(content, kernels + len(_KERNELS) - 1, modules + 1, path)
    rest["modules"] = Table(content, modules + len(_MODULES) - 1, end + 1, path)
    return rest


class Table(Mapping[str, Any]):
    """One JSON object, whose values are looked up in its text, and which is parsed when all of it is asked for."""

    def __init__(self, content: bytes, start: int, end: int, path: str) -> None:
        """Take the object that is ``content[start:end]``, from the file `path`."""
        self._path = path
        self._content = content
        self._start = start
        self._end = end
        self._all: dict[str, Any] | None = None

    def __getitem__(self, key: str) -> Any:
        if self._all is not None:
            return self._all[key]
        text = json.dumps(key, ensure_ascii=False).encode("utf-8", "surrogatepass") + b":"
        at = self._content.find(text, self._start, self._end)
        while at >= 0:
            if self._content[at - 1] in b"{,":  # else it is the end of a longer key, with a quote in it
                value = re.compile(_VALUE).match(self._content, at + len(text), self._end)
                if value is None:
                    break
                return json.loads(value[0])
            at = self._content.find(text, at + 1, self._end)
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parsed())

    def __len__(self) -> int:
        return len(self._parsed())

    def _parsed(self) -> dict[str, Any]:
        if self._all is None:
            try:
                self._all = json.loads(self._content[self._start : self._end])
            except ValueError as error:
                message = f"{self._path} is damaged: {error}; reinstall the package"
                raise ManifestError(message, self._path) from error
        return self._all


_START = b'{"format":1,"generator":{'
_KERNELS = b'"kernels":{'
_MODULES = b'},"modules":{'
_END = b'},"package":"'

#: A string, a list of strings, or an object of strings and numbers; none of the strings holds what would end it early.
_VALUE = rb'"[^"\\]*"|\[[^\]\\]*\]|\{[^{}\\]*\}'
