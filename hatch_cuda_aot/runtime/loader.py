"""Finds kernels: from a name and a device to a kernel that is loaded, or to what is known of it.

What was loaded once is found again by one dict lookup, without a lock.  Modules that only some calls need (cuda.core,
reports, threads in the background …) are imported by those.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from .arch import parse_cc
from .device import Driver, install_hint, ordinal_of, peek_ordinal, starting
from .errors import (
    CudaAotError,
    CudaUnavailableError,
    KernelNotFoundError,
    ManifestError,
    NoCompatibleImageError,
)
from .libraries import Libraries, force_ptx
from .manifest import Kernel, Manifest
from .once import Once
from .select import CHOSEN, DeviceFacts, is_tegra, rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from .info import GlobalAddress, KernelInfo
    from .libraries import LoadedKernel
    from .manifest import ModuleManifest
    from .report import Report
    from .select import Candidate

__all__ = ["Loader"]


class Loader:
    """The kernels of one package.

    Making one touches neither files nor CUDA.  Every method may be called from any thread.
    """

    def __init__(self, folder: str, package: str, open_driver: Callable[[str], Driver] = Driver) -> None:
        """Load kernels from `folder` for `package`, whose name the messages and the logger use."""
        self.folder = folder
        self.package = package
        self._open_driver = open_driver
        self._once = Once()
        self._manifest: Manifest | None = None
        self._libraries: Libraries | None = None
        self._current: Callable[[], int] = _not_started
        self._loaded: dict[tuple[str, int], LoadedKernel] = {}
        self._kernels: dict[tuple[str, int], Any] = {}

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
            module, kernel = self._find(name)
            libraries = self.libraries
            facts = libraries.driver.facts(self._current_ordinal() if ordinal is None else ordinal)
            loaded = libraries.kernel(module, kernel, facts)
            loaded = self._loaded.setdefault((name, loaded.device), loaded)
        return loaded

    def preload(self, names: str | Iterable[str] | None = None, device: object = None) -> Future[None]:
        """Have the kernels `names`, or all of them, loaded in the background."""
        from .background import in_background

        ordinal = ordinal_of(device)
        if ordinal is None:  # a thread in the background has no current device
            ordinal = peek_ordinal(self.package)
        wanted = [names] if isinstance(names, str) else None if names is None else list(names)
        return in_background(lambda: self._preloads(wanted, ordinal))

    def get_global(self, name: str, device: object = None) -> GlobalAddress:
        """Return where the variable `name` lies on `device`, in the library of its module's best image."""
        from .info import GlobalAddress

        module, variable = self.manifest.find_variable(name)
        return GlobalAddress(*self.libraries.variable(module, variable, self._facts(device)))

    def kernel_names(self) -> list[str]:
        """Return the name of every kernel, sorted."""
        return self.manifest.kernel_names()

    def kernel_info(self, name: str, device: object = None) -> KernelInfo:
        """Return what is known of the kernel `name`, with the image that `device` loads if one is given."""
        from .info import KernelInfo

        module, kernel = self._find(name)
        resources = {
            str(image.arch): image.kernels[kernel.name]
            for image in sorted(module.images, key=lambda image: image.arch)
            if kernel.name in image.kernels
        }
        image = None
        if device is not None:
            candidates = self._rank(module, self._facts(device), kernel.name)
            fits = kernel.symbol and candidates and candidates[0].verdict == CHOSEN
            image = candidates[0].image if fits else self.load(name, device).image
        if not kernel.symbol:
            kernel = self.load(name, device).kernel
        return KernelInfo(kernel.name, module.name, kernel.symbol, kernel.params, kernel.policy, resources, image)

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
        from .report import Report

        facts = self._facts(device, cc=cc, driver=driver, tegra=tegra)
        if name is None:
            modules, kernel = [self.manifest.module(module) for module in sorted(self.manifest.modules)], None
        else:
            module, found = self._find(name)
            modules, kernel = [module], found.name
        ranked = [(module, self._rank(module, facts, kernel, complete=True)) for module in modules]
        return Report.of(facts, kernel, ranked)

    @property
    def manifest(self) -> Manifest:
        """The index, read at the first use."""
        return self._manifest or self._once.get("manifest", self._read_manifest)

    @property
    def libraries(self) -> Libraries:
        """What is loaded; the driver is opened at the first use."""
        return self._libraries or self._once.get("libraries", self._open)

    @property
    def driver(self) -> Driver:
        """The driver, opened at the first use."""
        return self.libraries.driver

    def _open(self) -> Libraries:
        self._libraries = Libraries(self.folder, self.package, self._open_driver(self.package))
        return self._libraries

    def _find(self, name: str) -> tuple[ModuleManifest, Kernel]:
        """Return the kernel `name` and its module; without a symbol where it must be compiled from the package's source."""
        try:
            return self.manifest.find(name)
        except KernelNotFoundError as error:
            if error.ambiguous:
                raise
            from .source import module_of_template

            found = module_of_template(self.manifest, name)
            if found is None:
                raise
            module, expression = found
            return module, Kernel(expression, "")

    def _preloads(self, names: list[str] | None, ordinal: int) -> list[Callable[[], None]]:
        """Return the loads of the kernels `names`, or of all, as one function for each module."""
        # Where all are asked for, those that are meant for other GPUs are no error.
        passed_over: tuple[type[Exception], ...] = (NoCompatibleImageError,) if names is None else ()
        by_module: dict[str, list[str]] = {}
        for name in self.manifest.kernel_names() if names is None else names:
            owner = self.manifest.kernels.get(name)
            by_module.setdefault(owner if isinstance(owner, str) else name, []).append(name)

        def load_each(group: list[str]) -> None:
            errors = []
            for name in group:
                try:
                    self.load(name, ordinal)
                except passed_over:
                    continue
                except CudaAotError as error:
                    errors.append(error)
            if errors:
                raise errors[0]

        return [partial(load_each, group) for group in by_module.values()]

    def _rank(
        self, module: ModuleManifest, device: DeviceFacts, kernel: str | None, *, complete: bool = False
    ) -> list[Candidate]:
        """Return the module's images ranked for `device`, which may be one that is not there."""
        if device.ordinal is None:
            return rank(module.images, device, kernel=kernel, force_ptx=force_ptx())
        return self.libraries.rank(module, device, kernel, complete=complete)

    def _wrap(self, name: str, device: object) -> Any:
        ordinal = ordinal_of(device)
        kernel = None if ordinal is None else self._kernels.get((name, ordinal))
        if kernel is None:
            self._find(name)  # whether it exists depends on nothing that is imported or started
            core = self._import_core()
            loaded = self.load(name, ordinal)
            if isinstance(core, ImportError):
                message = (
                    f"get_kernel needs cuda.core ({core}); get_handle does without it:\n{install_hint(self.package)}"
                )
                raise CudaUnavailableError(message, "core-missing") from core
            kernel = self._kernels.setdefault((name, loaded.device), core.Kernel.from_handle(loaded.handle))
        return kernel

    def _import_core(self) -> Any:
        """Return cuda.core, or the error of importing it; that takes as long as starting CUDA, so both go side by side."""
        try:
            if "cuda.core" in sys.modules or self._libraries is not None:
                return importlib.import_module("cuda.core")
            with starting(self.package):
                return importlib.import_module("cuda.core")
        except ImportError as error:
            return error

    def _current_ordinal(self) -> int:
        """Return the current device, and have the driver asked for it directly from now on."""
        self._current = self.driver.current_ordinal
        return self._current()

    def _facts(
        self,
        device: object,
        *,
        cc: int | str | tuple[int, int] | None = None,
        driver: int | str | None = None,
        tegra: bool | None = None,
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
        manifest = Manifest.read(self.folder)
        if manifest.tree is not None:
            from .editable import up_to_date

            manifest = up_to_date(manifest, f"{self.package}.cuda_aot")
        self._manifest = manifest
        return manifest


def _not_started() -> int:
    """Stand in for the current device until the driver is open: no device has this number, so every look-up misses."""
    return -1


def _cuda_version(value: int | str) -> int:
    """Return ``12040`` for ``"12.4"`` and for ``12040``."""
    if isinstance(value, int):
        return value
    major, _, minor = value.partition(".")
    if not major.isdecimal() or not (minor or "0").isdecimal():
        message = f"{value!r} is not a CUDA version of a driver: expected one like '12.4' or 12040"
        raise ValueError(message)
    return int(major) * 1000 + int(minor or 0) * 10
