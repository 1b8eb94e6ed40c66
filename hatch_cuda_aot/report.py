"""Sentences about a build, for the hook and the command line alike.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hatch_cuda_aot.build import BuildResult

__all__ = ["count_warnings", "format_size", "summarise"]


def count_warnings(log: str) -> int:
    """Return how many warnings a compiler's log holds."""
    return len(re.findall(r"\bwarning\b(?: #[\d\-D]+)?\s*:", log))


def summarise(result: BuildResult, files: Mapping[str, bytes], warnings: int) -> str:
    """Return the one line that tells what a build made."""
    kernels = sum(len(module.kernels) for module in result.modules)
    images = [image for module in result.modules for image in module.images]
    size = sum(len(content) for content in files.values())
    parts = [f"built {_count(kernels, 'kernel')} in {_count(len(images), 'image')}, {format_size(size)}"]
    if result.hits:
        parts.append(f"{result.hits} of {result.tasks} results from the cache")
    if result.toolchain.unknown:
        parts.append(
            f"nothing kept in the cache, as the exact version of {', '.join(result.toolchain.unknown)} is not known"
        )
    if warnings:
        parts.append(f"{_count(warnings, 'compiler warning')} (shown with -v)")
    return "; ".join(parts)


def format_size(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{max(size, 0) / 1e3:.0f} kB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
