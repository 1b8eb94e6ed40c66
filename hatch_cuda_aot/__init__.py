"""Ahead-of-time CUDA kernels for Python wheels.

Importing this imports nothing else: hatchling's plugins share one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hatch_cuda_aot._version import __version__

if TYPE_CHECKING:
    from hatch_cuda_aot.api import CompiledSource, compile_source

__all__ = ["CompiledSource", "__version__", "compile_source"]


def __getattr__(name: str) -> Any:
    if name in ("CompiledSource", "compile_source"):
        from hatch_cuda_aot import api

        return getattr(api, name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
