"""The errors that the kernels of a package raise.

Each derives from one builtin and carries a stable `code`: two packages that were built this way hold two copies of
these classes, so a program that handles both compares `error.code` or catches the builtin.  What a message says in
words stands on the attributes as data.  This module imports nothing and formats nothing but its own messages.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .report import Report

__all__ = [
    "CorruptImageError",
    "CudaAotError",
    "CudaUnavailableError",
    "KernelNotFoundError",
    "ManifestError",
    "NoCompatibleImageError",
    "VariableNotFoundError",
]


class CudaAotError(Exception):
    """Base of every error that this package's kernels raise.

    Attributes:
        code: stable name of the kind of error, the same in every package and release.

    """

    code = "error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        # KeyError would print the repr of its argument.
        return self.message


class _NameError(CudaAotError, KeyError):
    """Nothing, or more than one thing, has the name that was asked for.

    Attributes:
        name: the name as it was asked for.
        candidates: names to use instead: close matches, or the ``module:name`` forms of an ambiguous name.
        ambiguous: whether the name fits several things.

    """

    def __init__(
        self, message: str, name: str = "", candidates: Sequence[str] = (), *, ambiguous: bool = False
    ) -> None:
        super().__init__(message)
        self.name = name
        self.candidates = tuple(candidates)
        self.ambiguous = ambiguous


class KernelNotFoundError(_NameError):
    """No kernel, or more than one, has the name that was asked for; `_NameError` has the attributes."""

    code = "kernel-not-found"


class VariableNotFoundError(_NameError):
    """No variable, or more than one, has the name that was asked for; `_NameError` has the attributes."""

    code = "variable-not-found"


class NoCompatibleImageError(CudaAotError, RuntimeError):
    """The kernel exists, and none of its images runs on the device with its driver.

    Attributes:
        name: the kernel.
        report: every image with its verdict and the reason, as `explain()` returns it.
        advice: what to change, one sentence each.

    """

    code = "no-compatible-image"

    def __init__(self, message: str, name: str = "", report: Report | None = None, advice: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.report = report
        self.advice = tuple(advice)


class CorruptImageError(CudaAotError, RuntimeError):
    """The file of an image is missing, or is not the one that was built.

    Attributes:
        path: the file.
        expected: what the manifest says of it.
        actual: what was found.

    """

    code = "corrupt-image"

    def __init__(self, message: str, path: str = "", expected: str = "", actual: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.expected = expected
        self.actual = actual


class ManifestError(CudaAotError, RuntimeError):
    """The manifest is missing, damaged, of another format, or says what is not so.

    Attributes:
        path: the file.

    """

    code = "manifest"

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class CudaUnavailableError(CudaAotError, RuntimeError):
    """CUDA cannot be used here: a Python package, the driver or the device is missing, or the process was forked.

    Attributes:
        reason: ``"bindings-missing"``, ``"core-missing"``, ``"driver-missing"``, ``"driver-too-old"``, ``"no-device"``,
            ``"device-out-of-range"``, ``"forked"`` or ``"driver-error"``.
        status: the CUresult behind it, or None where no driver call failed.

    """

    code = "cuda-unavailable"

    def __init__(self, message: str, reason: str = "driver-error", status: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status
