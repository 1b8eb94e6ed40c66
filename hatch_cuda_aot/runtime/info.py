"""What the public functions say of kernels and variables, as values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .manifest import Image, Param

__all__ = ["GlobalAddress", "KernelInfo"]


class GlobalAddress(NamedTuple):
    """Where a variable lies in the memory of a device.

    Attributes:
        address: as a CUdeviceptr.
        size: in bytes.

    """

    address: int
    size: int


class KernelInfo(NamedTuple):
    """What is known of a kernel.

    Attributes:
        name: canonical name.
        module: the module that defines it.
        symbol: its name in the images.
        params: its parameters in order, each with `kind`, `size` and `offset` in bytes.
        policy: launch metadata of the package's authors.
        resources: architecture of each image that holds it -> registers per thread, and bytes of shared memory, local
            memory and spills; empty for PTX.
        image: the image that is loaded on the device which was asked about, with its `arch`, `kind` and `file`; None
            where no device was given.

    """

    name: str
    module: str
    symbol: str
    params: tuple[Param, ...]
    policy: Mapping[str, Any]
    resources: Mapping[str, Mapping[str, int]]
    image: Image | None = None
