"""Finds the parts of an installed compiler, loads its libraries, and asks each part what exactly it is.

The parts must be of one release, wherever they come from: wheels, conda or a toolkit of the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hatch_cuda_aot.compile import nvjitlink, nvrtc
from hatch_cuda_aot.errors import NoCompilerError
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.toolchain import LINES, Line, Needs, Toolchain, requirements

__all__ = [
    "Parts",
    "describe",
    "find_parts",
    "identified",
    "identify_headers",
    "installed_line",
    "ptxas_version",
]


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the parts of the compiler of `line` are: all that compiling needs to know.

    Attributes:
        line: the CUDA line, whose NVRTC (and nvJitLink, where it is needed) this process has loaded.
        needs: what else had to be found.
        ptxas_path: the program.
        include_dirs: the toolkit's header folders, each under the short name by which diagnostics show it.

    """

    line: Line
    needs: Needs
    ptxas_path: str
    include_dirs: tuple[tuple[str, str], ...]


def installed_line() -> Line:
    """Return the line whose NVRTC wheel is installed; with several, the one that cuda-bindings drives.

    Raises:
        NoCompilerError: if there is none.

    """
    bindings = _version_of("cuda-bindings")
    for suffix in ("", "-cu12"):
        version = _version_of(f"nvidia-cuda-nvrtc{suffix}")
        line = next((line for line in LINES if version and version.startswith(f"{line.version}.")), None)
        if line is not None and bindings and bindings.startswith(f"{line.major}."):
            return line
    message = "no CUDA compiler is installed. Install one with `pip install 'hatch-cuda-aot[cu12]'` or `[cu13]`"
    raise NoCompilerError(message)


def find_parts(line: Line, needs: Needs) -> Parts:
    """Find every part of the compiler of `line` in this environment, load its libraries, and check what that tells.

    Raises:
        NoCompilerError: naming each part that is missing or of another release, with the command that installs them.

    """
    missing: list[str] = []
    _load_nvrtc(line, missing)
    ptxas_path = _find_ptxas(line, missing)
    include_dirs = _find_headers(line, needs, missing)
    if needs.linker:
        _load_nvjitlink(line, missing)
    if missing:
        raise _incomplete(line, needs, missing)
    return Parts(line, needs, ptxas_path, include_dirs)


def describe(parts: Parts) -> Toolchain:
    """Ask each of `parts` for its exact version; what its headers are is left open, see `identified`.

    Raises:
        NoCompilerError: if ptxas is of another release than its wheel.

    """
    line, needs = parts.line, parts.needs
    ptxas = ptxas_version(parts.ptxas_path)
    if not ptxas.startswith(f"{line.version}."):
        raise _incomplete(line, needs, [f"ptxas {line.version} (found {ptxas} at {parts.ptxas_path})"])
    archs = nvrtc.supported_ccs()
    versions = {"NVRTC": nvrtc.build_version(), "ptxas": ptxas}
    if needs.linker:
        versions["nvJitLink"] = nvjitlink.build_version(Arch(min(archs), virtual=True))
    bindings = _version_of("cuda-bindings") or ""
    unknown = [name for name, version in versions.items() if not re.fullmatch(r"[0-9]+(\.[0-9]+){2,}", version)]
    unknown += [] if bindings else ["cuda.bindings"]
    return Toolchain(
        line.version,
        versions["NVRTC"],
        ptxas,
        parts.ptxas_path,
        _cccl_version(parts.include_dirs),
        parts.include_dirs,
        archs,
        versions.get("nvJitLink", ""),
        bindings,
        unknown=tuple(unknown),
    )


def _incomplete(line: Line, needs: Needs, missing: list[str]) -> NoCompilerError:
    wanted = requirements(line, needs)
    message = (
        f"the compiler of CUDA {line.version} is not complete in this environment "
        f"({sys.prefix}):\n"
        + "\n".join(f"  - {part}" for part in missing)
        + "\nBuild with isolation (the default of pip and hatch), which fetches it, or install it:\n  pip install "
        + " ".join(f"'{requirement}'" for requirement in wanted)
    )
    return NoCompilerError(message, requirements=wanted)


def identified(toolchain: Toolchain) -> Toolchain:
    """Return `toolchain` with `headers`, which whoever keeps a result must know; that can take as long as a compilation."""
    headers = tuple((short, identify_headers(Path(folder))) for short, folder in toolchain.include_dirs)
    missing = [f"the headers in {dict(toolchain.include_dirs)[short]}" for short, what in headers if not what]
    return dataclasses.replace(toolchain, headers=headers, unknown=(*toolchain.unknown, *missing))


def _load_nvrtc(line: Line, missing: list[str]) -> None:
    bindings = _version_of("cuda-bindings")
    if bindings is not None and not bindings.startswith(f"{line.major}."):
        missing.append(f"cuda-bindings {bindings} is installed, and drives CUDA {bindings.partition('.')[0]} only")
        return
    _load_from_wheel(f"nvidia-cuda-nvrtc{line.suffix}", "nvrtc")
    try:
        found = nvrtc.version()
    except ImportError:
        missing.append("cuda-bindings")
    except Exception as error:  # noqa: BLE001 -- pathfinder and the bindings raise several kinds for a missing library
        missing.append(f"NVRTC ({_first_line(error)})")
    else:
        if found != line.version:
            missing.append(f"NVRTC {line.version} (found {found})")


def _load_from_wheel(wheel: str, library: str) -> None:
    """Load a library of NVIDIA's from its wheel on `sys.path`, before cuda.bindings looks for one.

    It takes what is loaded already.  Left to itself it also searches the environment around an isolated build, and loads
    NVRTC 13 where the build asked for 12.
    """
    for part in (f"{library}-builtins", library):  # NVRTC 13.0 does not find its builtins by itself
        name = rf"/(lib{part}\.so(\.\d+)+|{part}(64)?_\d+(_0)?(_\d+)?\.dll)"
        file = _file_of(wheel, re.compile(name + "$", re.IGNORECASE).search)
        if file is not None:
            with contextlib.suppress(OSError):  # cuda.bindings will say why
                ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def _find_ptxas(line: Line, missing: list[str]) -> str:
    wheel, executable = f"nvidia-cuda-nvcc{line.suffix}", "ptxas.exe" if sys.platform == "win32" else "ptxas"
    own = _file_of(wheel, lambda name: name.endswith(f"/{executable}"))
    if own is not None and (_version_of(wheel) or "").startswith(f"{line.version}."):
        return str(own)  # it is asked for its own version later
    found = "not found"
    for candidate in filter(None, (own, _from_pathfinder("find_nvidia_binary_utility", "ptxas"))):
        version = ptxas_version(candidate)
        if version.startswith(f"{line.version}."):
            return str(candidate)
        found = f"found {version} at {candidate}"
    missing.append(f"ptxas {line.version} ({found})")
    return ""


def ptxas_version(path: Path | str) -> str:
    """Return the version of a ptxas, as ``"12.9.86"``."""
    output = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"\bV([0-9]+\.[0-9]+\.[0-9]+)", output)
    return match[1] if match else "of unknown version"


#: Short name -> the header that proves the folder, its depth in that folder, the wheel and pathfinder's name for it.
_HEADERS = (
    ("include", "cuda_fp16.h", "nvidia-cuda-runtime", "cudart"),
    ("cccl", "cub/block/block_reduce.cuh", "nvidia-cuda-cccl", "cccl"),
    ("crt", "crt/mma.h", "nvidia-cuda-nvcc", "nvcc"),
    ("crt", "crt/mma.h", "nvidia-cuda-crt", "cudart"),
    ("curand", "curand_kernel.h", "nvidia-curand", "curand"),
)


def _find_headers(line: Line, needs: Needs, missing: list[str]) -> tuple[tuple[str, str], ...]:
    folders: dict[str, str] = {}
    for short, proof, wheel, name in _HEADERS:
        if (short == "curand" and not needs.curand) or (wheel == "nvidia-cuda-crt") != (
            short == "crt" and line.major >= 13
        ):
            continue
        folder = _header_folder(proof, wheel + line.suffix, name)
        if folder is None:
            missing.append(f"the header {proof} (wheel {wheel}{line.suffix})")
        elif folder not in folders.values():
            folders[short] = folder
    if "include" in folders and (found := _toolkit_version(folders["include"])) != line.version:
        missing.append(f"the headers of CUDA {line.version} (found {found} in {folders['include']})")
    return tuple(folders.items())


def _header_folder(proof: str, wheel: str, name: str) -> str | None:
    file = _file_of(wheel, lambda path: path.endswith(f"/{proof}"))
    if file is not None:
        return str(file.parents[proof.count("/")])
    folder = _from_pathfinder("find_nvidia_header_directory", name)
    return str(folder) if folder is not None and (folder / proof).is_file() else None


def _toolkit_version(folder: str) -> str:
    try:
        text = (Path(folder) / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "none"
    match = re.search(r"^#define\s+CUDART_VERSION\s+([0-9]+)", text, re.MULTILINE)
    number = int(match[1]) if match else 0
    return f"{number // 1000}.{number % 1000 // 10}"


def _cccl_version(include_dirs: tuple[tuple[str, str], ...]) -> str:
    for _, folder in include_dirs:
        for name in ("cuda/__cccl_config", "cuda/std/__cccl/version.h", "cuda/version"):
            file = Path(folder, name)
            if file.is_file() and (match := _CCCL_VERSION.search(file.read_text(encoding="utf-8", errors="replace"))):
                return match[1]
    return "unknown"


_CCCL_VERSION = re.compile(r"^#\s*define\s+CCCL_VERSION\s+([0-9]+)", re.MULTILINE)


def _load_nvjitlink(line: Line, missing: list[str]) -> None:
    _load_from_wheel(f"nvidia-nvjitlink{line.suffix}", "nvJitLink")
    try:
        found = nvjitlink.version()
    except Exception as error:  # noqa: BLE001 -- as above
        missing.append(f"nvJitLink ({_first_line(error)})")
    else:
        if found != line.version:
            missing.append(f"nvJitLink {line.version} (found {found})")


def identify_headers(folder: Path) -> str:
    """Say exactly which headers a folder holds: the wheels that own files in it, or the digest of all it holds.

    Of the wheels their names and versions are enough, as a release on the index never changes.  Headers of a toolkit
    that was installed otherwise carry no exact version, so their contents speak for them.  Empty if they cannot be read.
    """
    folder = Path(os.path.realpath(folder))
    for site in folder.parents:
        inside = f"{folder.relative_to(site).as_posix()}/"
        owners = [info.name for info in sorted(site.glob("*.dist-info")) if _owns(info, inside)]
        if owners:
            return " ".join(name.removesuffix(".dist-info") for name in owners)
    with contextlib.suppress(OSError):
        return _digest_of(folder)
    return ""


def _owns(info: Path, folder: str) -> bool:
    if not info.name.startswith(("nvidia_", "cuda_")):
        return False
    try:
        record = (info / "RECORD").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return record.startswith(folder) or f"\n{folder}" in record


def _digest_of(folder: Path) -> str:
    def stop(error: OSError) -> None:
        raise error

    state = hashlib.sha256()
    for parent, folders, names in os.walk(folder, onerror=stop):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            content = path.read_bytes()
            state.update(f"{path.relative_to(folder).as_posix()}:{len(content)}:".encode(errors="surrogateescape"))
            state.update(content)
    return state.hexdigest()


def _file_of(distribution: str, wanted: Callable[[str], object]) -> Path | None:
    """Return the first installed file of a distribution whose path satisfies `wanted`."""
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    record = found.read_text("RECORD") or ""  # `files` would make thousands of objects of it
    for line in record.splitlines():
        name = line.partition(",")[0]
        if wanted(f"/{name}"):
            located = Path(str(found.locate_file(name)))
            if located.is_file():
                return located
    return None


def _from_pathfinder(function: str, name: str) -> Path | None:
    """Ask cuda.pathfinder, which also knows conda environments and toolkits installed on the system."""
    try:
        import cuda.pathfinder

        found = getattr(cuda.pathfinder, function)(name)
    except Exception:  # noqa: BLE001 -- absent, unsupported name or not found: all mean "no" here
        return None
    return Path(found) if found else None


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
