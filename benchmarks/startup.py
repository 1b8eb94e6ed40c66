"""From a new process to its first finished kernel: this loader, scripts written by hand, and CuPy with a warm cache.

Each script launches the same kernel once and waits for it.  The loader verifies what it loads; the others do not.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from common import Line, interleave, parser, printed, quartiles, report, unpack, until_done

KERNEL = "axpy<float>"

FIND_IMAGE = """
from example_pkg import _cuda_aot as kernels
loader = kernels._loader()
loaded = loader.load({kernel!r})
print(loader.folder, loaded.image.file, loaded.kernel.symbol, sep="/")
"""

# What the two scripts on cuda.bindings have in common: a kernel in, `y = 2 * x + y` out.
BINDINGS = """
import ctypes
from cuda.bindings import driver

def call(function, *arguments):
    status, *result = getattr(driver, function)(*arguments)
    if status:
        raise SystemExit(f"{function}: {status}")
    return result[0] if result else None

call("cuInit", 0)
call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
%s
n = 1000
x, y = call("cuMemAlloc", 4 * n), call("cuMemAlloc", 4 * n)
values = (2.0, int(x), int(y), n), (ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64)
call("cuLaunchKernel", kernel, 4, 1, 1, 256, 1, 1, 0, 0, values, 0)
call("cuCtxSynchronize")
print("done", flush=True)
"""

GET_HANDLE = """
from example_pkg._cuda_aot import get_handle
kernel = driver.CUfunction(get_handle({kernel!r}))
"""

BY_HAND = """
with open({path!r}, "rb") as file:
    code = file.read()
library = call("cuLibraryLoadData", code, [], [], 0, [], [], 0)
kernel = driver.CUfunction(int(call("cuLibraryGetKernel", library, {symbol!r}.encode())))
"""

# And the two on cuda.core.
CORE = """
import ctypes
from cuda.core import Device, LaunchConfig, ObjectCode, launch

device = Device(0)
device.set_current()
%s
stream = device.create_stream()
n = 1000
x, y = device.allocate(4 * n, stream=stream), device.allocate(4 * n, stream=stream)
launch(stream, LaunchConfig(grid=4, block=256), kernel, ctypes.c_float(2.0), x, y, ctypes.c_int64(n))
stream.sync()
print("done", flush=True)
"""

GET_KERNEL = """
from example_pkg._cuda_aot import get_kernel
kernel = get_kernel({kernel!r})
"""

# The order of a program that asks for its kernel before it imports cuda.core: the loader imports it while CUDA starts.
GET_KERNEL_FIRST = """
from example_pkg._cuda_aot import get_kernel
kernel = get_kernel({kernel!r})
"""

PRELOAD = """
from example_pkg._cuda_aot import get_kernel, preload
preload({kernel!r})
"""

CORE_BY_HAND = """
with open({path!r}, "rb") as file:
    code = ObjectCode.from_cubin(file.read())
kernel = code.get_kernel({symbol!r})
"""

CUPY = """
import cupy

kernel = cupy.RawKernel(r'''
extern "C" __global__ void axpy(float a, const float* x, float* y, long long n) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x)
        y[i] = a * x[i] + y[i];
}
''', "axpy")
n = 1000
x, y = cupy.empty(n, "float32"), cupy.empty(n, "float32")
kernel((4,), (256,), (cupy.float32(2), x, y, cupy.int64(n)))
cupy.cuda.get_current_stream().synchronize()
print("done", flush=True)
"""


def main() -> None:
    arguments = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = unpack(arguments.wheel, Path(folder, "site"))
        environ = {
            "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
            "CUPY_CACHE_DIR": str(Path(folder, "cupy")),
            "CUDA_AOT_CACHE_DIR": str(Path(folder, "cache")),
        }
        found = printed(FIND_IMAGE.format(kernel=KERNEL), environ).strip()
        path, _, symbol = found.rpartition("/")
        values = {"kernel": KERNEL, "path": path, "symbol": symbol}
        scripts = {
            "get_handle": BINDINGS % GET_HANDLE.format(**values),
            "cuda.bindings by hand": BINDINGS % BY_HAND.format(**values),
            "get_kernel": CORE % GET_KERNEL.format(**values),
            "get_kernel, called first": GET_KERNEL_FIRST.format(**values) + CORE % "",
            "get_kernel after preload": PRELOAD.format(**values) + CORE % GET_KERNEL.format(**values),
            "cuda.core by hand": CORE % CORE_BY_HAND.format(**values),
            "CuPy": CUPY,
        }
        times = measure(scripts, environ, arguments.rounds or 25)
        notes = [f"The image is {Path(path).name}, {os.path.getsize(path)} bytes."]
    report("startup", __doc__, lines_of(times), write=arguments.write, notes=notes)


def measure(scripts: Mapping[str, str], environ: Mapping[str, str], rounds: int) -> dict[str, list[float]]:
    return interleave({name: partial(until_done, code, environ) for name, code in scripts.items()}, rounds)


def lines_of(times: Mapping[str, list[float]]) -> list[Line]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    lines = [Line(name, medians[name] * 1e3, "ms", quartiles(values, 1e3)) for name, values in times.items()]
    for name, other, goal in (
        ("get_handle", "cuda.bindings by hand", 1.10),
        ("get_kernel", "cuda.core by hand", 1.05),
        ("get_handle", "CuPy", 0.6),
        ("get_kernel", "CuPy", 0.95),
        ("get_kernel, called first", "CuPy", 0.95),
        ("get_kernel, called first", "cuda.core by hand", 1.05),
        ("get_kernel after preload", "CuPy", 0.95),
    ):
        lines.append(
            Line(f"{name} : {other}", medians[name] * 1e3, "ms", ratio=medians[name] / medians[other], goal=goal)
        )
    return lines


if __name__ == "__main__":
    main()
