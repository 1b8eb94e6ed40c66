"""Four CUDA kernels, compiled when the wheel was built, behind four Python functions.

The arrays may come from any library: all that is asked of them is DLPack or `__cuda_array_interface__`. Results go into
arrays of the caller. Work is queued on `stream`, which is any object with `__cuda_stream__` (of CuPy, PyTorch,
cuda.core …); the default is the legacy default stream, on which CuPy and PyTorch work by default as well. The arrays'
device becomes the current one. All functions raise TypeError for arrays that they cannot use: of the host, of another
dtype or shape, on two devices, not C-contiguous, or read-only where a result goes.

Nothing of CUDA is imported before the first call.
"""

from __future__ import annotations

from ctypes import c_int, c_longlong
from typing import TYPE_CHECKING, TypeVar

from ._cuda_aot import get_kernel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cuda.core.typing import IsStreamType

__all__ = ["axpy", "block_sum", "histogram", "set_bins", "softmax"]

Array = TypeVar("Array")

# Kernels by the dtype of their arrays.
AXPY = {"float32": "axpy<float>", "float64": "axpy<double>", "float16": "axpy<__half>"}
BLOCK_SUM = {"float32": "block_sum<float, 256>", "float64": "block_sum<double, 256>"}
SOFTMAX = {"float32": "softmax<float>", "float16": "softmax<__half>", "bfloat16": "softmax<__nv_bfloat16>"}
HISTOGRAM = {"uint8": "histogram"}


def axpy(a: float, x: object, y: Array, *, stream: IsStreamType | None = None) -> Array:
    """Set `y` to `a * x + y`, element by element, and return it.

    `x` and `y` have the same shape and the same dtype: float32, float64 or float16 (computed in float32).
    """
    from ._arrays import Call

    call = Call(stream)
    source = call.view("x", x, AXPY)
    target = call.view("y", y, AXPY, written=True)
    source.must_match(target)
    if target.size:
        kernel = get_kernel(AXPY[target.dtype], device=call.device_id)
        call.launch(
            kernel, _blocks(target.size, 256), 256, target.scalar(a), source.ptr, target.ptr, c_longlong(target.size)
        )
    return y


def block_sum(x: object, out: Array, *, stream: IsStreamType | None = None) -> Array:
    """Sum all elements of `x` into the only element of `out`, and return `out`.

    Both are float32 or both float64. The same input gives the same bits on every run. The sum of nothing is 0.
    """
    from ._arrays import Call

    call = Call(stream)
    source = call.view("x", x, BLOCK_SUM)
    total = call.view("out", out, BLOCK_SUM, written=True)
    total.must_be(source.dtype, size=1)
    blocks = _blocks(source.size, 256, most=1024)
    kernel = get_kernel(BLOCK_SUM[source.dtype], device=call.device_id)
    with call.scratch(blocks * source.itemsize) as sums:
        call.launch(kernel, blocks, 256, source.ptr, c_longlong(source.size), sums)
        call.launch(kernel, 1, 256, sums, c_longlong(blocks), total.ptr)
    return out


def softmax(x: Array, out: Array | None = None, *, stream: IsStreamType | None = None) -> Array:
    """Write the softmax over the last axis of `x` into `out`, and return `out`. Without `out`, `x` is overwritten.

    `x` has one or more dimensions and dtype float32, float16 or bfloat16 (computed in float32), `out` the same.
    """
    from ._arrays import Call

    out = x if out is None else out
    call = Call(stream)
    source = call.view("x", x, SOFTMAX)
    target = call.view("out", out, SOFTMAX, written=True)
    source.must_match(target)
    if not source.shape:
        raise TypeError("x: softmax needs one or more dimensions, this array has none")
    if source.size:
        cols = source.shape[-1]
        rows = source.size // cols
        kernel = get_kernel(SOFTMAX[source.dtype], device=call.device_id)
        call.launch(kernel, _blocks(rows, 4), 128, source.ptr, target.ptr, c_longlong(rows), c_longlong(cols))
    return out


def histogram(data: object, out: Array, *, stream: IsStreamType | None = None) -> Array:
    """Count the bytes of `data` by bin into `out`, and return `out`.

    `data` is uint8 of any shape, `out` uint32 with one element for each bin, 1 to 256. Byte `b` is in bin `b`, or where
    `set_bins` puts it; bytes of bins that `out` does not have are not counted.
    """
    from ._arrays import Call

    call = Call(stream)
    source = call.view("data", data, HISTOGRAM)
    counts = call.view("out", out, ["uint32"], written=True)
    if not 1 <= counts.size <= 256:
        raise TypeError(f"out: shape {counts.shape} has {counts.size} elements; one for each bin is needed, 1 to 256")
    call.zero(counts)
    if source.size:
        kernel = get_kernel(HISTOGRAM[source.dtype], device=call.device_id)
        blocks = _blocks(source.size, 256, most=1024)
        call.launch(kernel, blocks, 256, source.ptr, c_longlong(source.size), counts.ptr, c_int(counts.size))
    return out


def set_bins(bin_of: Iterable[int], *, device: int | None = None) -> None:
    """Say into which bin `histogram` puts each of the 256 byte values, on one device, the current one by default.

    `bin_of` has 256 elements of 0 to 255; `range(256)` is the table to begin with. Raises ValueError for any other.
    """
    from ._arrays import write_constant

    table = bytes(iter(bin_of))
    if len(table) != 256:
        raise ValueError(f"bin_of: {len(table)} bins; one for each of the 256 byte values is needed")
    write_constant(get_kernel("histogram", device=device), "bin_of", table, device)


def _blocks(items: int, items_per_block: int, *, most: int = 65536) -> int:
    """How many blocks to launch. The kernels' loops take what is left where there are more items than threads."""
    return max(1, min(-(-items // items_per_block), most))
