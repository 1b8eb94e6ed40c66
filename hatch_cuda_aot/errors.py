"""The build side's exceptions: one line or block for people in ``str()``, the data on attributes for programs.

Everything that a user can cause derives from `BuildError`; the plugin and the command line print it and stop.  Any other
exception is a defect of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = [
    "BuildError",
    "ClusterError",
    "CompileError",
    "ConfigError",
    "NoCompilerError",
    "Problem",
    "ResultError",
    "SourceError",
    "UnsupportedArchError",
    "WorkerCrashError",
]


class BuildError(Exception):
    """A build cannot go on, and its user can do something about it."""

    def __reduce__(self) -> tuple[object, ...]:
        return _revive, (type(self), self.args, self.__dict__)


class Problem(NamedTuple):
    """One thing wrong with the configuration: the place in the user's files, and what is wrong there."""

    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class ConfigError(BuildError):
    """The configuration is wrong; `problems` holds everything found in it, not the first thing only."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class SourceError(BuildError):
    """A source, header or package folder is not where the configuration says."""


class UnsupportedArchError(BuildError):
    """The chosen compiler does not know an architecture."""

    def __init__(self, message: str, *, archs: Sequence[str], line: str) -> None:
        self.archs = tuple(archs)
        self.line = line
        super().__init__(message)


class NoCompilerError(BuildError):
    """The compiler, or a part of it, is not installed or does not fit; `requirements` would mend that."""

    def __init__(self, message: str, *, requirements: Sequence[str] = ()) -> None:
        self.requirements = tuple(requirements)
        super().__init__(message)


class ClusterError(BuildError):
    """The Dask cluster cannot do the build; `scheduler` is its address, `workers` are those that are to blame, if any."""

    def __init__(self, message: str, *, scheduler: str = "", workers: Sequence[str] = ()) -> None:
        self.scheduler = scheduler
        self.workers = tuple(workers)
        super().__init__(message)


class CompileError(BuildError):
    """A compiler refused the source.

    Attributes:
        module: the module that was compiled.
        arch: the architecture it was compiled for.
        stage: the program that refused, such as ``"NVRTC"``.
        log: the compiler's words as they are.

    """

    def __init__(self, message: str, *, module: str, arch: str, stage: str, log: str) -> None:
        self.module = module
        self.arch = arch
        self.stage = stage
        self.log = log
        super().__init__(message)


class ResultError(CompileError):
    """A compiler was content, yet its result is not what was asked for."""


class WorkerCrashError(CompileError):
    """The compiler itself crashed and took its worker process with it."""


def _revive(kind: type[BuildError], args: tuple[object, ...], data: dict[str, object]) -> BuildError:
    """Rebuild an error that came from a worker process."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(data)
    return error
