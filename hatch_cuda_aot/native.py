"""Asks the driver which GPUs this machine has, without any CUDA package: for the architecture word ``native``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hatch_cuda_aot.errors import BuildError

if TYPE_CHECKING:
    import ctypes

__all__ = ["visible_ccs"]

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR, cuda.h


def visible_ccs() -> tuple[int, ...]:
    """Return the compute capabilities (90 for 9.0) of the GPUs that the driver shows.

    Raises:
        BuildError: if there is no driver or no GPU.

    """
    import ctypes  # which takes time that builds without that word need not spend

    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        raise BuildError(_message(f"there is no NVIDIA driver here ({name} does not load)")) from None
    status = driver.cuInit(0)
    if status != 0:
        raise BuildError(_message(f"the driver shows no GPU (cuInit returns {status})"))
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    found = {_cc(driver, ordinal) for ordinal in range(count.value)}
    if not found:
        raise BuildError(_message("the driver shows no GPU"))
    return tuple(sorted(found))


def _cc(driver: ctypes.CDLL, ordinal: int) -> int:
    import ctypes

    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return major.value * 10 + minor.value


def _message(what: str) -> str:
    return f'`archs` asks for "native", but {what}. List the architectures to build for instead, such as "sm_90"'
