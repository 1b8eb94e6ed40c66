"""A tiny project for tests that build it many times, and its builds through hatchling in a compiler's environment."""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.build.conftest import Compiler
from tests.wheels import ROOT, only_wheel

_SOURCE = """\
#include <cuda/std/cassert>
#include "own.cuh"
namespace { __device__ int hidden; }
extern "C" __global__ void k(const char** x, float* y) { *x = __FILE__; assert(y); y[0] = own(y[1]) + hidden; }
template <class T> __global__ void t(T* x) { own_file(x); }
"""

_HEADER = """\
#pragma once
#include <cuda/std/cassert>
inline __device__ float own(float x) { assert(x > 0); return x / 3; }
template <class T> __device__ void own_file(T* x) { *x = *__FILE__; }
"""

_PYPROJECT = """\
[build-system]
requires = ["hatchling", "hatch-cuda-aot"]
build-backend = "hatchling.build"

[project]
name = "tiny"
version = "1.0"
dependencies = ["cuda-core", "cuda-bindings", "platformdirs"]

[tool.hatch.build.targets.wheel]
packages = ["src/tiny"]

[tool.hatch.build]
dev-mode-dirs = ["src"]

[tool.hatch.build.targets.wheel.hooks.cuda-aot]

[tool.cuda-aot]
cuda = "{line}"
archs = ["sm_80", "compute_80"]
include-dirs = ["src/tiny/device"]
{keys}

[[tool.cuda-aot.modules]]
sources = ["src/tiny/a.cu"]
kernels = [{kernels}]
"""

#: Builds a project as hatchling does for a frontend, from any current folder.
_BUILD = """\
import sys
from hatchling.builders.wheel import WheelBuilder
root, out, version = sys.argv[1:]
for artifact in WheelBuilder(root).build(directory=out, versions=[version]):
    print(artifact)
"""


def lay_out(
    root: Path, line: str, keys: str = 'sources = ["src/tiny/*.cu"]', kernels: str = '"t<char>", "t<int>"'
) -> Path:
    """Write the project to `root`."""
    for name, text in {
        "pyproject.toml": _PYPROJECT.format(line=line, keys=keys, kernels=kernels),
        "src/tiny/__init__.py": "",
        "src/tiny/a.cu": _SOURCE,
        "src/tiny/b.cu": 'extern "C" __global__ void other(int *x) { *x = 1; }\n',
        "src/tiny/device/own.cuh": _HEADER,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


class Builder:
    """Builds projects with the hook of this checkout, in the environment of a compiler."""

    def __init__(self, compiler: Compiler, folder: Path) -> None:
        self.compiler = compiler
        self.plugin = folder / "plugin"  # what makes hatchling find the hook
        info = self.plugin / "hatch_cuda_aot-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hatch-cuda-aot\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[hatch]\ncuda-aot = hatch_cuda_aot.hooks\n")

    def start(
        self,
        project: Path,
        out: Path,
        environ: Mapping[str, str],
        version: str = "standard",
        cwd: Path | None = None,
        **arguments: Any,
    ) -> subprocess.Popen[str]:
        """Start a build in a process group of its own."""
        path = os.pathsep.join([str(ROOT), str(self.plugin)])
        return subprocess.Popen(
            [str(self.compiler.python), "-c", _BUILD, str(project), str(out), version],
            cwd=cwd or project,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **arguments,
        )

    def build(self, project: Path, out: Path, environ: Mapping[str, str], **arguments: Any) -> Path:
        """Build a wheel and return it."""
        process = self.start(project, out, environ, **arguments)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return only_wheel(out)


def contents(wheel: Path) -> dict[str, bytes]:
    """Return a wheel's files by name: what to compare where its bytes differ."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
