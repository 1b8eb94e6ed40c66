"""Kernels whose front end is shared, compared on the GPU with the same kernels from a front end of their own.

Needs a GPU, and hatch-cuda-aot installed with the compiler's wheels (`pip install -e '.[cu13]'`).
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import Line, interleave, parser, quartiles, report
from load import Driver, start_cuda

from hatch_cuda_aot import compile_source
from hatch_cuda_aot.compile.parts import installed_line

KERNELS = Path(__file__).resolve().parent / "kernels"

#: Threads of a block, and items that it takes, of each kernel.
SHAPES = {
    "block_heads": (256, 1024),
    "block_histogram": (128, 512),
    "block_reduce": (256, 1024),
    "block_scan": (128, 512),
    "block_sort": (128, 512),
    "warp_softmax": (128, 512),
    "bfloat16_steps": (256, 256),
}

#: A kernel for which the toolkit's headers choose by architecture: before 8.0 they compute bfloat16 in float.
BFLOAT16 = """\
#include <cuda_bf16.h>
extern "C" __global__ void bfloat16_steps(const __nv_bfloat162* in, __nv_bfloat162* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const __nv_bfloat162 x = in[i];
    __nv_bfloat162 y = x;
    for (int step = 0; step < 256; ++step) y = y * x + x;
    out[i] = y;
}
"""

#: So many items: input and output stay in the cache of a large GPU, so that memory hides little.
ITEMS = 1 << 22

#: Launches for one time.  They are one graph, as Python launches more slowly than such kernels run.
LAUNCHES = 50


@dataclass(frozen=True)
class Arrays:
    """Device memory for a kernel: `source` of bytes or of floats, and `target`; both of four bytes an item."""

    numbers: int
    floats: int
    target: int


def main() -> None:
    arguments = parser(__doc__, wheel=False).parse_args()
    driver = start_cuda()
    cc = compute_capability(driver)
    sources = {path.stem: path.read_text() for path in sorted(KERNELS.glob("*.cu"))} | {"bfloat16_steps": BFLOAT16}
    ways = {"own": f"sm_{cc}", "major": f"sm_{cc}@compute_{lowest(cc)}", "all": f"sm_{cc}@compute_75"}
    if lowest(cc) == cc:
        del ways["major"]  # it is the same
    arrays = make_arrays(driver)
    lines: list[Line] = []
    for name, text in sources.items():
        lines += compare(driver, name, text, ways, arrays, arguments.rounds or 31)
    note = (
        f"CUDA {installed_line().version}, compute capability {cc / 10}. The ratio is that of the times on the GPU, so 1.00 "
        "means that sharing costs nothing. Each kernel has its input and output in the GPU's cache; with data from "
        "memory differences are smaller. Results of all kernels but `bfloat16_steps` were the same to the byte. That one "
        "stands for sources that gain by newer instructions: its headers compute bfloat16 in float before 8.0."
    )
    report("sharing", __doc__, lines, write=arguments.write, notes=[note])


def lowest(cc: int) -> int:
    """Return the lowest compute capability of the same major version that a default list shares a front end from."""
    return {7: 75, 8: 80, 9: 90, 10: 100, 11: 110, 12: 120}.get(cc // 10, cc)


def compute_capability(driver: Driver) -> int:
    attributes = driver.api.CUdevice_attribute
    device = driver.call("cuDeviceGet", 0)
    major = driver.call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = driver.call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    return int(major) * 10 + int(minor)


def make_arrays(driver: Driver) -> Arrays:
    rng = random.Random(1)
    contents = [rng.randbytes(4 * ITEMS), array("f", (rng.random() for _ in range(ITEMS))).tobytes(), bytes(4 * ITEMS)]
    pointers = []
    for content in contents:
        pointers.append(driver.call("cuMemAlloc", len(content)))
        driver.call("cuMemcpyHtoD", pointers[-1], content, len(content))
    return Arrays(*map(int, pointers))


def compare(driver: Driver, name: str, text: str, ways: dict[str, str], arrays: Arrays, rounds: int) -> list[Line]:
    """Time one kernel, made in each way; refuse a result that another way does not give."""
    calls: dict[str, Callable[[], float]] = {}
    results: dict[str, bytes] = {}
    for way, arch in ways.items():
        (image,) = compile_source(text, archs=[arch], name=f"{name}.cu").images
        library = driver.call("cuLibraryLoadData", image.data, [], [], 0, [], [], 0)
        function = driver.call("cuKernelGetFunction", driver.call("cuLibraryGetKernel", library, name.encode()))
        driver.call("cuMemsetD8", arrays.target, 0, 4 * ITEMS)
        launch(driver, function, name, arrays, 0)
        results[way] = read(driver, arrays.target)
        calls[way] = partial(milliseconds, driver, capture(driver, partial(launch, driver, function, name, arrays)))
    if name != "bfloat16_steps" and len(set(results.values())) != 1:
        raise SystemExit(f"{name} computes something else where its front end is shared")
    times = interleave(calls, rounds)
    median = {way: statistics.median(values) for way, values in times.items()}
    lines = [Line(f"{name}, from its own front end", 1e3 * median["own"], "us", quartiles(times["own"], 1e3))]
    for way in [way for way in calls if way != "own"]:
        what = f'{name}, `share-front-end = "{way}"`'
        lines.append(Line(what, 1e3 * median[way], "us", quartiles(times[way], 1e3), median[way] / median["own"]))
    return lines


def launch(driver: Driver, function: Any, name: str, arrays: Arrays, stream: Any) -> None:
    threads, items = SHAPES[name]
    source = arrays.floats if name in ("block_reduce", "warp_softmax") else arrays.numbers
    parameters = ((source, arrays.target), (ctypes.c_void_p, ctypes.c_void_p))
    driver.call("cuLaunchKernel", function, ITEMS // items, 1, 1, threads, 1, 1, 0, stream, parameters, 0)


def capture(driver: Driver, record: Callable[[Any], None]) -> Any:
    """Return a graph of many launches, one after the other."""
    stream = driver.call("cuStreamCreate", driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    mode = driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    driver.call("cuStreamBeginCapture", stream, mode)
    for _ in range(LAUNCHES):
        record(stream)
    return driver.call("cuGraphInstantiate", driver.call("cuStreamEndCapture", stream), 0)


def milliseconds(driver: Driver, graph: Any) -> float:
    """Return the time that a launch takes on the GPU, as the mean of those in `graph`."""
    start, end = (driver.call("cuEventCreate", 0) for _ in range(2))
    driver.call("cuEventRecord", start, 0)
    driver.call("cuGraphLaunch", graph, 0)
    driver.call("cuEventRecord", end, 0)
    driver.call("cuEventSynchronize", end)
    return float(driver.call("cuEventElapsedTime", start, end)) / LAUNCHES


def read(driver: Driver, pointer: int) -> bytes:
    content = bytearray(4 * ITEMS)
    driver.call("cuMemcpyDtoH", content, pointer, len(content))
    return bytes(content)


if __name__ == "__main__":
    os.environ.setdefault("HATCH_CUDA_AOT_CACHE", "0")
    main()
