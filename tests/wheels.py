"""Builds wheels with pip as an author would, with the hatch-cuda-aot of this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make_wheelhouse(folder: Path) -> Path:
    """Put the wheel of this hatch-cuda-aot into `folder`, where frontends find it in place of the package index."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    return folder


def frontend_environ(wheelhouse: Path) -> dict[str, str]:
    """Return an environment in which pip and uv look into `wheelhouse` as well."""
    # hatch takes an active environment of its own for the one to build in.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HATCH_ENV")}
    links = " ".join(filter(None, [os.environ.get("PIP_FIND_LINKS", ""), str(wheelhouse)]))
    return {**environ, "PIP_FIND_LINKS": links, "UV_FIND_LINKS": str(wheelhouse)}


def copy_project(project: Path, target: Path) -> Path:
    """Copy a project without what earlier builds left in it."""
    return Path(shutil.copytree(project, target, ignore=shutil.ignore_patterns("_cuda_aot", "__pycache__", "dist")))


def build_wheel(project: Path, folder: Path, wheelhouse: Path, **environ: str) -> Path:
    """Build a project in isolation and return its wheel, in `folder`."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(project)]
    subprocess.run(command, env={**frontend_environ(wheelhouse), **environ}, check=True)
    return only_wheel(folder)


def only_wheel(folder: Path) -> Path:
    """Return the one wheel in `folder`."""
    (wheel,) = folder.glob("*.whl")
    return wheel
