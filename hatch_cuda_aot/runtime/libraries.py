"""Turns what the package holds into what a device runs: image, PTX or source to CUlibrary, and kernels bound to devices.

Each image is read, verified and loaded once per process and then kept until it ends.  A kernel is resolved and bound at
once, so that an image which does not run here shows now and never at a launch; then the next one is tried.  What only PTX
or source needs is imported by those.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .arch import format_cc, format_cuda
from .device import DriverError
from .errors import CorruptImageError, NoCompatibleImageError
from .files import DamagedError, read_verified
from .manifest import Image, Kernel
from .once import Once
from .select import CHOSEN, LOAD, NVJITLINK, exact, rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from .device import Driver
    from .jit import Recipe
    from .jit_cache import JitCache
    from .manifest import Global, ModuleManifest
    from .select import Candidate, DeviceFacts

__all__ = ["FORCE_PTX", "Libraries", "LoadedKernel", "force_ptx"]

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


class Libraries:
    """The CUlibraries of one package in this process.

    Every method may be called from any thread.  Devices are such as the driver named: none that is not there.
    """

    def __init__(self, folder: str, package: str, driver: Driver) -> None:
        """Load from `folder`, for `package`, through `driver`."""
        self.folder = folder
        self.package = package
        self.driver = driver
        self.logger = f"{package}.cuda_aot"
        self._once = Once()
        self._refused: dict[tuple[str, int | None], dict[str, str]] = {}

    def kernel(self, module: ModuleManifest, kernel: Kernel, device: DeviceFacts) -> LoadedKernel:
        """Return `kernel` of `module` from its best image for `device`, or from source where no image will do.

        Raises:
            KernelNotFoundError: if it was not built, and could not be compiled from source.
            NoCompatibleImageError: if none of its images runs on the device.
            CorruptImageError: if a file is not the one that was built.
            ManifestError: if the image does not hold what the manifest says.
            CudaUnavailableError: if the driver fails.

        """
        if not kernel.symbol:
            return self._from_source(module, kernel, device)
        bind = self.driver.kernel
        try:
            image, library, handle = self._best(
                module, kernel, device, lambda library: bind(library, kernel.symbol, device.ordinal or 0)
            )
        except NoCompatibleImageError as error:
            if module.source is None:
                raise
            return self._from_source(module, kernel, device, error)
        return LoadedKernel(kernel, module.name, device.ordinal or 0, image, int(library), handle)

    def variable(self, module: ModuleManifest, variable: Global, device: DeviceFacts) -> tuple[int, int]:
        """Return the address and the size in bytes of `variable` in the best image of `module` for `device`.

        The errors are those of `kernel`.
        """

        def locate(library: Any) -> tuple[int, int]:
            with self.driver.context(device.ordinal or 0, keep=True):
                address, size = self.driver.call("cuLibraryGetGlobal", library, variable.symbol.encode())
            return int(address), int(size)

        return self._best(module, variable, device, locate)[2]

    def rank(
        self, module: ModuleManifest, device: DeviceFacts, kernel: str | None, *, complete: bool = False
    ) -> list[Candidate]:
        """Return the module's images ranked for `device`; `complete` is for a table that is right in each line."""
        refused = self._refused.get((module.name, device.ordinal))
        candidates = rank(module.images, device, kernel=kernel, force_ptx=force_ptx(), refused=refused)
        # Asking for nvJitLink takes a tenth of a second, and where machine code is chosen it decides nothing.
        decides = complete or not candidates or candidates[0].way != LOAD
        if decides and any(candidate.awaits_linker for candidate in candidates):
            device = device._replace(nvjitlink=self._nvjitlink())
            candidates = rank(module.images, device, kernel=kernel, force_ptx=force_ptx(), refused=refused)
        return candidates

    @property
    def jit_cache(self) -> JitCache:
        """The cache of what was compiled on this machine, as the environment said at the first use."""
        from .jit_cache import JitCache

        cache: JitCache = self._once.get("jit cache", JitCache.from_environment, self.logger)
        return cache

    def _best(
        self, module: ModuleManifest, wanted: Kernel | Global, device: DeviceFacts, use: Callable[[Any], _T]
    ) -> tuple[Image, Any, _T]:
        """Return the best image that nobody refuses, its CUlibrary, and what `use` makes of that."""
        kernel = wanted.name if isinstance(wanted, Kernel) else None
        where = (module.name, device.ordinal)
        while True:
            image = None if force_ptx() else exact(module.images, device, kernel, self._refused.get(where))
            way = LOAD
            if image is None:
                candidates = self.rank(module, device, kernel)
                if not candidates or candidates[0].verdict != CHOSEN:
                    from .failures import none_fits

                    raise none_fits(self.package, module, wanted, device, candidates)
                image, way = candidates[0].image, candidates[0].way
            try:
                library = self._library(module, image, way, device)
                return image, library, use(library)
            except DriverError as error:
                if not error.refusal:
                    from .failures import driver_failed

                    raise driver_failed(self.package, module, image, wanted, error) from error
                self._refused.setdefault(where, {})[image.file] = f"{error.by} refused it: {error}"
                self._warn(image, error)

    def _library(self, module: ModuleManifest, image: Image, way: str, device: DeviceFacts) -> Any:
        """Return the CUlibrary of `image`."""
        if way == LOAD:
            return self._once.get((module.name, image.file), self._load_image, image)
        return self._once.get((module.name, image.file, device.cc), self._compile_image, module, image, way, device)

    def _load_image(self, image: Image) -> Any:
        return self._load(self._read(image))

    def _load(self, code: bytes | bytearray) -> Any:
        return self.driver.call("cuLibraryLoadData", code, [], [], 0, [], [], 0)

    def _read(self, image: Image) -> bytes | bytearray:
        """Return the content of the image's file, verified.

        Damage ends here and never leads to another image: it would turn into a slow start that nobody can explain.
        """
        try:
            return read_verified(f"{self.folder}{os.sep}{image.file}", image.size, image.sha256, image.parts)
        except DamagedError as error:
            message = f"{error}; reinstall {self.package}"
            raise CorruptImageError(message, error.path, error.expected, error.actual) from error

    def _compile_image(self, module: ModuleManifest, image: Image, way: str, device: DeviceFacts) -> Any:
        """Return the CUlibrary of PTX, compiled for `device`."""
        from .jit import Recipe

        ptx = bytes(self._read(image))
        if way == NVJITLINK:
            device = device._replace(nvjitlink=self._nvjitlink())
        name = next(iter(image.kernels), None)
        symbol = None if name is None else module.kernel(name).symbol
        return self._compile(ptx, image.sha256, Recipe.of(image, way, device, self.driver), device, image.file, symbol)

    def _compile(
        self, ptx: bytes, digest: str, recipe: Recipe, device: DeviceFacts, label: str, symbol: str | None
    ) -> Any:
        """Return the CUlibrary of `ptx`, whose SHA-256 is `digest`, from the cache or from a compiler.

        `symbol` is a kernel in it, by which it shows whether the driver takes what the cache has; None where it has none.
        """
        from .jit import compile_ptx

        key = recipe.key(digest)
        cached = self._load_cached(key, device, symbol)
        if cached is not None:
            self._log_hit(label, device, recipe)
            return cached
        cubin = compile_ptx(self.driver, ptx, device, recipe, label=label, logger=self.logger)
        self.jit_cache.put(key, cubin)
        return self._load(cubin)

    def _load_cached(self, key: str, device: DeviceFacts, symbol: str | None) -> Any:
        """Return the CUlibrary of the machine code that the cache has under `key`; None if none that the driver takes."""
        cubin = self.jit_cache.get(key)
        if cubin is None:
            return None
        library = self._load(cubin)
        try:
            if symbol is not None:
                self.driver.kernel(library, symbol, device.ordinal or 0)
        except DriverError as error:
            if not (error.refusal or error.not_found):
                raise
            self.jit_cache.drop(key)
            return None
        return library

    def _from_source(
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
        from .source import SourceError

        try:
            key = (module.name, "source", kernel.name, device.cc)
            library, arch, symbol, params = self._once.get(key, self._compile_source, module, kernel, device)
            handle = self.driver.kernel(library, symbol, device.ordinal or 0)
        except (SourceError, DriverError) as error:
            from .failures import no_source_either, not_built

            if no_image is None:
                raise not_built(self.package, module, kernel, error) from error
            raise no_source_either(no_image, error) from error
        made = Kernel(kernel.name, symbol, params, kernel.policy)
        image = Image(arch, (module.source or {})["main"], kernels={kernel.name: {}})
        return LoadedKernel(made, module.name, device.ordinal or 0, image, int(library), handle)

    def _compile_source(self, module: ModuleManifest, kernel: Kernel, device: DeviceFacts) -> tuple[Any, ...]:
        """Return the CUlibrary, what it is for, the kernel's symbol and its parameters."""
        from .source import compile_kernel

        symbol = "" if "<" in kernel.name else kernel.symbol
        compiled = compile_kernel(
            self.folder, module, kernel.name, symbol, device, cache=self.jit_cache, logger=self.logger
        )
        if compiled.arch.virtual:  # NVRTC does not know the device, and the driver does
            from hashlib import sha256

            from .jit import Recipe

            recipe = Recipe(f"driver of CUDA {format_cuda(self.driver.version)}", self.driver.build, device.cc)
            digest = sha256(compiled.code).hexdigest()
            library = self._compile(compiled.code, digest, recipe, device, compiled.symbol, compiled.symbol)
        else:
            library = self._load(compiled.code)
        return library, compiled.arch, compiled.symbol, compiled.params

    def _nvjitlink(self) -> int | None:
        from .jit import nvjitlink_version

        version: int | None = self._once.get("nvjitlink", nvjitlink_version)
        return version

    def _warn(self, image: Image, error: DriverError) -> None:
        import logging

        message = "%s refused %s, trying the next image: %s"
        logging.getLogger(self.logger).warning(message, error.by, image.file, error)

    def _log_hit(self, label: str, device: DeviceFacts, recipe: Recipe) -> None:
        if "logging" not in sys.modules:
            return  # nobody listens at level INFO, and importing it takes ten times as long as the rest of a hit
        import logging

        message = "took %s, compiled for compute capability %s, from the cache (%s)"
        logging.getLogger(self.logger).info(message, label, format_cc(device.cc), recipe)


def force_ptx() -> bool:
    """Tell whether the environment wants machine code to be passed over."""
    return os.environ.get(FORCE_PTX, "0") not in {"", "0"}
