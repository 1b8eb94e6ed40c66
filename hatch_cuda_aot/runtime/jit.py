"""Turns PTX into machine code for one device, through the driver's own compiler (cuLink).

It knows neither files nor the manifest: text in, cubin bytes out.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

from .arch import format_cc, format_cuda
from .device import DriverError

if TYPE_CHECKING:
    from .device import Driver
    from .select import DeviceFacts

__all__ = ["compile_ptx"]

#: Bytes for each of the driver's two logs; it cuts off what does not fit.
_LOG_BYTES = 8192


def compile_ptx(driver: Driver, ptx: bytes, device: DeviceFacts, *, label: str, logger: str) -> bytes:
    """Compile `ptx` for `device` and return the cubin.

    Needs a context on the device for the time of the call, and leaves contexts as they were.

    Args:
        driver: the driver.
        ptx: the text, without the NUL at its end.
        device: one that is there.
        label: what to call the PTX in logs and errors.
        logger: name of the logger that gets one line at level INFO.

    Raises:
        DriverError: if the driver cannot compile it; the message ends in the compiler's own words.

    """
    import logging

    with driver.context(device.ordinal or 0):
        start = time.perf_counter()
        cubin = _link(driver, ptx + b"\0", label)
        seconds = time.perf_counter() - start
    logging.getLogger(logger).info(
        "compiled %s for compute capability %s in %.0f ms (driver of CUDA %s)",
        label,
        format_cc(device.cc),
        seconds * 1e3,
        format_cuda(driver.version),
    )
    return cubin


def _link(driver: Driver, ptx: bytes, label: str) -> bytes:
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
