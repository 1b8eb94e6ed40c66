"""Precompiled headers: what many sources read first is read once for each architecture and worker.

A source's *start* is all that comes before its first own line of code.  A precompiled header serves sources of equal start
only, which `start_of` says for sure; NVRTC itself does not look whether a header is another one now.  It is used only after
it gave the same PTX and the same warnings as were had without it, for the source it was made from.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from hatch_cuda_aot.compile.nvrtc import NvrtcError, NvrtcResult
from hatch_cuda_aot.compile.tasks import FrontTask
from hatch_cuda_aot.spans import span

__all__ = ["PAYS", "PrecompiledHeaders", "start_of"]

#: So many sources of equal start it takes for one process: to make it takes as long as two to four, and to use it a third.
PAYS = 6


def start_of(task: FrontTask) -> str:
    """Return an identity of what a front end reads before the source's own code; empty if that cannot be shared.

    Not where there is nothing of the toolkit in it, nor conditional directives, nor where the folder of the compilation or
    the name of the source gets into the result.
    """
    if len(task.sources) != 1 or not task.tree.unresolved or _LOCATED.intersection(task.nvrtc):
        return ""
    (source,) = task.sources
    prologue = task.tree.prologue(source)
    headers = [(path, content) for path, content in task.tree.files if path != source]
    if "#include" not in prologue.replace(" ", "") or any(b"__BASE_FILE__" in content for _, content in headers):
        return ""
    options = (str(task.arch), task.nvrtc, task.tree.includes_curand, task.compiler, str(PurePosixPath(source).parent))
    state = hashlib.sha256(repr((options, prologue)).encode())
    for path, content in headers:
        state.update(f"{path}:{len(content)}:".encode())
        state.update(content)
    return state.hexdigest()


_LOCATED = frozenset({"--device-debug", "--generate-line-info"})


class PrecompiledHeaders:
    """The precompiled header of one process, in its folder for temporary files; there is one at a time.

    Args:
        compile_program: of `nvrtc`.

    """

    def __init__(self, compile_program: Callable[[str, str, Sequence[str], Sequence[str]], NvrtcResult]) -> None:
        self._compile = compile_program
        self._path = ""
        self._made: tuple[str, tuple[str, ...]] | None = None
        self._refused: set[tuple[str, tuple[str, ...]]] = set()
        self._number = 0

    def compile(
        self, start: str, text: str, name: str, options: tuple[str, ...], expressions: Sequence[str]
    ) -> NvrtcResult:
        """Compile a source of this `start`, and precompile that for those to come; the result is that of `nvrtc`.

        Raises:
            NvrtcError: if the source is wrong.

        """
        wanted = (start, options)
        if wanted != self._made and wanted not in self._refused:
            with span("precompile", source=name):
                made = self._make(wanted, text, name, expressions)
            if made is not None:
                return made
        if wanted == self._made:
            # An error is that of a compilation without it, word for word.
            with contextlib.suppress(NvrtcError):
                result = self._compile(text, name, (*options, f"--use-pch={self._path}", _QUIET), expressions)
                if "precompiled header" not in result.log:  # that NVRTC cannot use it
                    return result
        return self._compile(text, name, options, expressions)

    def _make(
        self, wanted: tuple[str, tuple[str, ...]], text: str, name: str, expressions: Sequence[str]
    ) -> NvrtcResult | None:
        """Precompile what `text` starts with; return its own result, or None if that was in vain."""
        self._made = None
        self._refused.add(wanted)
        self._remove()
        self._number += 1
        self._path = os.path.join(tempfile.gettempdir(), f"{os.getpid()}-{self._number}.pch")
        _, options = wanted
        try:
            result = self._compile(text, name, (*options, f"--create-pch={self._path}", _QUIET), expressions)
            with contextlib.suppress(NvrtcError):
                if self._compile(text, name, (*options, f"--use-pch={self._path}", _QUIET), expressions) == result:
                    self._made = wanted
                    self._refused.discard(wanted)
        except NvrtcError:  # of the source, or there is no space: a compilation without it will tell
            result = None
        if self._made is None:
            self._remove()
        return result

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)


_QUIET = "--pch-messages=false"
