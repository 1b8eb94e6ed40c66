"""What a machine compiles with, as names and versions, so that machines can be held against each other.

Two machines of equal `Software` make the same bytes of the same task.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping

from packaging.requirements import Requirement

from hatch_cuda_aot._version import __version__
from hatch_cuda_aot.compile.tasks import Compiler
from hatch_cuda_aot.toolchain import Toolchain, line_named, requirements

__all__ = ["PROGRAM", "Software", "differences", "most_common", "pins", "program", "software_of"]

#: The name of a part -> its version.
Software = Mapping[str, str]

#: The name under which our own code is a part.
PROGRAM = "hatch-cuda-aot"

#: Packages that only call the compiler: which release of them does so does not show in the result.
_CALLERS = frozenset({"cuda-bindings", "cuda-pathfinder"})

_NO_WHEEL = "from no wheel"


def software_of(toolchain: Toolchain, compiler: Compiler) -> dict[str, str]:
    """Return the versions of our own code, and of each part of the compiler as it says itself or its wheel does."""
    parts = {
        PROGRAM: program(),
        "platform": f"{sys.platform} {platform.machine()}",
        "NVRTC": toolchain.nvrtc,
        "ptxas": toolchain.ptxas,
        "CCCL": toolchain.cccl,
        "cuda.bindings": toolchain.bindings,
        **{f"headers in {short}": content for short, content in toolchain.headers},
    }
    for name in _wheels(compiler):
        if name not in _SAY_THEMSELVES:
            parts[name] = _version_of(name)
    return parts


def program() -> str:
    """Return our own version, with the digest of the code that stands between a task and its result."""
    from hatch_cuda_aot.cache import program_digest

    return f"{__version__} (code {program_digest()[:12]})"


def differences(found: Software, expected: Software) -> list[str]:
    """Say which of the parts that are known of both differ, in a phrase each."""
    return [
        f"{name} {found[name]} instead of {version}"
        for name, version in expected.items()
        if name in found and found[name] != version
    ]


def most_common(found: Iterable[Software]) -> dict[str, str]:
    """Return what most machines have, our own code aside; of equals the first."""
    parts = [tuple((name, version) for name, version in each.items() if name != PROGRAM) for each in found]
    return dict(Counter(parts).most_common(1)[0][0])


def pins(compiler: Compiler, expected: Software) -> list[str]:
    """Return requirements that install exactly `expected`; what is known of no wheel is required as a build does."""
    found = [f"{PROGRAM}[dask]=={__version__}"]
    for text in requirements(line_named(compiler.line), compiler.needs):
        name = Requirement(text).name
        version = expected.get(_SAY_THEMSELVES.get(name, name), _NO_WHEEL)
        found.append(text if version == _NO_WHEEL else f"{name}=={version}")
    return found


#: Wheels whose content tells its version itself, under the name of a part.
_SAY_THEMSELVES = {
    f"nvidia-cuda-{wheel}{suffix}": part
    for wheel, part in (("nvrtc", "NVRTC"), ("nvcc", "ptxas"))
    for suffix in ("", "-cu12")
}


def _wheels(compiler: Compiler) -> list[str]:
    names = [Requirement(text).name for text in requirements(line_named(compiler.line), compiler.needs)]
    return [name for name in names if name not in _CALLERS]


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return _NO_WHEEL
