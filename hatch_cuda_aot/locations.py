"""Where this user's results are kept, if they are at all; imports little, as a build asks this first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["default_folder", "has_compilers", "is_off", "known_compilers"]


def is_off(environ: Mapping[str, str]) -> bool:
    """Tell whether ``HATCH_CUDA_AOT_CACHE`` turns the cache off, shared or not."""
    return environ.get("HATCH_CUDA_AOT_CACHE", "").strip().lower() in ("0", "false", "no", "off")


def default_folder(environ: Mapping[str, str]) -> Path:
    """Return where results are kept: ``HATCH_CUDA_AOT_CACHE_DIR``, or the platform's place for caches."""
    if chosen := environ.get("HATCH_CUDA_AOT_CACHE_DIR", "").strip():
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("hatch-cuda-aot", appauthor=False)) / "build"


def known_compilers(folder: Path) -> Path:
    """Return where in the cache's `folder` it is remembered what compilers are."""
    return folder / "compilers"


def has_compilers(environ: Mapping[str, str]) -> bool:
    """Tell whether any compiler is remembered; without that a build must start one, whatever it finds in the cache."""
    return not is_off(environ) and known_compilers(default_folder(environ)).is_dir()
