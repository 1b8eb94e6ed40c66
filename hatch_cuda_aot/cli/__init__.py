"""The command ``hatch-cuda-aot``: what the hook does, by hand, and questions about it."""

from __future__ import annotations

from hatch_cuda_aot.cli.main import main

__all__ = ["main"]
