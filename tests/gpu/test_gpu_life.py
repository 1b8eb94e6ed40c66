"""What a process does with kernels besides launching them: background loads, variables, source, several GPUs, its end."""

from __future__ import annotations

import asyncio
import logging
import struct
from typing import TYPE_CHECKING, Any

import pytest

np = pytest.importorskip("numpy")
cupy = pytest.importorskip("cupy")

from .test_gpu_loader import KERNEL, check_axpy  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from .conftest import Installed

    Unpack = Callable[[str], Installed]
    Install = Callable[[str], ModuleType]

#: Calls the driver and launches ``axpy<float>`` with nothing but cuda.bindings: ``run(handle)`` says whether it was right.
DRIVER = """
import ctypes, sys
import numpy as np
from cuda.bindings import driver

def call(function, *arguments):
    status, *result = getattr(driver, function)(*arguments)
    assert status == 0, (function, status)
    return result[0] if len(result) == 1 else result or None

def enter(device=0):
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device)))

def run(handle):
    x, y = np.random.default_rng(0).standard_normal((2, 1000)).astype("f4")
    pointers = [call("cuMemAlloc", array.nbytes) for array in (x, y)]
    for pointer, array in zip(pointers, (x, y)):
        call("cuMemcpyHtoD", pointer, array, array.nbytes)
    values = (2.5, int(pointers[0]), int(pointers[1]), 1000)
    types = (ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64)
    call("cuLaunchKernel", driver.CUfunction(handle), 4, 1, 1, 256, 1, 1, 0, 0, (values, types), 0)
    result = np.empty_like(y)
    call("cuMemcpyDtoH", result, pointers[1], result.nbytes)
    return bool(np.allclose(result, 2.5 * x + y, atol=1e-5))
"""

two_gpus = pytest.mark.skipif("cupy.cuda.runtime.getDeviceCount() < 2", reason="needs two GPUs")


# ---- the first kernel of a process


@pytest.mark.parametrize("first", ["get_kernel", "cuda.core", "preload"])
def test_first_kernel(unpack: Unpack, first: str) -> None:
    """Whether CUDA, cuda.core or the loader comes first in a process, and who starts whom, makes no difference."""
    before = {"get_kernel": "", "cuda.core": "import cuda.core", "preload": f"kernels.preload({KERNEL!r})"}[first]
    output = unpack("default-13.0").run(
        f"""
import sys
from example_pkg import _cuda_aot as kernels
assert "cuda" not in sys.modules
{before}
kernel = kernels.get_kernel({KERNEL!r})
{DRIVER}
enter()
print(run(int(kernel.handle)), len(kernel.arguments_info))
"""
    )
    assert output == "True 4\n"


# ---- preload


@pytest.mark.parametrize("variant", ["default-12.9", "ptx-12.9"])
def test_preload(install: Install, variant: str, caplog: pytest.LogCaptureFixture) -> None:
    """Everything is loaded in the background, each image once, and a call meanwhile waits for it."""
    package = install(variant)
    kernels = package._cuda_aot
    with caplog.at_level(logging.INFO, logger="example_pkg.cuda_aot"):
        future = kernels.preload()
        check_axpy(package)
        assert future.result(120) is None
        libraries = {name: kernels._loader().load(name).library for name in kernels.kernel_names()}
    assert len(set(libraries.values())) == 4  # modules
    assert len(caplog.records) == (4 if variant == "ptx-12.9" else 0)


def test_await_a_preload(install: Install) -> None:
    """asyncio can wait for it, and hears of errors."""
    kernels = install("default-12.9")._cuda_aot

    async def main() -> None:
        await asyncio.wrap_future(kernels.preload([KERNEL], device=cupy.cuda.Device(0)))
        with pytest.raises(kernels.KernelNotFoundError):
            await asyncio.wrap_future(kernels.preload(["axpy<char>"]))

    asyncio.run(main())


def test_exit_during_a_preload(unpack: Unpack) -> None:
    """A process that ends while PTX is being compiled ends soon and silently, wherever the compiler is."""
    installed = unpack("ptx-12.9")
    for delay in (0, 0.05, 0.15, 0.3, 0.45):
        installed.run(f"import time; from example_pkg._cuda_aot import preload; preload(); time.sleep({delay})",
                      CUDA_AOT_CACHE="0", CUDA_CACHE_DISABLE="1")  # fmt: skip


# ---- variables


@pytest.mark.parametrize("force_ptx", ["0", "1"], ids=["cubin", "ptx"])
def test_variable(install: Install, monkeypatch: pytest.MonkeyPatch, force_ptx: str) -> None:
    """What is written at the address is what the kernel reads, under each of the variable's names."""
    kernels = install("embed-12.9")._cuda_aot
    monkeypatch.setenv("CUDA_AOT_FORCE_PTX", force_ptx)
    assert read_variables(kernels) == [1, 2, 3, 4, 5, 7]
    factors = kernels.get_global("factors")
    assert factors.size == 16
    assert kernels.get_global("embed:factors", device=0) == factors
    write(factors.address, struct.pack("4f", 10, 20, 30, 40))
    counter = kernels.get_global("counter")
    assert counter.size == 4
    write(counter.address, struct.pack("i", 99))
    assert read_variables(kernels) == [10, 20, 30, 40, 99, 7]
    assert read_variables(kernels)[4] == 100
    with pytest.raises(kernels.VariableNotFoundError, match="did you mean 'factors'"):
        kernels.get_global("factor")


def test_variable_before_anything_else(unpack: Unpack) -> None:
    """Without any context the address is good too, stays so, and no context is left current."""
    output = unpack("embed-12.9").run(
        DRIVER
        + """
from embed_pkg._cuda_aot import get_global, get_handle
get_handle("read_variables")
found = get_global("factors")
assert int(call("cuCtxGetCurrent")) == 0 and call("cuDevicePrimaryCtxGetState", 0)[1] == 1
enter()
call("cuDevicePrimaryCtxRelease", 0)
values = np.empty(4, "f4")
call("cuMemcpyDtoH", values, found.address, 16)
assert get_global("factors") == found
print(values, found.size)
"""
    )
    assert output == "[1. 2. 3. 4.] 16\n"


@two_gpus
def test_variable_on_two_devices(install: Install) -> None:
    """Each device has its own copy, whichever is current."""
    kernels = install("embed-12.9")._cuda_aot
    cupy.cuda.Device(0).use()
    first, second = (kernels.get_global("counter", device=device) for device in (0, 1))
    assert cupy.cuda.runtime.getDevice() == 0
    write(first.address, struct.pack("i", 11))
    write(second.address, struct.pack("i", 22))
    assert read_variables(kernels)[4] == 11
    with cupy.cuda.Device(1):
        assert kernels.get_global("counter") == second
        assert read_variables(kernels)[4] == 22


# ---- source


@pytest.mark.parametrize("variant", ["embed-12.9", "embed-13.0"])
def test_instantiation_from_source(install: Install, variant: str, caplog: pytest.LogCaptureFixture) -> None:
    """A template instantiation that was not built is compiled once, kept in the cache, and right."""
    kernels = install(variant)._cuda_aot
    skip_without_nvrtc(kernels)
    with caplog.at_level(logging.INFO, logger="embed_pkg.cuda_aot"):
        for name, dtype in (
            ("ours::axpy<float>", "float32"),
            ("ours::axpy<double>", "float64"),
            ("ours::axpy<int>", "int32"),
        ):
            x, y = (cupy.arange(1000, dtype=dtype) for _ in range(2))
            launch(kernels.get_kernel(name), 4, 256, 2.0, x, y, 1000)
            assert (y == 3 * x + 3).all(), name
    assert [record.getMessage().partition(" from ")[0] for record in caplog.records] == [
        "compiled ours::axpy<double>",
        "compiled ours::axpy<int>",
    ]
    caplog.clear()
    again = type(kernels._loader())(kernels._loader().folder, "embed_pkg")
    with caplog.at_level(logging.INFO, logger="embed_pkg.cuda_aot"):
        assert again.get_handle("ours::axpy<double>")
    assert not [record for record in caplog.records if record.getMessage().startswith("compiled")]


def test_bfloat16_from_source(install: Install) -> None:
    """A type of the toolkit's headers works as a template argument."""
    torch = pytest.importorskip("torch")
    kernels = install("embed-12.9")._cuda_aot
    skip_without_nvrtc(kernels)
    x = torch.arange(64, device="cuda", dtype=torch.bfloat16)
    y = torch.ones_like(x)
    launch(kernels.get_kernel("ours::axpy<__nv_bfloat16>"), 1, 64, 0.5, x.data_ptr(), y.data_ptr(), 64)
    torch.cuda.synchronize()
    assert torch.equal(y, (0.5 * x.float() + 4).to(torch.bfloat16))


def test_file_name_from_source(install: Install) -> None:
    """``__FILE__`` is the same in what was built and in what is compiled here."""
    kernels = install("embed-12.9")._cuda_aot
    skip_without_nvrtc(kernels)
    names = []
    for kernel in ("file_name<0>", "file_name<1>"):
        out = cupy.zeros(64, "uint8")
        launch(kernels.get_kernel(kernel), 1, 1, out, 64)
        names.append(bytes(cupy.asnumpy(out)).rstrip(b"\0"))
    assert names == [b"src/embed_pkg/kernels/embed.cu"] * 2


def test_no_image_but_source(install: Install) -> None:
    """A wheel without an image for this GPU works by its source."""
    kernels = install("embed-sm80-12.9")._cuda_aot
    skip_without_nvrtc(kernels)
    assert read_variables(kernels) == [1, 2, 3, 4, 5, 7]
    loaded = kernels._loader().load("read_variables")
    assert (str(loaded.image.arch), loaded.image.file) == ("sm_90", "src/embed_pkg/kernels/embed.cu")
    with pytest.raises(kernels.NoCompatibleImageError):
        kernels.get_global("factors")  # of which image?


def test_source_without_nvrtc(unpack: Unpack) -> None:
    """Where NVRTC is missing the error says what was built and what to install; what was built works."""
    output = unpack("embed-12.9").run(
        """
import sys
sys.modules["cuda.bindings.nvrtc"] = None
from embed_pkg import _cuda_aot as kernels
try:
    kernels.get_handle("ours::axpy<int>")
except kernels.KernelNotFoundError as error:
    print(error)
print(kernels.get_handle("ours::axpy<float>") > 0)
"""
    )
    assert "built without 'ours::axpy<int>' (there are ours::axpy<float>)" in output
    assert 'pip install "nvidia-cuda-nvrtc==' in output
    assert output.endswith("True\n")


# ---- devices, contexts, processes


def test_info_of_the_device(install: Install) -> None:
    """kernel_info says which image this device gets, and what the kernel takes in it."""
    kernels = install("default-12.9")._cuda_aot
    info = kernels.kernel_info(KERNEL, device=0)
    assert str(info.image.arch) == "sm_90a"
    assert info.resources["sm_90a"]["registers"] > 0
    assert kernels.kernel_info(KERNEL).image is None


@two_gpus
def test_devices_at_once(install: Install) -> None:
    """Threads that each use a GPU of their own get right results, by whatever object the GPU is named."""
    torch = pytest.importorskip("torch")
    from concurrent.futures import ThreadPoolExecutor

    from cuda.core import Device

    package = install("default-12.9")
    kernels = package._cuda_aot
    count = cupy.cuda.runtime.getDeviceCount()

    def work(number: int) -> None:
        device = number % count
        with cupy.cuda.Device(device):
            check_axpy(package)
            loaded = kernels._loader().load(KERNEL)
        assert loaded.device == device
        for named in (device, Device(device), torch.device("cuda", device), cupy.cuda.Device(device)):
            assert kernels.get_handle(KERNEL, device=named) == loaded.handle

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(64)))


@pytest.mark.parametrize("variant", ["default-12.9", "ptx-12.9"])
def test_reset_of_the_primary_context(unpack: Unpack, variant: str) -> None:
    """After cuDevicePrimaryCtxReset a kernel that was there before runs as it did, and so does one that is asked for anew."""
    output = unpack(variant).run(
        DRIVER
        + """
from example_pkg._cuda_aot import get_handle
enter()
handle = get_handle("axpy<float>")
print(run(handle))
for _ in range(2):
    call("cuDevicePrimaryCtxReset", 0)
    enter()
    print(run(handle), get_handle("axpy<float>") == handle, get_handle("histogram") > 0)
"""
    )
    assert output == "True\n" + "True True True\n" * 2


def test_variables_after_a_reset(unpack: Unpack) -> None:
    """A reset takes variables back to what they were built with, and get_global finds them where they then are."""
    output = unpack("embed-12.9").run(
        DRIVER
        + """
from embed_pkg._cuda_aot import get_global
enter()
for _ in range(3):
    found = get_global("counter")
    value = np.empty(1, "i4")
    call("cuMemcpyDtoH", value, found.address, 4)
    print(value[0])
    value[0] = 77
    call("cuMemcpyHtoD", found.address, value, 4)
    call("cuDevicePrimaryCtxReset", 0)
    enter()
"""
    )
    assert output == "5\n" * 3


def test_get_kernel_after_a_reset(unpack: Unpack) -> None:
    """A ``cuda.core.Kernel`` too outlives the context."""
    output = unpack("default-12.9").run(
        DRIVER
        + """
from cuda.core import Device
from example_pkg._cuda_aot import get_kernel
enter()
kernel = get_kernel("axpy<float>")
print(run(int(kernel.handle)))
call("cuDevicePrimaryCtxReset", 0)
enter()
print(get_kernel("axpy<float>") is kernel, run(int(kernel.handle)))
"""
    )
    assert output == "True\nTrue True\n"


def test_fork_after_a_preload(unpack: Unpack) -> None:
    """A forked process gets an error for every way to ask, cached or not, and both processes end silently."""
    output = unpack("default-12.9").run(
        """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from example_pkg import _cuda_aot as kernels
kernels.preload().result()
kernel = kernels.get_kernel("axpy<float>")
child = os.fork()
if child == 0:
    for ask in (kernels.get_kernel, kernels.get_handle, lambda name: kernels.preload(name).result(),
                lambda name: kernels.kernel_info(name, device=0), kernels.explain):
        try:
            ask("axpy<float>")
        except kernels.CudaUnavailableError as error:
            print(error.reason, flush=True)
    print(kernels.kernel_info("axpy<float>").name, flush=True)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
print(kernels.get_kernel("axpy<float>") is kernel)
"""
    )
    assert output == "forked\n" * 5 + "axpy<float>\nTrue\n"


def test_fork_before_cuda(unpack: Unpack) -> None:
    """A process that was forked before CUDA started uses it as any other, and so does its parent."""
    output = unpack("default-12.9").run(
        """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from example_pkg import _cuda_aot as kernels
kernels.kernel_names()
child = os.fork()
ok = kernels.get_handle("axpy<float>") > 0
if child == 0:
    sys.exit(not ok)
print(os.waitpid(child, 0)[1], ok)
"""
    )
    assert output == "0 True\n"


def launch(kernel: Any, grid: int, block: int, *arguments: Any) -> None:
    """Launch a kernel whose scalars are float and int, on the current device."""
    import ctypes

    from cuda.core import LEGACY_DEFAULT_STREAM, Device, LaunchConfig
    from cuda.core import launch as core_launch

    Device(cupy.cuda.runtime.getDevice()).set_current()
    values = [
        argument.data.ptr if isinstance(argument, cupy.ndarray)
        else ctypes.c_float(argument) if isinstance(argument, float)
        else ctypes.c_int(argument) if argument < 2**31
        else argument
        for argument in arguments
    ]  # fmt: skip
    core_launch(LEGACY_DEFAULT_STREAM, LaunchConfig(grid=grid, block=block), kernel, *values)


def read_variables(kernels: Any) -> list[float]:
    out = cupy.zeros(6, "float32")
    launch(kernels.get_kernel("read_variables"), 1, 1, out)
    return [float(value) for value in out.tolist()]


def write(address: int, content: bytes) -> None:
    from cuda.bindings import driver

    assert driver.cuMemcpyHtoD(address, content, len(content))[0] == 0


def skip_without_nvrtc(kernels: Any) -> None:
    """Skip where NVRTC or the toolkit's headers are not installed; that this is said well is tested apart."""
    try:
        kernels.get_handle("ours::axpy<char>")
    except kernels.KernelNotFoundError as error:
        if "NVRTC is not installed" in str(error) or "header of the CUDA toolkit" in str(error):
            pytest.skip(str(error))
        raise
