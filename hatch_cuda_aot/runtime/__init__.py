"""The compiled CUDA kernels of this package.

`get_kernel` returns a kernel that is ready to launch: the image that fits the device and its driver is chosen, verified
and loaded at the first call, and found again in a microsecond after that.  Importing this module needs the standard
library alone and touches no CUDA; what is missing is said by the call that needs it.
"""

from __future__ import annotations

import os

from .errors import (
    CorruptImageError,
    CudaAotError,
    CudaUnavailableError,
    KernelNotFoundError,
    ManifestError,
    NoCompatibleImageError,
    VariableNotFoundError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    from cuda.core import Kernel

    from .info import GlobalAddress, KernelInfo
    from .loader import Loader
    from .report import Report

__all__ = [
    "CorruptImageError",
    "CudaAotError",
    "CudaUnavailableError",
    "KernelNotFoundError",
    "ManifestError",
    "NoCompatibleImageError",
    "VariableNotFoundError",
    "explain",
    "get_global",
    "get_handle",
    "get_kernel",
    "kernel_info",
    "kernel_names",
    "preload",
]


def get_kernel(name: str, *, device: object = None) -> Kernel:
    """Return a kernel that is ready to launch with ``cuda.core.launch``.

    Args:
        name: the kernel's name as in the source (``scale``, ``ns::scale``, ``axpy<float>``; spacing between tokens is
            ignored), ``module:name``, or its symbol.
        device: an int, a ``cuda.core.Device``, a ``torch.device`` or a CuPy ``Device``; by default the device of the
            current context, or device 0 where there is none.

    Raises:
        KernelNotFoundError: if no kernel, or more than one, has that name.
        NoCompatibleImageError: if none of its images runs on the device.
        CorruptImageError: if the file of the image is not the one that was built.
        ManifestError: if the package was built without kernels, or its files are mixed up.
        CudaUnavailableError: if the Python packages, the driver or the device are missing.

    """
    return _loader().get_kernel(name, device)


def get_handle(name: str, *, device: object = None) -> int:
    """Return a kernel as the int value of its CUkernel, without importing cuda.core.

    Arguments and errors are those of `get_kernel`.  The handle is valid until the process ends, on every device of the
    same compute capability that it was asked for.
    """
    return _loader().get_handle(name, device)


def get_global(name: str, *, device: object = None) -> GlobalAddress:
    """Return where a ``__constant__`` or ``__device__`` variable lies in the memory of a device.

    The address is that of one context: the current one if it is of the device, else the device's primary context, which
    then stays active until the process ends.  It holds until that context is destroyed or reset.  Kernels of the module
    read the variable there; one that was compiled from the package's source has variables of its own.

    Args:
        name: the variable's name as in the source (``table``, ``ns::table``), ``module:name``, or its symbol.
        device: as in `get_kernel`.

    Returns:
        The address and the size in bytes, as a named tuple.

    Raises:
        VariableNotFoundError: if no variable, or more than one, has that name.
        NoCompatibleImageError: if no image of its module runs on the device.
        CorruptImageError: if the file of the image is not the one that was built.
        ManifestError: if the package was built without kernels, or its files are mixed up.
        CudaUnavailableError: if the Python packages, the driver or the device are missing.

    """
    return _loader().get_global(name, device)


def preload(names: str | Iterable[str] | None = None, *, device: object = None) -> Future[None]:
    """Start to load kernels in the background, and return at once.

    What is loaded for a kernel serves all kernels of its image.  `get_kernel` waits for a load under way and does not
    repeat it.  A process that ends drops what has not begun.

    Args:
        names: the kernels, as in `get_kernel`; by default every one that has an image for the device.
        device: as in `get_kernel`; by default the current device of the calling thread.

    Returns:
        A future that is done, with None, when the kernels are loaded; ``await asyncio.wrap_future(...)`` waits for it too.
        Its exception is the first that `get_kernel` would have raised; the other kernels are loaded all the same.

    """
    return _loader().preload(names, device)


def kernel_names() -> list[str]:
    """Return the name of every kernel, sorted; ``module:name`` where several modules define one name.

    Raises:
        ManifestError: if the package was built without kernels, or its files are mixed up.

    """
    return _loader().kernel_names()


def kernel_info(name: str, *, device: object = None) -> KernelInfo:
    """Return what is known of a kernel: symbol, parameters, policy, resources per architecture.

    Args:
        name: as in `get_kernel`.  One that must be compiled from the package's source is compiled to be known.
        device: as in `get_kernel`; where one is given, the image that is loaded there is said too.  Without it nothing of
            CUDA is touched.

    Raises:
        KernelNotFoundError: if no kernel, or more than one, has that name.
        NoCompatibleImageError: if none of its images runs on `device`.
        ManifestError: if the package was built without kernels, or its files are mixed up.
        CudaUnavailableError: if a device is given and CUDA cannot be used.

    """
    return _loader().kernel_info(name, device)


def explain(
    name: str | None = None,
    *,
    device: object = None,
    cc: int | str | tuple[int, int] | None = None,
    driver: int | str | None = None,
    tegra: bool | None = None,
) -> Report:
    """Return which image is loaded on a device, and why not the others; ``print(explain())`` shows a table.

    Args:
        name: a kernel, as in `get_kernel`; by default every module.
        device: the device, as in `get_kernel`.
        cc: the compute capability of a device that need not be there, such as ``(8, 7)``, ``"8.7"`` or ``87``; nothing
            of CUDA is touched then.
        driver: the CUDA version of a driver, such as ``"12.4"`` or ``12040``, in place of the one that is there; with
            `cc` the default is a driver that is new enough for every image.
        tegra: whether the device is a Tegra or Jetson; by default its compute capability tells.

    Raises:
        KernelNotFoundError: if no kernel, or more than one, has that name.
        ManifestError: if the package was built without kernels, or its files are mixed up.
        CudaUnavailableError: if no `cc` is given and there is no device to ask.

    """
    return _loader().explain(name, device, cc=cc, driver=driver, tegra=tegra)


#: Holds the one loader of this package, once it was needed; a dict, because its `setdefault` needs no lock.
_loaders: dict[str, Loader] = {}


def _loader() -> Loader:
    """Return the loader of this package's kernels."""
    return _loaders.get("") or _make_loader()


def _make_loader() -> Loader:
    from .loader import Loader

    package = (__package__ or __name__).rpartition(".")[0]
    return _loaders.setdefault("", Loader(os.path.dirname(os.path.abspath(__file__)), package))


if hasattr(os, "register_at_fork"):
    # In a forked process nothing that was loaded is valid, and another thread's locks would be held for ever.
    os.register_at_fork(after_in_child=_loaders.clear)
