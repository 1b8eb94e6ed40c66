"""Registers the build hook with hatchling; every project's build imports this, so it must not fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hatchling.plugin import hookimpl

if TYPE_CHECKING:
    from hatch_cuda_aot.plugin import CudaAotBuildHook


@hookimpl
def hatch_register_build_hook() -> type[CudaAotBuildHook]:
    """Return the hook's class."""
    from hatch_cuda_aot.plugin import CudaAotBuildHook

    return CudaAotBuildHook
