"""Loads kernels: from a name to bytes on disk, verified, to a CUlibrary, to a kernel bound to a device.

Each image is read and loaded once per process and then kept until it ends; each kernel is resolved and bound at once,
so that an image which does not run here shows in `load` and never at a launch.  What was loaded is found again by one
dict lookup, without a lock.  Modules that only some calls need (hashlib, logging, cuda.core …) are imported by those.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .arch import format_cc, format_cuda, parse_cc
from .device import Driver, DriverError, install_hint, ordinal_of, peek_ordinal
from .errors import (
    CorruptImageError,
    CudaAotError,
    CudaUnavailableError,
    KernelNotFoundError,
    ManifestError,
    NoCompatibleImageError,
)
from .jit import Recipe, compile_ptx, nvjitlink_version
from .jit_cache import JitCache
from .manifest import Image, Kernel, Manifest
from .select import CHOSEN, LOAD, NVJITLINK, USABLE, DeviceFacts, advise, exact, is_tegra, rank

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping
    from concurrent.futures import Future

    from .manifest import Global, ModuleManifest, Param
    from .report import Report
    from .select import Candidate
    from .source import Compiled

__all__ = ["FORCE_PTX", "GlobalAddress", "KernelInfo", "LoadedKernel", "Loader"]

_T = TypeVar("_T")

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
            module, kernel = self._find(name)
            facts = self.driver.facts(self._current_ordinal() if ordinal is None else ordinal)
            loaded = self._load(module, kernel, facts)
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
        module, variable = self.manifest.find_variable(name)
        facts = self._facts(device)

        def locate(candidate: Candidate) -> GlobalAddress:
            library = self._library(module, candidate, facts)
            with self.driver.context(facts.ordinal or 0, keep=True):
                address, size = self.driver.call("cuLibraryGetGlobal", library, variable.symbol.encode())
            return GlobalAddress(int(address), int(size))

        return self._first_that_loads(module, variable, facts, locate)[1]

    def kernel_names(self) -> list[str]:
        """Return the name of every kernel, sorted."""
        return self.manifest.kernel_names()

    def kernel_info(self, name: str, device: object = None) -> KernelInfo:
        """Return what is known of the kernel `name`, with the image that `device` loads if one is given."""
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
        facts = self._facts(device, cc=cc, driver=driver, tegra=tegra)
        if name is None:
            modules, kernel = [self.manifest.module(module) for module in sorted(self.manifest.modules)], None
        else:
            module, found = self._find(name)
            modules, kernel = [module], found.name
        ranked = [(module, self._rank(module, facts, kernel, complete=True)) for module in modules]
        return _report(facts, kernel, ranked)

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

    @property
    def jit_cache(self) -> JitCache:
        """The cache of what was compiled on this machine, as the environment said at the first use."""
        cache: JitCache = self._once.get("jit cache", lambda: JitCache.from_environment(self.logger))
        return cache

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

    def _load(self, module: ModuleManifest, kernel: Kernel, device: DeviceFacts) -> LoadedKernel:
        if not kernel.symbol:
            return self._load_from_source(module, kernel, device)

        def resolve(candidate: Candidate) -> tuple[int, int]:
            library = self._library(module, candidate, device)
            return int(library), self._bind(library, kernel.symbol, device)

        try:
            image, (library, handle) = self._first_that_loads(module, kernel, device, resolve)
        except NoCompatibleImageError as error:
            if module.source is None:
                raise
            return self._load_from_source(module, kernel, device, error)
        return LoadedKernel(kernel, module.name, device.ordinal or 0, image, library, handle)

    def _first_that_loads(
        self, module: ModuleManifest, wanted: Kernel | Global, device: DeviceFacts, load: Callable[[Candidate], _T]
    ) -> tuple[Image, _T]:
        """Return the best image that nobody refuses, with what `load` makes of it."""
        kernel = wanted.name if isinstance(wanted, Kernel) else None
        refused = self._refused.setdefault((module.name, device.ordinal or 0), {})
        while True:
            chosen = None if _force_ptx() else exact(module.images, device, kernel=kernel, refused=refused)
            if chosen is None:
                candidates = self._rank(module, device, kernel)
                if not candidates or candidates[0].verdict != CHOSEN:
                    raise self._none_fits(module, wanted, device, candidates)
                chosen = candidates[0]
            image = chosen.image
            try:
                return image, load(chosen)
            except DriverError as error:
                if not error.refusal:
                    raise self._failed(module, image, wanted, error) from error
                refused[image.file] = f"{error.by} refused it: {error}"
                self._warn(image, error)

    def _load_from_source(
        self,
        module: ModuleManifest,
        kernel: Kernel,
        device: DeviceFacts,
        no_image: NoCompatibleImageError | None = None,
    ) -> LoadedKernel:
        """Return `kernel`, compiled from the source in the package: a library of its own, with variables of its own.

        Args:
            module: its module, which has the source.
            kernel: what to compile.
            device: what to compile it for.
            no_image: why no image did, where the kernel was built.

        """
        from .source import SourceError, compile_kernel

        def make() -> tuple[Any, Compiled]:
            symbol = "" if "<" in kernel.name else kernel.symbol
            compiled = compile_kernel(
                self.folder, module, kernel.name, symbol, device, cache=self.jit_cache, logger=self.logger
            )
            code = compiled.code
            if compiled.arch.virtual:
                recipe = Recipe(f"driver of CUDA {format_cuda(self.driver.version)}", self.driver.build, device.cc)
                code = compile_ptx(self.driver, code, device, recipe, label=compiled.symbol, logger=self.logger)
            return self._load_code(code), compiled

        try:
            library, compiled = self._once.get((module.name, "source", kernel.name, device.cc), make)
            handle = self._bind(library, compiled.symbol, device)
        except (SourceError, DriverError) as error:
            if no_image is None:
                raise self._not_built(module, kernel, error) from error
            message = f"{no_image}\nIts source is in the package, and compiling it here failed: {error}"
            raise NoCompatibleImageError(message, no_image.name, no_image.report, no_image.advice) from error
        made = Kernel(kernel.name, compiled.symbol, compiled.params, kernel.policy)
        image = Image(compiled.arch, (module.source or {})["main"], kernels={kernel.name: {}})
        return LoadedKernel(made, module.name, device.ordinal or 0, image, int(library), handle)

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

    def _library(self, module: ModuleManifest, candidate: Candidate, device: DeviceFacts) -> Any:
        """Return the CUlibrary of the candidate's image."""
        image = candidate.image
        key = (module.name, image.file, device.cc if image.arch.virtual else None)
        return self._once.get(key, lambda: self._load_library(module, candidate, device))

    def _bind(self, library: Any, symbol: str, device: DeviceFacts) -> int:
        """Return the CUkernel of `symbol`, bound to `device`.

        cuLibraryLoadData accepts anything; what is wrong with an image shows in the two calls here, and what is wrong for
        this device among several only in the second, which binds the kernel to it and needs no context.
        """
        driver = self.driver
        handle = driver.call("cuLibraryGetKernel", library, symbol.encode())
        attribute = driver.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        driver.call("cuKernelGetAttribute", attribute, handle, driver.call("cuDeviceGet", device.ordinal))
        return int(handle)

    def _load_library(self, module: ModuleManifest, candidate: Candidate, device: DeviceFacts) -> Any:
        """Return the CUlibrary of the candidate's image, compiled for `device` where it is PTX."""
        image = candidate.image
        code = self._read(image)
        if candidate.way == LOAD:
            return self._load_code(code)
        if candidate.way == NVJITLINK:
            device = device._replace(nvjitlink=self._nvjitlink())
        recipe = Recipe.of(candidate, device, self.driver)
        key = recipe.key(image.sha256)
        cached = self._load_cached(key, module, candidate, device)
        if cached is not None:
            self._log_hit(image, device, recipe)
            return cached
        cubin = compile_ptx(self.driver, code, device, recipe, label=image.file, logger=self.logger)
        self.jit_cache.put(key, cubin)
        return self._load_code(cubin)

    def _load_cached(self, key: str, module: ModuleManifest, candidate: Candidate, device: DeviceFacts) -> Any:
        """Return the CUlibrary of the machine code that the cache has under `key`; None if none that the driver takes."""
        cubin = self.jit_cache.get(key)
        if cubin is None:
            return None
        library = self._load_code(cubin)
        name = next(iter(candidate.image.kernels), None)
        try:
            if name is not None:  # one kernel tells whether the driver takes the code
                self._bind(library, module.kernel(name).symbol, device)
        except DriverError as error:
            if not (error.refusal or error.not_found):
                raise
            self.jit_cache.drop(key)
            return None
        return library

    def _load_code(self, code: bytes) -> Any:
        return self.driver.call("cuLibraryLoadData", code, [], [], 0, [], [], 0)

    def _read(self, image: Image) -> bytes:
        """Return the content of the image's file, verified.

        The driver takes a cubin that was cut off without a word, or crashes on it.  Damage ends here and never leads to
        another image: it would turn into a slow start that nobody can explain.
        """
        from hashlib import sha256

        path = os.path.join(self.folder, image.file)
        try:
            with open(path, "rb", buffering=0) as file:
                content = file.read()
        except OSError as error:
            raise self._corrupt(path, f"{image.size} bytes", error.strerror or str(error)) from error
        if len(content) != image.size:
            raise self._corrupt(path, f"{image.size} bytes", f"{len(content)} bytes")
        digest = sha256(content).hexdigest()
        if digest != image.sha256:
            raise self._corrupt(path, f"SHA-256 {image.sha256}", f"SHA-256 {digest}")
        return content

    def _rank(
        self, module: ModuleManifest, device: DeviceFacts, kernel: str | None, *, complete: bool = False
    ) -> list[Candidate]:
        """Return the module's images ranked for `device`; `complete` is for a table that is right in each line."""
        force_ptx = _force_ptx()
        refused = None if device.ordinal is None else self._refused.get((module.name, device.ordinal))
        candidates = rank(module.images, device, kernel=kernel, force_ptx=force_ptx, refused=refused)
        # Asking for nvJitLink takes a tenth of a second, and where machine code is chosen it decides nothing.
        if device.ordinal is not None and (complete or not candidates or candidates[0].way != LOAD):  # noqa: SIM102
            if any(candidate.awaits_linker for candidate in candidates):
                device = device._replace(nvjitlink=self._nvjitlink())
                candidates = rank(module.images, device, kernel=kernel, force_ptx=force_ptx, refused=refused)
        return candidates

    def _nvjitlink(self) -> int | None:
        version: int | None = self._once.get("nvjitlink", nvjitlink_version)
        return version

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
        if manifest.tree is None:
            return manifest
        from .editable import up_to_date

        return up_to_date(manifest, self.logger)

    def _none_fits(
        self, module: ModuleManifest, wanted: Kernel | Global, device: DeviceFacts, candidates: list[Candidate]
    ) -> NoCompatibleImageError:
        is_kernel = isinstance(wanted, Kernel)
        report = _report(device, wanted.name if is_kernel else None, [(module, candidates)])
        advice = advise(candidates, device, self.package)
        what = "the kernel" if is_kernel else "the module with the variable"
        lines = [f"no image of {what} {wanted.name!r} runs on {device}:", *report.table(), *advice]
        return NoCompatibleImageError("\n".join(lines), wanted.name, report, advice)

    def _not_built(self, module: ModuleManifest, kernel: Kernel, error: Exception) -> KernelNotFoundError:
        template = kernel.name.partition("<")[0]
        built = sorted(name for name in module.kernels if name.partition("<")[0] == template)
        others = f"there are {', '.join(built)}" if built else "of this template there is none"
        message = (
            f"{self.package} was built without {kernel.name!r} ({others}), and compiling it from the source in the package "
            f"failed: {error}"
        )
        return KernelNotFoundError(message, kernel.name, built)

    def _failed(self, module: ModuleManifest, image: Image, wanted: Kernel | Global, error: DriverError) -> Exception:
        if error.not_found:
            path = module.path
            message = (
                f"{path} says that {image.file} holds {wanted.name!r} as {wanted.symbol}, and the driver does not find "
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

        message = "%s refused %s, trying the next image: %s"
        logging.getLogger(self.logger).warning(message, error.by, image.file, error)

    def _log_hit(self, image: Image, device: DeviceFacts, recipe: Recipe) -> None:
        if "logging" not in sys.modules:
            return  # nobody listens at level INFO, and importing it takes ten times as long as the rest of a hit
        import logging

        message = "took %s, compiled for compute capability %s, from the cache (%s)"
        logging.getLogger(self.logger).info(message, image.file, format_cc(device.cc), recipe)


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


def _force_ptx() -> bool:
    return os.environ.get(FORCE_PTX, "0") not in {"", "0"}


def _report(device: DeviceFacts, kernel: str | None, modules: list[tuple[ModuleManifest, list[Candidate]]]) -> Report:
    from .report import Report, Row

    rows = []
    for module, candidates in modules:
        rows += [Row.of(module.name, candidate) for candidate in candidates]
        if module.source is not None:
            needed = not candidates or candidates[0].verdict != CHOSEN
            rows.append(Row.of_source(module.name, module.source["main"], CHOSEN if needed else USABLE))
    return Report(device, tuple(rows), kernel)


def _cuda_version(value: int | str) -> int:
    """Return ``12040`` for ``"12.4"`` and for ``12040``."""
    if isinstance(value, int):
        return value
    major, _, minor = value.partition(".")
    if not major.isdecimal() or not (minor or "0").isdecimal():
        message = f"{value!r} is not a CUDA version of a driver: expected one like '12.4' or 12040"
        raise ValueError(message)
    return int(major) * 1000 + int(minor or 0) * 10
