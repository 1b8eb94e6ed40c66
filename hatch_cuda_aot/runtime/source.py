"""Compiles a kernel from the source that travels in the package, for one device, through NVRTC.

Called where no image will do: for an instantiation of a template that was not built, and for a device that no image fits.
NVRTC is imported by the first compilation and need not be installed.  What it makes is kept in the cache of compiled PTX.
This module loads nothing and chooses no image.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from .arch import Arch, canonical_cc, format_cc
from .errors import CorruptImageError
from .files import DamagedError, read_verified
from .jit_cache import key_of
from .manifest import Param, canonical_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .jit_cache import JitCache
    from .manifest import Manifest, ModuleManifest
    from .select import DeviceFacts

__all__ = ["Compiled", "SourceError", "compile_kernel", "module_of_template"]


class Compiled(NamedTuple):
    """What a compilation made: one kernel, with all that its source defines.

    Attributes:
        arch: what `code` is for: machine code of ``sm_XY``, or PTX of ``compute_XY`` where NVRTC does not know the device.
        symbol: the kernel's name in `code`.
        params: the kernel's parameters in order.
        code: the cubin, or the PTX.

    """

    arch: Arch
    symbol: str
    params: tuple[Param, ...]
    code: bytes


class SourceError(Exception):
    """A kernel could not be compiled from its source; the text says why, and what to install where that is all it takes."""


def module_of_template(manifest: Manifest, name: str) -> tuple[ModuleManifest, str] | None:
    """Return the module whose source has the template that `name` instantiates, and `name` in canonical form.

    None where `name` is no instantiation, or no module carries such a template.

    Args:
        manifest: the index.
        name: such as ``axpy<int>`` or ``module:axpy<int>``.

    """
    only, colon, rest = name.partition(":")
    if not colon or rest.startswith(":"):
        only, rest = "", name
    expression = canonical_name(rest).removeprefix("::")
    template, bracket, _ = expression.partition("<")
    if not bracket or not expression.endswith(">"):
        return None
    # An instantiation that was built leads to the module without a look into the others.
    siblings = {
        module
        for built, owners in manifest.kernels.items()
        if built.startswith(f"{template}<")
        for module in ([owners] if isinstance(owners, str) else owners)
    }
    for candidate in [only.strip()] if only else [*sorted(siblings), *sorted(manifest.modules.keys() - siblings)]:
        module = manifest.module(candidate)
        if module.source is not None and template in module.source["templates"]:
            return module, expression
    return None


def compile_kernel(
    folder: str,
    module: ModuleManifest,
    expression: str,
    symbol: str,
    device: DeviceFacts,
    *,
    cache: JitCache,
    logger: str,
) -> Compiled:
    """Compile a kernel of `module` for `device`, or find it in `cache`.

    Args:
        folder: where the manifest and the source lie.
        module: one that carries its source.
        expression: the kernel's name.
        symbol: its name in images, empty for an instantiation that has none yet.
        device: what to compile for.
        cache: where it is looked for, and then kept.
        logger: name of the logger that gets one line at level INFO for a compilation.

    Raises:
        SourceError: if NVRTC is missing, or the source does not compile.
        CorruptImageError: if the source is not the one that was built.

    """
    source: Mapping[str, Any] = module.source or {}
    texts = _read(os.path.join(folder, source["folder"]), source["files"])
    nvrtc = _Nvrtc()
    arch = nvrtc.arch_for(device, module)
    key = key_of(
        what="kernel from source",
        files=tuple((path, entry["sha256"]) for path, entry in sorted(source["files"].items())),
        main=source["main"],
        options=tuple(source["options"]),
        ptxas=tuple(source["ptxas"]),
        nvrtc=nvrtc.version,
        headers=nvrtc.header_versions,
        expression=expression,
        arch=str(arch),
    )
    stored = cache.get(key)
    if stored is not None:
        return _unpack(arch, stored)
    start = time.perf_counter()
    compiled = nvrtc.compile(texts, source, arch, expression, symbol)
    milliseconds = (time.perf_counter() - start) * 1e3
    import logging

    logging.getLogger(logger).info(
        "compiled %s from %s for compute capability %s in %.0f ms (NVRTC %s)",
        expression,
        source["main"],
        format_cc(device.cc),
        milliseconds,
        nvrtc.version,
    )
    cache.put(key, _pack(compiled))
    return compiled


class _Nvrtc:
    """NVRTC as it is installed here, with the toolkit's headers that belong to it."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import nvrtc

            self._api = nvrtc
            self._major, minor = self._call("nvrtcVersion")
        except (ImportError, RuntimeError, OSError) as error:  # the bindings raise several kinds for a missing library
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            message = f"NVRTC is not installed ({reason}):\n{_install_hint(_bindings_major())}"
            raise SourceError(message) from error
        self.version = f"{self._major}.{minor}"
        self._headers = _find_headers(self._major)
        self.header_versions = _header_versions(self._headers)

    def arch_for(self, device: DeviceFacts, module: ModuleManifest) -> Arch:
        """Return what to compile for, with the suffix that the module's own images for this device have.

        Machine code is for the device's own compute capability.  Where NVRTC does not know that, or is of a newer major
        release than the driver, whose machine code that would not load, it is PTX of the highest one below.
        """
        known = self._call("nvrtcGetSupportedArchs")
        own = next((cc for cc in (device.cc, 110, 101) if cc in known and _same(cc, device.cc)), None)
        if own is not None and (device.driver is None or self._major <= device.driver // 1000):
            suffixes = {image.arch.suffix for image in module.images if _same(image.arch.cc, device.cc)}
            return Arch(own, next((suffix for suffix in ("a", "f") if suffix in suffixes), ""))
        below = [cc for cc in known if canonical_cc(cc) <= canonical_cc(device.cc)]
        if not below:
            message = (
                f"NVRTC {self.version} compiles for nothing that runs on compute capability {format_cc(device.cc)}"
            )
            raise SourceError(message)
        return Arch(max(below), virtual=True)

    def compile(
        self, texts: Mapping[str, str], source: Mapping[str, Any], arch: Arch, expression: str, symbol: str
    ) -> Compiled:
        """Compile in a folder that holds exactly the package's files."""
        from tempfile import TemporaryDirectory

        with TemporaryDirectory(prefix="cuda-aot-") as folder:
            for path, text in texts.items():
                target = os.path.join(folder, *path.split("/"))
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with open(target, "w", encoding="utf-8", newline="") as file:
                    file.write(text)
            main = os.path.join(folder, *source["main"].split("/"))
            options = [f"-arch={arch}", *_options(source, folder, real=not arch.virtual)]
            options += [f"--include-path={path}" for path in self._headers]
            program = self._call("nvrtcCreateProgram", texts[source["main"]].encode(), main.encode(), 0, [], [])
            try:
                return self._run(program, options, arch, expression, symbol, folder)
            finally:
                self._api.nvrtcDestroyProgram(program)

    def _run(self, program: Any, options: list[str], arch: Arch, expression: str, symbol: str, folder: str) -> Compiled:
        if not symbol:
            self._call("nvrtcAddNameExpression", program, expression.encode())
        (status,) = self._api.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status) != 0:
            log = self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
            raise SourceError(self._explain(log or str(status), folder))
        if not symbol:
            symbol = self._call("nvrtcGetLoweredName", program, expression.encode()).decode()
        ptx = self._read("PTX", program).rstrip(b"\0")
        params = _params(ptx.decode(errors="replace"), symbol)
        if params is None:
            raise SourceError(f"{expression!r} names {symbol}, which is no kernel")
        return Compiled(arch, symbol, params, ptx if arch.virtual else self._read("CUBIN", program))

    def _explain(self, log: str, folder: str) -> str:
        """Return what NVRTC said, without the temporary folder and its own bookkeeping of names."""
        log = log.replace(f"{folder}{os.sep}", "")
        blocks = re.split(r"\n\s*\n", log)
        text = "\n\n".join(
            block for block in blocks if not re.search(r"__nv_name_map\(|detected in the compilation", block)
        )
        if not text.strip():
            text = next(iter(re.findall(r"__nv_name_map\(\d+\): error: (.*)", log)), log)
        message = f"NVRTC {self.version} cannot compile it:\n" + "\n".join(f"  {line}" for line in text.splitlines())
        if re.search(r"could ?n[o']t open source file", text):
            message += f"\nIf it is a header of the CUDA toolkit:\n{_install_hint(self._major)}"
        return message

    def _call(self, function: str, *arguments: object) -> Any:
        status, *results = getattr(self._api, function)(*arguments)
        if int(status) != 0:
            raise SourceError(f"NVRTC failed: {status} from {function}")
        return results[0] if len(results) == 1 else tuple(results)

    def _read(self, what: str, program: Any) -> bytes:
        buffer = bytearray(self._call(f"nvrtcGet{what}Size", program))
        self._call(f"nvrtcGet{what}", program, buffer)
        return bytes(buffer)


def _read(folder: str, files: Mapping[str, Any]) -> dict[str, str]:
    """Return each file's text by its path, verified, and made to call itself by that path.

    The ``#line`` directive gives ``__FILE__``, assertions and diagnostics the relative names that the build has, although
    NVRTC works in a temporary folder here: a library may not change the current folder of its process.
    """
    texts = {}
    for name, entry in files.items():
        try:
            content = read_verified(os.path.join(folder, *name.split("/")), entry["size"], entry["sha256"])
        except DamagedError as error:
            message = f"{error}; reinstall the package"
            raise CorruptImageError(message, error.path, error.expected, error.actual) from error
        quoted = name.replace("\\", "\\\\").replace('"', '\\"')
        texts[name] = f'#line 1 "{quoted}"\n{content.decode("utf-8-sig", errors="surrogateescape")}'
    return texts


def _options(source: Mapping[str, Any], folder: str, *, real: bool) -> Iterable[str]:
    """Return the module's options as NVRTC takes them here: the folders are absolute, and it runs ptxas itself."""
    for option in source["options"]:
        name, _, value = option.partition("=")
        if name == "--include-path":
            yield f"{name}={os.path.join(folder, *value.split('/'))}"
        elif name != "--restrict":  # NVRTC would remember it for all later compilations of the process, CuPy's too
            yield option
    if real:
        yield from (f"--ptxas-options={option}" for option in source["ptxas"])


def _find_headers(major: int) -> list[str]:
    """Return the folders of the toolkit's headers, those of CUDA `major` alone."""
    import importlib

    folders: list[str] = []
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        find = pathfinder.find_nvidia_header_directory
    except (ImportError, AttributeError):
        return folders
    for name, proof in _HEADERS:
        try:
            folder = find(name)
        except RuntimeError:  # a name that this release of pathfinder does not know
            continue
        if folder and folder not in folders and os.path.isfile(os.path.join(folder, proof)):
            folders.append(folder)
    version = _defined(folders, "cuda_runtime_api.h", "CUDART_VERSION")
    return folders if not version or int(version) // 1000 == major else []


def _header_versions(folders: Iterable[str]) -> tuple[str, str]:
    return (
        _defined(folders, "cuda_runtime_api.h", "CUDART_VERSION"),
        _defined(folders, os.path.join("cuda", "std", "__cccl", "version.h"), "CCCL_VERSION"),
    )


def _defined(folders: Iterable[str], header: str, macro: str) -> str:
    for folder in folders:
        try:
            with open(os.path.join(folder, header), encoding="utf-8", errors="replace") as file:
                match = re.search(rf"^#\s*define\s+{macro}\s+([0-9]+)", file.read(), re.MULTILINE)
        except OSError:
            continue
        if match:
            return match[1]
    return ""


#: What cuda.pathfinder calls each folder of headers, and a header that proves it.
_HEADERS = (
    ("cudart", "cuda_fp16.h"),
    ("cccl", os.path.join("cuda", "std", "cstdint")),
    ("nvcc", os.path.join("crt", "mma.h")),
    ("curand", "curand_kernel.h"),
)


def _bindings_major() -> int:
    try:
        from cuda.bindings import __version__
    except ImportError:
        return 13
    return int(__version__.partition(".")[0])


def _install_hint(major: int) -> str:
    suffix = "-cu12" if major == 12 else ""
    names = (f"nvidia-cuda-{part}{suffix}" for part in ("nvrtc", "runtime", "cccl"))
    return "    pip install " + " ".join(f'"{name}=={major}.*"' for name in names)


def _same(cc: int, other: int) -> bool:
    return canonical_cc(cc) == canonical_cc(other)


def _params(ptx: str, symbol: str) -> tuple[Param, ...] | None:
    """Return the parameters of the kernel `symbol` as the build reads them, or None if there is no such kernel."""
    entry = re.search(rf"\.entry {re.escape(symbol)}\s*\(([^)]*)\)", ptx)
    if entry is None:
        return None
    params: list[Param] = []
    end = 0
    for match in _PARAM.finditer(entry[1]):
        element = int(match["type"].lstrip("abcdefghijklmnopqrstuvwxyz")) // 8
        size = element * int(match["count"] or 1)
        align = int(match["align"] or element)
        offset = -(-end // align) * align
        params.append(Param("struct" if match["count"] else match["type"], size, offset))
        end = offset + size
    return tuple(params)


_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[a-z]+\d+)\s+(?:\.ptr\s+(?:\.\w+\s+)*?(?:\.align\s+\d+\s+)?)?"
    r"(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?"
)


def _pack(compiled: Compiled) -> bytes:
    import json

    head = {"symbol": compiled.symbol, "params": [list(param) for param in compiled.params]}
    return json.dumps(head).encode() + b"\n" + compiled.code


def _unpack(arch: Arch, content: bytes) -> Compiled:
    import json

    head, _, code = content.partition(b"\n")
    data = json.loads(head)
    return Compiled(arch, data["symbol"], tuple(Param(*param) for param in data["params"]), code)
