"""Turns PTX into machine code for one device, through the driver's own compiler (cuLink) or else through nvJitLink.

It knows neither files nor the cache: text in, cubin bytes out, and a `Recipe` that says all that they depend on.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from .arch import format_cc, format_cuda
from .device import DriverError
from .jit_cache import key_of
from .select import JIT_LOWERED, NVJITLINK

if TYPE_CHECKING:
    from .device import Driver
    from .manifest import Image
    from .select import DeviceFacts

__all__ = ["LinkerError", "Recipe", "compile_ptx", "nvjitlink_version"]

#: Bytes for each of the driver's two logs; it cuts off what does not fit.
_LOG_BYTES = 8192

_NVJITLINK = "cuda.bindings.nvjitlink"


class Recipe(NamedTuple):
    """How PTX becomes machine code: all that the result depends on, beside the text.

    Attributes:
        compiler: with its version, such as ``"driver of CUDA 13.0"`` or ``"nvJitLink 13.5"``.
        build: what tells apart builds of the compiler that have the same version; may be empty.
        cc: compute capability of the device, as ``major * 10 + minor``.
        lowered: what the text's ``.version`` is replaced with, such as ``"7.0"``; None to leave it.
        options: of nvJitLink; None for the driver's compiler.

    """

    compiler: str
    build: str
    cc: int
    lowered: str | None = None
    options: tuple[str, ...] | None = None

    @classmethod
    def of(cls, image: Image, way: str, device: DeviceFacts, driver: Driver) -> Recipe:
        """Return the recipe for `image`, PTX that was found to run on `device` in this `way`."""
        cc = device.cc
        if way == NVJITLINK:
            target = f"-arch=sm_{cc}{image.arch.suffix}"
            return cls(f"nvJitLink {format_cuda(device.nvjitlink or 0)}", "", cc, options=(target,))
        lowered = image.ptx_floor if way == JIT_LOWERED else None
        return cls(f"driver of CUDA {format_cuda(driver.version)}", driver.build, cc, lowered)

    def key(self, digest: str) -> str:
        """Return the key under which the cache holds what this makes of the text whose SHA-256 is `digest`."""
        return key_of(what="cubin from PTX", ptx=digest, **self._asdict())

    def __str__(self) -> str:
        return f"{self.compiler}, .version lowered to {self.lowered}" if self.lowered else self.compiler


class LinkerError(DriverError):
    """nvJitLink could not compile the PTX; another image may still run."""

    by = "nvJitLink"
    refusal = True
    not_found = False


def compile_ptx(driver: Driver, ptx: bytes, device: DeviceFacts, recipe: Recipe, *, label: str, logger: str) -> bytes:
    """Compile `ptx` for `device` and return the cubin.

    The driver's compiler needs a context on the device for the time of the call, and leaves contexts as they were.

    Args:
        driver: the driver.
        ptx: the text, without the NUL at its end.
        device: one that is there.
        recipe: how to compile it.
        label: what to call the PTX in logs and errors.
        logger: name of the logger that gets one line at level INFO.

    Raises:
        DriverError: if the driver cannot compile it; the message ends in the compiler's own words.
        LinkerError: if nvJitLink cannot.

    """
    import logging

    if recipe.lowered:
        ptx = lower_version(ptx, recipe.lowered)
    if recipe.options is not None:
        start = time.perf_counter()
        cubin = _link_with_nvjitlink(ptx, recipe.options, label)
        seconds = time.perf_counter() - start
    else:
        with driver.context(device.ordinal or 0):
            start = time.perf_counter()
            cubin = _link(driver, ptx + b"\0", label)
            seconds = time.perf_counter() - start
    logging.getLogger(logger).info(
        "compiled %s for compute capability %s in %.0f ms (%s)", label, format_cc(device.cc), seconds * 1e3, recipe
    )
    return cubin


def lower_version(ptx: bytes, version: str) -> bytes:
    """Return `ptx` with `version` in its ``.version`` line; text without such a line is left for the driver to reject."""
    import re

    return re.sub(rb"(?m)^(\s*\.version\s+)[0-9.]+", rb"\g<1>" + version.encode(), ptx, count=1)


def nvjitlink_version() -> int | None:
    """Return the CUDA version of the nvJitLink that is installed (13050 for 13.5), or None.

    It is loaded for that, which takes a tenth of a second: ask where the answer decides something.
    """
    try:
        major, minor = importlib.import_module(_NVJITLINK).version()
    except (ImportError, RuntimeError, OSError):  # older bindings; no library, or one before 12.3
        return None
    return int(major) * 1000 + int(minor) * 10


def _link(driver: Driver, ptx: bytes, label: str) -> bytes:
    import ctypes

    option = driver.api.CUjit_option
    info, errors = bytearray(_LOG_BYTES), bytearray(_LOG_BYTES)
    options = {
        option.CU_JIT_INFO_LOG_BUFFER: info,
        option.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: _LOG_BYTES,
        option.CU_JIT_ERROR_LOG_BUFFER: errors,
        option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: _LOG_BYTES,
    }
    state = driver.call("cuLinkCreate", len(options), list(options), list(options.values()))
    try:
        kind = driver.api.CUjitInputType.CU_JIT_INPUT_PTX
        # After a failed cuLinkAddData, cuLinkComplete still succeeds, with an empty cubin: the exception ends it here.
        driver.call("cuLinkAddData", state, kind, ptx, len(ptx), label.encode(), 0, [], [])
        address, size = driver.call("cuLinkComplete", state)
        return ctypes.string_at(int(address), size)  # the memory belongs to `state`
    except DriverError as error:
        words = errors.rstrip(b"\0").decode(errors="replace").strip()
        if words:
            error.args = (f"{error}: {words}",)
        raise
    finally:
        driver.call("cuLinkDestroy", state)


def _link_with_nvjitlink(ptx: bytes, options: tuple[str, ...], label: str) -> bytes:
    nvjitlink = importlib.import_module(_NVJITLINK)
    handle = 0
    try:
        handle = nvjitlink.create(len(options), list(options))
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, ptx, len(ptx), label)
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        return bytes(cubin)
    except nvjitlink.nvJitLinkError as error:
        words = _nvjitlink_log(nvjitlink, handle) if handle else " ".join(options)
        status = nvjitlink.Result(error.status)
        raise LinkerError("nvJitLink", int(status), status.name, words) from error
    finally:
        if handle:
            nvjitlink.destroy(handle)


def _nvjitlink_log(nvjitlink: Any, handle: int) -> str:
    log = bytearray(nvjitlink.get_error_log_size(handle))
    if log:
        nvjitlink.get_error_log(handle, log)
    return log.rstrip(b"\0").decode(errors="replace").strip()
