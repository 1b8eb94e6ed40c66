"""Loads kernels: from a name to bytes on disk, verified, to a CUlibrary, to a kernel bound to a device.

Each image is read and loaded once per process and then kept until it ends; each kernel is resolved and bound at once,
so that an image which does not run here shows in `load` and never at a launch.  What was loaded is found again by one
dict lookup, without a lock.  Modules that only some calls need (hashlib, logging, cuda.core …) are imported by those.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from .arch import parse_cc
from .device import Driver, DriverError, install_hint, ordinal_of
from .errors import CorruptImageError, CudaUnavailableError, ManifestError, NoCompatibleImageError
from .jit import compile_ptx
from .manifest import Manifest
from .select import CHOSEN, DeviceFacts, advise, is_tegra, rank

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from .manifest import Image, Kernel, ModuleManifest, Param
    from .report import Report
    from .select import Candidate

__all__ = ["FORCE_PTX", "KernelInfo", "LoadedKernel", "Loader"]

#: Environment variable: set to anything but 0, machine code is passed over and PTX compiled.
FORCE_PTX = "CUDA_AOT_FORCE_PTX"


class LoadedKernel(NamedTuple):
    """A kernel that is ready to launch on a device.

    Attributes:
        kernel: its entry in the manifest.
        module: its module.
        device: the number of the device.
        image: the image that it came from.
        library: the CUlibrary, as an int.
        handle: the CUkernel, as an int.

    """

    kernel: Kernel
    module: str
    device: int
    image: Image
    library: int
    handle: int


class KernelInfo(NamedTuple):
    """What the manifest says of a kernel.

    Attributes:
        name: canonical name.
        module: the module that defines it.
        symbol: its name in the images.
        params: its parameters in order, each with `kind`, `size` and `offset` in bytes.
        policy: launch metadata of the package's authors.
        resources: architecture of each image that holds it -> registers per thread, and bytes of shared memory, local
            memory and spills; empty for PTX.

    """

    name: str
    module: str
    symbol: str
    params: tuple[Param, ...]
    policy: Mapping[str, Any]
    resources: Mapping[str, Mapping[str, int]]


class Loader:
    """The kernels of one package.

    Making one touches neither files nor CUDA.  Every method may be called from any thread.
    """

    def __init__(self, folder: str, package: str, open_driver: Callable[[str], Driver] = Driver) -> None:
        """Load kernels from `folder` for `package`, whose name the messages and the logger use."""
        self.folder = folder
        self.package = package
        self.logger = f"{package}.cuda_aot"
        self._open_driver = open_driver
        self._once = _Once()
        self._current: Callable[[], int] = _not_started
        self._loaded: dict[tuple[str, int], LoadedKernel] = {}
        self._kernels: dict[tuple[str, int], Any] = {}
        self._refused: dict[tuple[str, int], dict[str, str]] = {}

    def get_kernel(self, name: str, device: object = None) -> Any:
        """Return the kernel as a ``cuda.core.Kernel``; see `load` for the rest."""
        ordinal: Any = self._current() if device is None else device
        try:
            return self._kernels[name, ordinal]  # misses where `device` is an object, which `_wrap` then looks into
        except (KeyError, TypeError):
            return self._wrap(name, device)

    def get_handle(self, name: str, device: object = None) -> int:
        """Return the kernel as a CUkernel, without importing cuda.core; see `load` for the rest."""
        ordinal: Any = self._current() if device is None else device
        try:
            return self._loaded[name, ordinal].handle
        except (KeyError, TypeError):
            return self.load(name, device).handle

    def load(self, name: str, device: object = None) -> LoadedKernel:
        """Return the kernel `name`, loaded from the best image for `device` and bound to it.

        Raises:
            KernelNotFoundError: if no kernel, or more than one, has that name.
            NoCompatibleImageError: if none of its images runs on the device.
            CorruptImageError: if the file of the image is not the one that was built.
            ManifestError: if the manifest is missing or wrong.
            CudaUnavailableError: if CUDA cannot be used.

        """
        ordinal = ordinal_of(device)
        loaded = None if ordinal is None else self._loaded.get((name, ordinal))
        if loaded is None:
            # The name first: whether it exists depends on no device.
            module, kernel = self.manifest.find(name)
            facts = self.driver.facts(self._current_ordinal() if ordinal is None else ordinal)
            loaded = self._load(module, kernel, facts)
            loaded = self._loaded.setdefault((name, loaded.device), loaded)
        return loaded

    def kernel_names(self) -> list[str]:
        """Return the name of every kernel, sorted."""
        return self.manifest.kernel_names()

    def kernel_info(self, name: str) -> KernelInfo:
        """Return what the manifest says of the kernel `name`."""
        module, kernel = self.manifest.find(name)
        resources = {
            str(image.arch): image.kernels[kernel.name]
            for image in sorted(module.images, key=lambda image: image.arch)
            if kernel.name in image.kernels
        }
        return KernelInfo(kernel.name, module.name, kernel.symbol, kernel.params, kernel.policy, resources)

    def explain(
        self,
        name: str | None = None,
        device: object = None,
        *,
        cc: int | str | tuple[int, int] | None = None,
        driver: int | str | None = None,
        tegra: bool | None = None,
    ) -> Report:
        """Return every image with its verdict, for a device that is there or, with `cc`, for any."""
        facts = self._facts(device, cc=cc, driver=driver, tegra=tegra)
        if name is None:
            modules, kernel = [self.manifest.module(module) for module in sorted(self.manifest.modules)], None
        else:
            module, found = self.manifest.find(name)
            modules, kernel = [module], found.name
        return _report(facts, kernel, [(module.name, self._rank(module, facts, kernel)) for module in modules])

    @property
    def manifest(self) -> Manifest:
        """The index, read at the first use."""
        manifest: Manifest = self._once.get("manifest", self._read_manifest)
        return manifest

    @property
    def driver(self) -> Driver:
        """The driver, opened at the first use."""
        driver: Driver = self._once.get("driver", lambda: self._open_driver(self.package))
        return driver

    def _load(self, module: ModuleManifest, kernel: Kernel, device: DeviceFacts) -> LoadedKernel:
        refused = self._refused.setdefault((module.name, device.ordinal or 0), {})
        while True:
            candidates = self._rank(module, device, kernel.name)
            if not candidates or candidates[0].verdict != CHOSEN:
                raise self._none_fits(module, kernel, device, candidates)
            image = candidates[0].image
            try:
                library, handle = self._resolve(module, image, kernel, device)
            except DriverError as error:
                if not error.refusal:
                    raise self._failed(module, image, kernel, error) from error
                refused[image.file] = f"the driver refused it: {error}"
                self._warn(image, error)
            else:
                return LoadedKernel(kernel, module.name, device.ordinal or 0, image, library, handle)

    def _resolve(self, module: ModuleManifest, image: Image, kernel: Kernel, device: DeviceFacts) -> tuple[int, int]:
        """Return the CUlibrary of `image` and the CUkernel in it, bound to `device`."""
        driver = self.driver
        key = (module.name, image.file, device.cc if image.arch.virtual else None)
        library = self._once.get(key, lambda: self._load_library(image, device))
        # cuLibraryLoadData accepts anything; what is wrong with an image shows in the next two calls, and what is wrong
        # for this device among several only in the second, which binds the kernel to it and needs no context.
        handle = driver.call("cuLibraryGetKernel", library, kernel.symbol.encode())
        attribute = driver.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        driver.call("cuKernelGetAttribute", attribute, handle, driver.call("cuDeviceGet", device.ordinal))
        return int(library), int(handle)

    def _load_library(self, image: Image, device: DeviceFacts) -> Any:
        code = self._read(image)
        if image.arch.virtual:
            code = compile_ptx(self.driver, code, device, label=image.file, logger=self.logger)
        return self.driver.call("cuLibraryLoadData", code, [], [], 0, [], [], 0)

    def _read(self, image: Image) -> bytes:
        """Return the content of the image's file, verified.

        The driver takes a cubin that was cut off without a word, or crashes on it.  Damage ends here and never leads to
        another image: it would turn into a slow start that nobody can explain.
        """
        from hashlib import sha256

        path = os.path.join(self.folder, image.file)
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError as error:
            raise self._corrupt(path, f"{image.size} bytes", error.strerror or str(error)) from error
        if len(content) != image.size:
            raise self._corrupt(path, f"{image.size} bytes", f"{len(content)} bytes")
        digest = sha256(content).hexdigest()
        if digest != image.sha256:
            raise self._corrupt(path, f"SHA-256 {image.sha256}", f"SHA-256 {digest}")
        return content

    def _rank(self, module: ModuleManifest, device: DeviceFacts, kernel: str | None) -> list[Candidate]:
        force_ptx = os.environ.get(FORCE_PTX, "0") not in {"", "0"}
        refused = None if device.ordinal is None else self._refused.get((module.name, device.ordinal))
        return rank(module.images, device, kernel=kernel, force_ptx=force_ptx, refused=refused)

    def _wrap(self, name: str, device: object) -> Any:
        ordinal = ordinal_of(device)
        kernel = None if ordinal is None else self._kernels.get((name, ordinal))
        if kernel is None:
            loaded = self.load(name, ordinal)
            try:
                from cuda.core import Kernel as CoreKernel
            except ImportError as error:
                message = (
                    f"get_kernel needs cuda.core ({error}); get_handle does without it:\n{install_hint(self.package)}"
                )
                raise CudaUnavailableError(message, "core-missing") from error
            kernel = self._kernels.setdefault((name, loaded.device), CoreKernel.from_handle(loaded.handle))
        return kernel

    def _current_ordinal(self) -> int:
        """Return the current device, and have the driver asked for it directly from now on."""
        self._current = self.driver.current_ordinal
        return self._current()

    def _facts(
        self, device: object, *, cc: int | str | tuple[int, int] | None, driver: int | str | None, tegra: bool | None
    ) -> DeviceFacts:
        version = None if driver is None else _cuda_version(driver)
        if cc is not None:
            if device is not None:
                message = "explain() takes device or cc, not both"
                raise TypeError(message)
            number = parse_cc(cc)
            return DeviceFacts(number, version, is_tegra(number) if tegra is None else tegra)
        ordinal = ordinal_of(device)
        facts = self.driver.facts(self._current_ordinal() if ordinal is None else ordinal)
        if version is None and tegra is None:
            return facts
        # With other facts than its own it is another device, on which nothing was refused yet.
        return facts._replace(
            driver=facts.driver if version is None else version,
            tegra=facts.tegra if tegra is None else tegra,
            ordinal=None,
        )

    def _read_manifest(self) -> Manifest:
        if not os.path.isdir(self.folder):
            message = (
                f"{self.folder} is no folder: kernels are loaded from files, and {self.package} runs from a zip "
                "archive; install it unpacked"
            )
            raise ManifestError(message, self.folder)
        return Manifest.read(self.folder)

    def _none_fits(
        self, module: ModuleManifest, kernel: Kernel, device: DeviceFacts, candidates: list[Candidate]
    ) -> NoCompatibleImageError:
        report = _report(device, kernel.name, [(module.name, candidates)])
        advice = advise(candidates, device, self.package)
        lines = [f"no image of the kernel {kernel.name!r} runs on {device}:", *report.table(), *advice]
        return NoCompatibleImageError("\n".join(lines), kernel.name, report, advice)

    def _failed(self, module: ModuleManifest, image: Image, kernel: Kernel, error: DriverError) -> Exception:
        if error.not_found:
            path = module.path
            message = (
                f"{path} says that {image.file} holds {kernel.name!r} as {kernel.symbol}, and the driver does not find "
                f"it there: files of two builds are mixed; reinstall {self.package}"
            )
            return ManifestError(message, path)
        message = f"the NVIDIA driver failed while {image.file} was loaded: {error}"
        return CudaUnavailableError(message, "driver-error", error.status)

    def _corrupt(self, path: str, expected: str, actual: str) -> CorruptImageError:
        message = f"{path} is damaged: expected {expected}, found {actual}; reinstall {self.package}"
        return CorruptImageError(message, path, expected, actual)

    def _warn(self, image: Image, error: DriverError) -> None:
        import logging

        logging.getLogger(self.logger).warning("the driver refused %s, trying the next image: %s", image.file, error)


class _Once:
    """Values that are made once per key, by the first thread that asks, while others that ask for the same wait."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._locks: dict[Hashable, threading.Lock] = {}
        self._guard = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of `key`, from `make` the first time; where `make` raises, the next call tries again."""
        try:
            return self._values[key]
        except KeyError:
            pass
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._values:
                self._values[key] = make()
            return self._values[key]


def _not_started() -> int:
    """Stand in for the current device until the driver is open: no device has this number, so every look-up misses."""
    return -1


def _report(device: DeviceFacts, kernel: str | None, modules: list[tuple[str, list[Candidate]]]) -> Report:
    from .report import Report, Row

    rows = tuple(Row.of(module, candidate) for module, candidates in modules for candidate in candidates)
    return Report(device, rows, kernel)


def _cuda_version(value: int | str) -> int:
    """Return ``12040`` for ``"12.4"`` and for ``12040``."""
    if isinstance(value, int):
        return value
    major, _, minor = value.partition(".")
    if not major.isdecimal() or not (minor or "0").isdecimal():
        message = f"{value!r} is not a CUDA version of a driver: expected one like '12.4' or 12040"
        raise ValueError(message)
    return int(major) * 1000 + int(minor or 0) * 10
