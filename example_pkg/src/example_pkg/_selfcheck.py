"""Runs every kernel on random input and compares with NumPy in float64. For `python -m example_pkg`, on a GPU."""

from __future__ import annotations

from ctypes import c_longlong
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.core import LEGACY_DEFAULT_STREAM, Buffer, Device, LaunchConfig, launch
from cuda.core.utils import StridedMemoryView

from . import AXPY, BLOCK_SUM, SOFTMAX, axpy, block_sum, histogram, set_bins, softmax
from ._cuda_aot import get_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

FLOAT_EPS = float(np.finfo("float32").eps)
BFLOAT16_EPS = 2.0**-7


def checks() -> Iterator[tuple[str, float, float]]:
    """Yield for each check what was run, the largest error relative to the largest result, and what is allowed."""
    Device(0).set_current()
    rng = np.random.default_rng(0)

    for dtype, kernel in AXPY.items():
        x, y = rng.standard_normal((2, 100_003)).astype(dtype)
        result = to_host(axpy(2.5, to_gpu(x), to_gpu(y)))
        yield kernel, error(result, 2.5 * x.astype("float64") + y), 2 * float(np.finfo(dtype).eps)

    for dtype, kernel in BLOCK_SUM.items():
        x = rng.random(1_000_003).astype(dtype)
        total = to_host(block_sum(to_gpu(x), to_gpu(np.zeros(1, dtype))))
        yield kernel, error(total, x.sum(dtype="float64")), 16 * float(np.finfo(dtype).eps)

    logits = 10 * rng.standard_normal((1003, 257))
    for dtype in ("float32", "float16"):
        x = logits.astype(dtype)
        result = to_host(softmax(to_gpu(x)))
        yield SOFTMAX[dtype], error(result, reference_softmax(x)), float(np.finfo(dtype).eps) + 16 * FLOAT_EPS

    # NumPy has no bfloat16, so this one is launched by hand, on the bits.
    bits = (logits.astype("float32").view("uint32") >> 16).astype("uint16")
    memory = to_gpu(bits)
    kernel = SOFTMAX["bfloat16"]
    sizes = [c_longlong(extent) for extent in bits.shape]
    config = LaunchConfig(grid=256, block=128)
    launch(LEGACY_DEFAULT_STREAM, config, get_kernel(kernel), memory.ptr, memory.ptr, *sizes)
    result = bfloat16_to_float32(to_host(memory))
    yield kernel, error(result, reference_softmax(bfloat16_to_float32(bits))), BFLOAT16_EPS + 16 * FLOAT_EPS

    data = rng.integers(0, 256, 1_000_003, "uint8")
    counts = to_host(histogram(to_gpu(data), to_gpu(np.zeros(256, "uint32"))))
    yield "histogram", error(counts, np.bincount(data, minlength=256)), 0.0

    set_bins(byte // 16 for byte in range(256))
    counts = to_host(histogram(to_gpu(data), to_gpu(np.zeros(16, "uint32"))))
    set_bins(range(256))
    yield "histogram, 16 bins", error(counts, np.bincount(data // 16, minlength=16)), 0.0


def to_gpu(host: NDArray[Any]) -> StridedMemoryView:
    """Copy an array of the host into new memory of the current device."""
    buffer = Device().allocate(host.nbytes, stream=LEGACY_DEFAULT_STREAM)
    buffer.copy_from(memory_of(host), stream=LEGACY_DEFAULT_STREAM)
    return StridedMemoryView.from_buffer(buffer, host.shape, dtype=host.dtype)


def to_host(array: StridedMemoryView) -> NDArray[Any]:
    """Copy an array that `to_gpu` made back to the host, once the default stream is done with it."""
    host = np.empty(array.shape, array.dtype)
    array.exporting_obj.copy_to(memory_of(host), stream=LEGACY_DEFAULT_STREAM)
    LEGACY_DEFAULT_STREAM.sync()
    return host


def memory_of(host: NDArray[Any]) -> Buffer:
    return Buffer.from_handle(host.ctypes.data, host.nbytes, owner=host)


def error(result: NDArray[Any], expected: Any) -> float:
    return float(np.max(np.abs(result.astype("float64") - expected)) / np.max(np.abs(expected)))


def reference_softmax(x: NDArray[Any]) -> NDArray[np.float64]:
    weights = np.exp(x.astype("float64") - x.max(axis=-1, keepdims=True))
    probabilities: NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return probabilities


def bfloat16_to_float32(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Widen the bits of bfloat16 values, which are the upper halves of float32 values."""
    return (bits.astype("uint32") << 16).view("float32")
