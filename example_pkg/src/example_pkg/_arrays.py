"""Arrays of any GPU library as pointers that a kernel can take, checked. Knows nothing of the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.bindings import driver
from cuda.core import LEGACY_DEFAULT_STREAM, Buffer, Device, Kernel, LaunchConfig, Stream, launch
from cuda.core.utils import StridedMemoryView

if TYPE_CHECKING:
    from collections.abc import Collection

    from cuda.core.typing import IsStreamType

DLPACK_CPU = 1


class Call:
    """One call of a function: its stream, and the device on which all its arrays are."""

    def __init__(self, stream: IsStreamType | None) -> None:
        handle = 0 if stream is None else stream.__cuda_stream__()[1]
        self.stream = Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM
        self.device_id = -1

    def view(self, name: str, array: object, dtypes: Collection[str], *, written: bool = False) -> View:
        """View an array of the GPU, ordered after the work that its library has queued on it.

        Raises TypeError, which says why, for one that a kernel cannot take or whose dtype is not in `dtypes`.
        """
        strided = _strided_view(name, array, int(self.stream.handle))
        view = View(name, strided.ptr, strided.shape, _dtype_name(strided, array), strided)
        if view.dtype not in dtypes:
            raise TypeError(f"{name}: dtype {view.dtype} is not supported; these are: {', '.join(dtypes)}")
        if not _is_contiguous(strided.shape, strided.strides):
            raise TypeError(
                f"{name}: not C-contiguous: shape {strided.shape} has strides {strided.strides}; pass a contiguous copy"
            )
        if written and strided.readonly:
            raise TypeError(f"{name}: read-only, and the result goes here; pass a writable copy")
        if self.device_id == -1:
            self.device_id = strided.device_id
            Device(self.device_id).set_current()
        if strided.device_id != self.device_id:
            raise TypeError(f"{name}: on device {strided.device_id}, but the array before it is on {self.device_id}")
        return view

    def scratch(self, size: int) -> Buffer:
        """Memory of `size` bytes. Closing it frees it once the stream has come that far."""
        return Device(self.device_id).allocate(size, stream=self.stream)

    def zero(self, view: View) -> None:
        Buffer.from_handle(view.ptr, view.size * view.itemsize, owner=view.strided).fill(0, stream=self.stream)

    def launch(self, kernel: Kernel, grid: int, block: int, *args: object) -> None:
        """Launch. Scalars must come in the very type of the parameter: a Python float would be passed as a double."""
        launch(self.stream, LaunchConfig(grid=grid, block=block), kernel, *args)


@dataclass(frozen=True)
class View:
    """A C-contiguous array on a GPU."""

    name: str
    ptr: int
    shape: tuple[int, ...]
    dtype: str
    strided: StridedMemoryView
    """Keeps the array, and the view on it, alive."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def scalar(self, value: float) -> np.generic:
        """`value` in the array's own dtype, as a kernel parameter of that type needs it."""
        scalar: np.generic = np.dtype(self.dtype).type(value)
        return scalar

    def must_match(self, other: View) -> None:
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            raise TypeError(
                f"{self.name} and {other.name} differ: shape {self.shape} of {self.dtype}, "
                f"shape {other.shape} of {other.dtype}; the same is needed"
            )

    def must_be(self, dtype: str, *, size: int) -> None:
        if (self.dtype, self.size) != (dtype, size):
            raise TypeError(
                f"{self.name}: {self.size} elements of {self.dtype} (shape {self.shape}); {size} of {dtype} is needed"
            )


def write_constant(kernel: Kernel, name: str, value: bytes, device_id: int | None) -> None:
    """Write a `__constant__` variable that stands next to `kernel`: in the same source file, on one device.

    It waits for work on the default stream. Raises RuntimeError if there is no such variable of that size.
    """
    Device(device_id).set_current()
    library = _check(driver.cuKernelGetLibrary(kernel.handle))
    address, size = _check(driver.cuLibraryGetGlobal(library, name.encode()))
    if size != len(value):
        raise RuntimeError(f"{name} has {size} bytes, not {len(value)}")
    _check(driver.cuMemcpyHtoD(address, value, size))


def _strided_view(name: str, array: object, stream: int) -> StridedMemoryView:
    kind = f"{type(array).__module__}.{type(array).__qualname__}"
    device = getattr(array, "__dlpack_device__", None)
    if device is None and not hasattr(array, "__cuda_array_interface__"):
        raise TypeError(f"{name}: {kind} is no GPU array: it has neither DLPack nor __cuda_array_interface__")
    if device is not None and device()[0] == DLPACK_CPU:
        raise TypeError(
            f"{name}: {kind} is in host memory; copy it to the GPU first, "
            "for example with cupy.asarray(...) or torch.as_tensor(..., device='cuda')"
        )
    try:
        return StridedMemoryView.from_any_interface(array, stream)
    except BufferError as error:
        raise TypeError(f"{name}: {kind} cannot be viewed: {error}") from error


def _dtype_name(strided: StridedMemoryView, array: object) -> str:
    try:
        return str(strided.dtype)
    except (NotImplementedError, TypeError):  # NumPy has no bfloat16 and the like, unless ml_dtypes is installed
        return str(getattr(array, "dtype", "unknown")).removeprefix("torch.")


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    """Whether strides, in elements, are those of a C-contiguous array. None stands for just that."""
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides or ()), strict=False):
        if extent > 1 and stride != expected:
            return 0 in shape
        expected *= extent
    return True


def _check(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver answered {error.name}")
    return values[0] if len(values) == 1 else values
