"""Sentences about a build, for the hook and the command line alike.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hatch_cuda_aot.build import BuildResult

__all__ = ["count_warnings", "format_seconds", "format_size", "summarise"]


def count_warnings(log: str) -> int:
    """Return how many warnings a compiler's log holds."""
    return len(re.findall(r"\bwarning\b(?: #[\d\-D]+)?\s*:", log))


def summarise(result: BuildResult, files: Mapping[str, bytes], warnings: int, seconds: float) -> str:
    """Return the one line that tells what a build made, and at what cost."""
    kernels = sum(len(module.kernels) for module in result.modules)
    images = [image for module in result.modules for image in module.images]
    cubins, texts = (sum(len(image.data) for image in images if image.kind == kind) for kind in ("cubin", "ptx"))
    total = sum(len(content) for content in files.values())
    unknown = ", ".join(result.toolchain.unknown)
    kept = (
        f"nothing kept in the cache, as the exact version of {unknown} is not known"
        if unknown
        else (f"{result.hits} of {result.tasks} results from the cache")
    )
    parts = [
        f"built {_count(kernels, 'kernel')} in {_count(len(images), 'image')}",
        f"cubins {format_size(cubins)}, PTX {format_size(texts)}, in all {format_size(total)}",
        kept,
        *([f"{_count(warnings, 'compiler warning')} (shown with -v)"] if warnings else []),
        format_seconds(seconds),
    ]
    return "; ".join(parts)


def format_seconds(seconds: float) -> str:
    """Return a time for people: ``4.2 s``, ``37 s``, ``2:05 min``, ``1:02 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"


def format_size(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{max(size, 0) / 1e3:.0f} kB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
