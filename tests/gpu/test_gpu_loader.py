"""What a real driver does with good, wrong and damaged images, and what the loader makes of it."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

np = pytest.importorskip("numpy")
cupy = pytest.importorskip("cupy")

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from .conftest import Installed

    Unpack = Callable[[str], Installed]
    Load = Callable[[Installed], ModuleType]
    Install = Callable[[str], ModuleType]

KERNEL = "axpy<float>"


def test_lying_manifest_falls_back_to_ptx(unpack: Unpack, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    """An sm_80 image that is declared sm_90 is refused when it is loaded, not at a launch, and PTX takes its place."""
    installed = unpack("sm80-12.9")
    installed.edit_module("axpy", declare("sm_80", "sm_90"))
    package = load(installed)
    with caplog.at_level(logging.INFO, logger="example_pkg.cuda_aot"):
        loaded = package._cuda_aot._loader().load(KERNEL)
    assert str(loaded.image.arch) == "compute_80"
    refused, compiled = caplog.records
    assert refused.levelname == "WARNING"
    assert "the driver refused axpy.sm_80.cubin" in refused.getMessage()
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU (209)" in refused.getMessage()
    assert compiled.levelname == "INFO"
    assert re.fullmatch(
        r"compiled axpy.compute_80.ptx for compute capability 9.0 in \d+ ms \(driver of CUDA \d+\.\d\)",
        compiled.getMessage(),
    )
    check_axpy(package)


@pytest.mark.parametrize("keep", [[], ["compute_80"]])
def test_lying_manifest_without_a_way_out(unpack: Unpack, load: Load, keep: list[str]) -> None:
    """Where nothing else fits, the table shows the driver's refusal; PTX for a later GPU changes nothing."""
    installed = unpack("sm80-12.9")

    def change(module: dict[str, Any]) -> None:
        declare("sm_80", "sm_90")(module)
        module["images"] = [image for image in module["images"] if image["arch"] in {"sm_90", *keep}]
        for image in module["images"]:
            if image["kind"] == "ptx":
                image["arch"] = "compute_100"

    installed.edit_module("axpy", change)
    kernels = load(installed)._cuda_aot
    with pytest.raises(kernels.NoCompatibleImageError) as caught:
        kernels.get_handle(KERNEL)
    verdicts = {row.arch: row.verdict for row in caught.value.report.rows}
    assert verdicts == {"sm_90": "refused", **({"compute_100": "rejected"} if keep else {})}
    assert "NVIDIA H200, compute capability 9.0" in str(caught.value)


@pytest.mark.parametrize("variant", ["default-12.9", "ptx-12.9"])
def test_damaged_image(unpack: Unpack, load: Load, variant: str) -> None:
    """A truncated image raises, although other images would run; whole again, it loads."""
    installed = unpack(variant)
    kernels = load(installed)._cuda_aot
    path = installed.folder / next(row.image for row in kernels.explain(KERNEL).chosen)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    for _ in range(2):
        with pytest.raises(
            kernels.CorruptImageError, match=r"is damaged: expected .* bytes, found .*reinstall example_pkg"
        ):
            kernels.get_handle(KERNEL)
    path.write_bytes(whole)
    assert kernels.get_handle(KERNEL)


def test_ptx_that_the_driver_cannot_read(unpack: Unpack, load: Load) -> None:
    """PTX newer than its manifest says is refused with the compiler's own words."""
    installed = unpack("ptx-12.9")
    path = installed.folder / "axpy.compute_75.ptx"
    path.write_bytes(re.sub(rb"\.version \S+", b".version 99.9", path.read_bytes(), count=1))
    installed.edit_module("axpy", lambda _: None)
    kernels = load(installed)._cuda_aot
    with pytest.raises(kernels.NoCompatibleImageError, match=r"(?s)UNSUPPORTED_PTX_VERSION.*Unsupported \.version"):
        kernels.get_handle(KERNEL)
    assert kernels.get_handle("histogram")


def test_kernel_that_the_image_does_not_hold(unpack: Unpack, load: Load) -> None:
    """A symbol that is not in the image is the manifest's fault."""
    installed = unpack("default-12.9")
    installed.edit_module("histogram", lambda module: module["kernels"]["histogram"].update(symbol="nothing"))
    kernels = load(installed)._cuda_aot
    with pytest.raises(kernels.ManifestError, match="holds 'histogram' as nothing"):
        kernels.get_handle("histogram")


def test_force_ptx(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_AOT_FORCE_PTX=1 compiles PTX although machine code is there, and the result is right."""
    package = install("default-12.9")
    monkeypatch.setenv("CUDA_AOT_FORCE_PTX", "1")
    assert package._cuda_aot._loader().load(KERNEL).image.kind == "ptx"
    check_axpy(package)


@pytest.mark.parametrize("variant", ["default-12.9", "ptx-12.9"])
def test_many_threads(install: Install, variant: str, caplog: pytest.LogCaptureFixture) -> None:
    """32 threads that start at once get one kernel from one library, compiled once."""
    kernels = install(variant)._cuda_aot
    start = threading.Barrier(32)

    def ask(_: int) -> tuple[int, int]:
        start.wait()
        kernel = kernels.get_kernel(KERNEL)
        return id(kernel), kernels._loader().load(KERNEL).library

    with caplog.at_level(logging.INFO, logger="example_pkg.cuda_aot"), ThreadPoolExecutor(32) as pool:
        assert len(set(pool.map(ask, range(32)))) == 1
    assert len(caplog.records) == (variant == "ptx-12.9")


def test_ways_to_name_the_device(install: Install) -> None:
    """An int and the objects of cuda.core, PyTorch and CuPy name the same device."""
    torch = pytest.importorskip("torch")
    from cuda.core import Device

    kernels = install("default-12.9")._cuda_aot
    kernel = kernels.get_kernel(KERNEL, device=0)
    for device in (None, Device(0), torch.device("cuda", 0), torch.device("cuda"), cupy.cuda.Device(0)):
        assert kernels.get_kernel(KERNEL, device=device) is kernel
        assert kernels.get_handle(KERNEL, device=device) == int(kernel.handle)
    with pytest.raises(kernels.CudaUnavailableError, match="no CUDA device 99: this process sees"):
        kernels.get_kernel(KERNEL, device=99)


def test_two_devices(install: Install) -> None:
    """A second device of the same compute capability uses the same library, and a kernel of it runs there."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    package = install("default-12.9")
    kernels = package._cuda_aot
    assert kernels.get_handle(KERNEL, device=0) == kernels.get_handle(KERNEL, device=1)
    for device in (0, 1, 0):
        with cupy.cuda.Device(device):
            assert kernels._loader().load(KERNEL).device == device
            check_axpy(package)


def test_get_handle_without_cuda_core(unpack: Unpack) -> None:
    """A kernel launched by its handle through cuda.bindings needs no cuda.core, and the process ends silently."""
    output = unpack("default-12.9").run(
        """
import sys
import numpy as np
from cuda.bindings import driver
from example_pkg._cuda_aot import get_handle

def call(function, *arguments):
    status, *result = getattr(driver, function)(*arguments)
    assert status == 0, (function, status)
    return result[0] if result else None

kernel = get_handle("histogram")
print(call("cuCtxGetCurrent"))
call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", 0))
data = np.random.default_rng(0).integers(0, 256, 100_003, "uint8")
counts = np.zeros(256, "uint32")
source, target = call("cuMemAlloc", data.nbytes), call("cuMemAlloc", counts.nbytes)
call("cuMemcpyHtoD", source, data, data.nbytes)
call("cuMemcpyHtoD", target, counts, counts.nbytes)
values = [np.array([value], dtype) for value, dtype in
          [(int(source), "u8"), (data.size, "i8"), (int(target), "u8"), (256, "i4")]]
pointers = np.array([value.ctypes.data for value in values], "u8")
call("cuLaunchKernel", driver.CUfunction(kernel), 64, 1, 1, 256, 1, 1, 0, 0, pointers.ctypes.data, 0)
call("cuMemcpyDtoH", counts, target, counts.nbytes)
print((counts == np.bincount(data, minlength=256)).all(), "cuda.core" in sys.modules)
"""
    )
    assert output == "<CUcontext 0x0>\nTrue False\n"


@pytest.mark.parametrize("variant", ["default-12.9", "ptx-12.9"])
def test_loading_leaves_contexts_alone(unpack: Unpack, variant: str) -> None:
    """Neither loading nor compiling leaves a context current or the primary context active."""
    output = unpack(variant).run(
        """
from cuda.bindings import driver
from example_pkg._cuda_aot import get_handle, get_kernel
for name in ("axpy<float>", "histogram"):
    get_handle(name), get_kernel(name)
    print(int(driver.cuCtxGetCurrent()[1]), driver.cuDevicePrimaryCtxGetState(0)[2])
"""
    )
    assert output == "0 0\n" * 2


def test_fork_after_cuda(unpack: Unpack) -> None:
    """In a process that was forked after CUDA had started, the call says so instead of crashing."""
    output = unpack("default-12.9").run(
        """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from example_pkg import _cuda_aot as kernels
handle = kernels.get_handle("axpy<float>", device=0)
if os.fork() == 0:
    for device in (None, 0):
        try:
            kernels.get_handle("axpy<float>", device=device)
        except kernels.CudaUnavailableError as error:
            print(error.reason, flush=True)
    os._exit(0)
os.wait()
print(kernels.get_handle("axpy<float>") == handle)
"""
    )
    assert output == "forked\nforked\nTrue\n"


def test_no_visible_gpu(unpack: Unpack) -> None:
    """With a driver and no GPU the error names CUDA_VISIBLE_DEVICES."""
    output = unpack("default-12.9").run(
        """
from example_pkg import _cuda_aot as kernels
try:
    kernels.get_kernel("axpy<float>")
except kernels.CudaUnavailableError as error:
    print(error.reason, error)
print(kernels.explain(cc="9.0").chosen[0].arch)
""",
        CUDA_VISIBLE_DEVICES="",
    )
    assert output.startswith("no-device the NVIDIA driver is there and sees no GPU; CUDA_VISIBLE_DEVICES is ''")
    assert output.endswith("\nsm_90a\n")


def declare(arch: str, other: str) -> Callable[[dict[str, Any]], None]:
    """Return a change of a module's manifest that calls the image of `arch` one of `other`."""

    def change(module: dict[str, Any]) -> None:
        (image,) = (image for image in module["images"] if image["arch"] == arch)
        image["arch"] = other

    return change


def check_axpy(package: ModuleType) -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 1003)).astype("float32")
    result = cupy.asnumpy(package.axpy(2.5, cupy.asarray(x), cupy.asarray(y)))
    assert np.abs(result - (2.5 * x.astype("float64") + y)).max() < 1e-5
