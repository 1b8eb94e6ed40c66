"""Opens the CUDA driver through cuda.bindings and asks it what decides the choice of an image.

The one place that imports `cuda.bindings`, only when a `Driver` is made.  It works with cuda.bindings of the major
versions 12 and 13 and with drivers of CUDA 12.0 and newer; each way in which CUDA can be missing is an error of its
own.
"""

from __future__ import annotations

import importlib
import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from .arch import format_cuda
from .errors import CudaUnavailableError
from .select import DeviceFacts, is_tegra

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OLDEST_DRIVER", "Driver", "DriverError", "install_hint", "ordinal_of", "peek_ordinal", "starting"]

#: CUDA version of the oldest driver that the loader works with: 12.0 introduced cuLibrary and CUkernel.
OLDEST_DRIVER = 12000


class Driver:
    """The CUDA driver, initialised.

    Attributes:
        api: the module ``cuda.bindings.driver``.
        version: CUDA version of the driver (13000 for 13.0).

    """

    def __init__(self, package: str) -> None:
        """Initialise the driver on behalf of `package`, which the messages name.

        Raises:
            CudaUnavailableError: if cuda.bindings, the driver or every device is missing, the driver is older than
                CUDA 12.0, or the process was forked from one that had initialised CUDA.

        """
        self.api = _import_bindings(package)
        try:
            self.version = self._start()
            self._count: int = self.call("cuDeviceGetCount")
        except DriverError as error:
            raise _unavailable(error) from error
        self._facts: dict[int, DeviceFacts] = {}

    @property
    def build(self) -> str:
        """Return what tells this build of the driver from others of the same CUDA version; empty where nobody says."""
        try:
            with open(_KERNEL_MODULE, encoding="utf-8", errors="replace") as file:
                return file.readline().strip()
        except OSError:  # Windows, WSL, some sandboxes
            return ""

    def call(self, function: str, *arguments: object) -> Any:
        """Call a driver function and return its one result, or the tuple of them.

        Raises:
            DriverError: if the driver returns anything but CUDA_SUCCESS.

        """
        status, *results = getattr(self.api, function)(*arguments)
        if status:
            raise DriverError(function, int(status), status.name)
        return results[0] if len(results) == 1 else tuple(results)

    def kernel(self, library: Any, symbol: str, ordinal: int) -> int:
        """Return the CUkernel of `symbol` in a CUlibrary, bound to device `ordinal`.

        cuLibraryLoadData accepts anything; what is wrong with an image shows in the first call here.  Where there are
        several devices, what is wrong for this one shows only in the last, which binds the kernel to it and needs no
        context.

        Raises:
            DriverError: if the library has no such kernel, or nothing for this device.

        """
        handle = self.call("cuLibraryGetKernel", library, symbol.encode())
        if self._count > 1:
            registers = self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
            self.call("cuKernelGetAttribute", registers, handle, self.call("cuDeviceGet", ordinal))
        return int(handle)

    def current_ordinal(self) -> int:
        """Return the device of the calling thread's current context, or 0 where it has none."""
        # Without a context cuCtxGetDevice is an error, which compute-sanitizer would report.
        status, context = self.api.cuCtxGetCurrent()
        if status:
            raise _unavailable(DriverError("cuCtxGetCurrent", int(status), status.name))
        if not int(context):
            return 0
        status, device = self.api.cuCtxGetDevice()
        if status:
            raise _unavailable(DriverError("cuCtxGetDevice", int(status), status.name))
        return int(device)

    def facts(self, ordinal: int) -> DeviceFacts:
        """Return what the driver says of device `ordinal`.

        Raises:
            CudaUnavailableError: if this process sees no device of that number.

        """
        facts = self._facts.get(ordinal)
        if facts is None:
            try:
                facts = self._facts.setdefault(ordinal, self._ask(ordinal))
            except DriverError as error:
                raise _unavailable(error) from error
        return facts

    @contextmanager
    def context(self, ordinal: int, *, keep: bool = False) -> Iterator[None]:
        """Have a context of device `ordinal` current in the block, and everything as before after it.

        The current context is used where it is one of that device; else the device's primary context, which is pushed
        and, in the end, popped and released.  With `keep` a primary context that was not active stays so until the
        process ends, for the sake of memory in it that is handed out.
        """
        if int(self.call("cuCtxGetCurrent")) and int(self.call("cuCtxGetDevice")) == ordinal:
            yield
            return
        handle = self.call("cuDeviceGet", ordinal)
        if keep:
            _, active = self.call("cuDevicePrimaryCtxGetState", handle)
            keep = not active
        primary = self.call("cuDevicePrimaryCtxRetain", handle)
        try:
            self.call("cuCtxPushCurrent", primary)
            try:
                yield
            finally:
                self.call("cuCtxPopCurrent")
        finally:
            if not keep:
                self.call("cuDevicePrimaryCtxRelease", handle)

    def _start(self) -> int:
        try:
            self.call("cuInit", 0)
        except DriverError:
            raise
        except (RuntimeError, OSError) as error:
            # cuda.bindings found no libcuda; what it raises then depends on its version.
            message = (
                "no NVIDIA driver was found (libcuda.so.1 on Linux, nvcuda.dll on Windows): install one from "
                "https://www.nvidia.com/drivers, or give the container access to the host's (docker run --gpus all)"
            )
            raise CudaUnavailableError(message, "driver-missing") from error
        version: int = self.call("cuDriverGetVersion")
        if version < OLDEST_DRIVER:
            message = (
                f"the NVIDIA driver is of CUDA {format_cuda(version)}: kernels need one of CUDA "
                f"{format_cuda(OLDEST_DRIVER)} or newer (525 or newer on Linux, 527 on Windows)"
            )
            raise CudaUnavailableError(message, "driver-too-old")
        return version

    def _ask(self, ordinal: int) -> DeviceFacts:
        if not 0 <= ordinal < self._count:
            seen = "device 0 alone" if self._count == 1 else f"devices 0 to {self._count - 1}"
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            because = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
            message = f"there is no CUDA device {ordinal}: this process sees {seen}{because}"
            raise CudaUnavailableError(message, "device-out-of-range")
        device = self.call("cuDeviceGet", ordinal)
        attribute = self.api.CUdevice_attribute
        major = self.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = self.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        name: bytes = self.call("cuDeviceGetName", 256, device)
        # CU_DEVICE_ATTRIBUTE_INTEGRATED does not tell Tegra: since GB10 there are integrated GPUs that are none.
        cc = int(major) * 10 + int(minor)
        return DeviceFacts(cc, self.version, is_tegra(cc), ordinal, name.partition(b"\0")[0].decode(errors="replace"))


class DriverError(Exception):
    """A driver function returned an error.

    Attributes:
        function: the function.
        status: the CUresult.
        refusal: whether it speaks of the image alone, so that another image may still run.
        by: who returned it, in words.

    """

    by = "the driver"

    def __init__(self, function: str, status: int, name: str, detail: str = "") -> None:
        super().__init__(f"{name} ({status}) from {function}{f': {detail}' if detail else ''}")
        self.function = function
        self.status = status

    @property
    def refusal(self) -> bool:
        """Whether the image is to blame: of another architecture, or PTX that this driver cannot compile."""
        return self.status in _REFUSALS

    @property
    def not_found(self) -> bool:
        """Whether the image has no symbol of the name."""
        return self.status == _NOT_FOUND


@contextmanager
def starting(package: str) -> Iterator[None]:
    """Have CUDA initialised by another thread during the block.

    The driver takes a fifth of a second for that and needs no Python meanwhile.  What goes wrong is not said here: the
    `Driver` that is made after the block meets it again.
    """
    try:
        api = _import_bindings(package)
    except CudaUnavailableError:
        yield
        return

    def start() -> None:
        with suppress(RuntimeError, OSError):
            api.cuInit(0)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def peek_ordinal(package: str) -> int:
    """Return the device of the calling thread's current context, or 0 where it has none, without starting CUDA.

    Where CUDA cannot be used the answer is 0 as well: whoever starts it then is told why.
    """
    try:
        status, device = _import_bindings(package).cuCtxGetDevice()
    except (CudaUnavailableError, RuntimeError, OSError):
        return 0
    return 0 if status else int(device)


def ordinal_of(device: object) -> int | None:
    """Return the number of `device`; None means the current one.

    Args:
        device: an int, a ``cuda.core.Device``, a ``torch.device`` or a CuPy ``Device``.

    Raises:
        TypeError: if it is none of these.
        ValueError: if it is a ``torch.device`` of another kind.

    """
    if device is None:
        return None
    if hasattr(device, "__index__"):
        return int(device.__index__())
    if hasattr(device, "device_id"):  # cuda.core
        return int(device.device_id)
    if hasattr(device, "type") and hasattr(device, "index"):  # PyTorch
        if device.type != "cuda":
            message = f"{device!r} is no CUDA device"
            raise ValueError(message)
        return None if device.index is None else int(device.index)
    if hasattr(device, "id"):  # CuPy
        return int(device.id)
    message = f"device is {device!r}: expected an int, cuda.core.Device, torch.device, cupy.cuda.Device or None"
    raise TypeError(message)


def install_hint(package: str) -> str:
    """Return the lines that say how to get the Python packages that loading a kernel needs."""
    return (
        '    pip install "cuda-bindings" "cuda-core"\n'
        f"Authors of {package}: declare them in pyproject.toml, so that they come with the package:\n"
        "    [project]\n"
        '    dependencies = ["cuda-core", "cuda-bindings", "platformdirs"]'
    )


#: The kernel module's version stands here on Linux; that of libcuda is the same, or else tells by its CUDA version.
_KERNEL_MODULE = "/proc/driver/nvidia/version"

_NOT_INITIALIZED = 3
_NO_DEVICE = 100
_NOT_FOUND = 500

#: CUresult values that speak of the image alone.
_REFUSALS = frozenset(
    {
        200,  # INVALID_IMAGE
        209,  # NO_BINARY_FOR_GPU
        218,  # INVALID_PTX
        221,  # JIT_COMPILER_NOT_FOUND
        222,  # UNSUPPORTED_PTX_VERSION
        223,  # JIT_COMPILATION_DISABLED
    }
)


def _import_bindings(package: str) -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        message = f"{package} needs cuda.bindings to load its kernels ({error}):\n{install_hint(package)}"
        raise CudaUnavailableError(message, "bindings-missing") from error


def _unavailable(error: DriverError) -> CudaUnavailableError:
    if error.status == _NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        because = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
        message = f"the NVIDIA driver is there and sees no GPU{because} ({error})"
        return CudaUnavailableError(message, "no-device", error.status)
    if error.status == _NOT_INITIALIZED:
        message = (
            "CUDA cannot be used in this process: it was forked from one that had initialised CUDA already; start "
            f'workers with multiprocessing.set_start_method("spawn"), or fork before the first use of CUDA ({error})'
        )
        return CudaUnavailableError(message, "forked", error.status)
    return CudaUnavailableError(f"the NVIDIA driver failed: {error}", "driver-error", error.status)
