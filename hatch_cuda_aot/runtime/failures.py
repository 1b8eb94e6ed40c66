"""Says in full why something could not be loaded: the errors that people read, made only when there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import CudaUnavailableError, KernelNotFoundError, ManifestError, NoCompatibleImageError
from .manifest import Kernel
from .report import Report
from .select import advise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .device import DriverError
    from .manifest import Global, Image, ModuleManifest
    from .select import Candidate, DeviceFacts

__all__ = ["driver_failed", "no_source_either", "none_fits", "not_built"]


def none_fits(
    package: str, module: ModuleManifest, wanted: Kernel | Global, device: DeviceFacts, candidates: Sequence[Candidate]
) -> NoCompatibleImageError:
    """Return the error where none of `candidates`, the images of `module`, runs on `device`."""
    is_kernel = isinstance(wanted, Kernel)
    report = Report.of(device, wanted.name if is_kernel else None, [(module, candidates)])
    advice = advise(candidates, device, package)
    what = "the kernel" if is_kernel else "the module with the variable"
    lines = [f"no image of {what} {wanted.name!r} runs on {device}:", *report.table(), *advice]
    return NoCompatibleImageError("\n".join(lines), wanted.name, report, advice)


def no_source_either(none: NoCompatibleImageError, error: Exception) -> NoCompatibleImageError:
    """Return the error where no image fits and compiling the source that is there failed, too."""
    message = f"{none}\nIts source is in the package, and compiling it here failed: {error}"
    return NoCompatibleImageError(message, none.name, none.report, none.advice)


def not_built(package: str, module: ModuleManifest, kernel: Kernel, error: Exception) -> KernelNotFoundError:
    """Return the error where an instantiation was not built, and compiling it failed."""
    template = kernel.name.partition("<")[0]
    built = sorted(name for name in module.kernels if name.partition("<")[0] == template)
    others = f"there are {', '.join(built)}" if built else "of this template there is none"
    message = (
        f"{package} was built without {kernel.name!r} ({others}), and compiling it from the source in the package "
        f"failed: {error}"
    )
    return KernelNotFoundError(message, kernel.name, built)


def driver_failed(
    package: str, module: ModuleManifest, image: Image, wanted: Kernel | Global, error: DriverError
) -> ManifestError | CudaUnavailableError:
    """Return the error where the driver failed for a reason that is not the image's architecture."""
    if error.not_found:
        path = module.path
        message = (
            f"{path} says that {image.file} holds {wanted.name!r} as {wanted.symbol}, and the driver does not find "
            f"it there: files of two builds are mixed; reinstall {package}"
        )
        return ManifestError(message, path)
    message = f"the NVIDIA driver failed while {image.file} was loaded: {error}"
    return CudaUnavailableError(message, "driver-error", error.status)
