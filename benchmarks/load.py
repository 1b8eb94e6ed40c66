"""Loading an image, verified, compared with the same bytes through cuda.bindings; finding a kernel again; compiling PTX.

Every figure is from one process whose CUDA is up.  Nothing is loaded twice: each round has a loader of its own.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import Line, interleave, parser, quartiles, report, unpack

from hatch_cuda_aot.compile.tasks import Resources
from hatch_cuda_aot.manifest import manifest_files
from hatch_cuda_aot.results import Image, Kernel, ModuleResult
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.stage import write_folder
from hatch_cuda_aot.toolchain import Toolchain

#: Images of about that size: how many kernels they hold, how many instructions each has, and how many constants stand
#: beside them.  A thousand are what NVRTC alone leaves of CUB's headers, without the build's pruning.
SIZES = {
    "4 KB": (1, 40, 0),
    "130 KB, constants": (1, 40, 1080),
    "130 KB, code": (24, 240, 0),
    "20 MB, code": (1000, 1150, 0),
}

#: The architectures of the package that the images are put into, beside that of the device: the default list's.
OTHERS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "compute_75", "compute_120")


def main() -> None:
    arguments = parser(__doc__).parse_args()
    os.environ["CUDA_CACHE_DISABLE"] = "1"  # the driver's own cache would hide what compiling costs
    with tempfile.TemporaryDirectory() as folder:
        site = unpack(arguments.wheel, Path(folder, "site"))
        sys.path[:0] = [str(site)]
        cache = Path(folder, "cache")
        os.environ["CUDA_AOT_CACHE_DIR"] = str(cache)
        driver = start_cuda()
        rounds = arguments.rounds or 101
        lines: list[Line] = []
        for label, (kernels, instructions, constants) in SIZES.items():
            image = write_package(driver, Path(folder, label), kernels, instructions, constants)
            lines += load_lines(driver, image, label, rounds)
        lines += again_lines(max(3, rounds // 10))
        lines += jit_lines(driver, cache, max(3, rounds // 10))
    note = (
        "Loaded and resolved means that the kernel's code is in the context, ready for its first launch: both sides read "
        "the file and end with cuKernelGetFunction, which does most of the driver's work. The loader itself stops before "
        "that, at cuLibraryGetKernel, where it shows whether the image runs on the device: the lines that say `not in the "
        "context` stop there on both sides, so that nearly all that is left of them is the verification. SHA-256 alone is "
        "shown as well."
    )
    report("load", __doc__, lines, write=arguments.write, notes=[note])


class Driver:
    """The driver's functions with their errors checked, and as little else as can be."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.api = driver

    def call(self, function: str, *arguments: object) -> Any:
        """Return the function's one result, or all of them."""
        status, *result = getattr(self.api, function)(*arguments)
        if status:
            raise SystemExit(f"{function}: {status}")
        return result[0] if len(result) == 1 else result


def start_cuda() -> Driver:
    driver = Driver()
    driver.call("cuInit", 0)
    driver.call("cuCtxSetCurrent", driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", 0)))
    return driver


def load_lines(driver: Driver, image: Path, label: str, rounds: int) -> list[Line]:
    """Compare the loader with the same calls by hand, for one image."""
    content = image.read_bytes()
    gc.disable()
    times = interleave(
        {
            "loader": partial(by_loader, driver, image.parent, function=True),
            "by hand": partial(by_hand, driver, image, function=True),
            "loader, handle": partial(by_loader, driver, image.parent, function=False),
            "by hand, handle": partial(by_hand, driver, image, function=False),
            "SHA-256": partial(by_sha256, content),
        },
        rounds if len(content) < 1_000_000 else max(9, rounds // 5),
    )
    gc.enable()
    median = {what: statistics.median(values) * 1e6 for what, values in times.items()}
    spread = {what: quartiles(values, 1e6) for what, values in times.items()}
    lines = []
    for kind, what, goal in (
        ("", f"load + resolve, verified ({len(content):,} bytes)", 1.5),
        (", handle", "the same, not in the context", None),
    ):
        ours, theirs = f"loader{kind}", f"by hand{kind}"
        lines += [
            Line(f"{label}: {what}", median[ours], "us", spread[ours], median[ours] / median[theirs], goal),
            Line(f"{label}: cuda.bindings", median[theirs], "us", spread[theirs]),
        ]
    return [*lines, Line(f"{label}: SHA-256 alone", median["SHA-256"], "us", spread["SHA-256"])]


def by_hand(driver: Driver, image: Path, *, function: bool) -> float:
    start = time.perf_counter()
    with open(image, "rb") as file:
        code = file.read()
    library = driver.call("cuLibraryLoadData", code, [], [], 0, [], [], 0)
    kernel = driver.call("cuLibraryGetKernel", library, b"touch0")
    if function:
        driver.call("cuKernelGetFunction", kernel)
    seconds = time.perf_counter() - start
    driver.call("cuLibraryUnload", library)
    return seconds


def by_loader(driver: Driver, folder: Path, *, function: bool) -> float:
    """Time the first load of a new loader, whose manifest is read and whose driver is open, as in a running process."""
    from example_pkg._cuda_aot.loader import Loader

    loader = Loader(str(folder), "benchmark")
    loader.kernel_info("touch0", 0)
    start = time.perf_counter()
    loaded = loader.load("touch0", 0)
    if function:
        driver.call("cuKernelGetFunction", driver.api.CUkernel(loaded.handle))
    seconds = time.perf_counter() - start
    driver.call("cuLibraryUnload", driver.api.CUlibrary(loaded.library))
    return seconds


def by_sha256(content: bytes) -> float:
    start = time.perf_counter()
    hashlib.sha256(content).hexdigest()
    return time.perf_counter() - start


def again_lines(rounds: int) -> list[Line]:
    """Compare how long it takes to get a kernel that is loaded."""
    from cuda.core import ObjectCode
    from example_pkg._cuda_aot import _loader, get_handle, get_kernel

    name = "axpy<float>"
    loaded = _loader().load(name)
    code = ObjectCode.from_cubin(Path(_loader().folder, loaded.image.file).read_bytes())
    calls = {
        "get_kernel": lambda: get_kernel(name),
        "get_kernel of a device": lambda: get_kernel(name, device=0),
        "get_handle": lambda: get_handle(name),
        "ObjectCode.get_kernel": lambda: code.get_kernel(loaded.kernel.symbol),
    }
    times = interleave({what: partial(per_call, call) for what, call in calls.items()}, rounds)
    base = statistics.median(times["ObjectCode.get_kernel"])
    lines = []
    for what, values in times.items():
        median = statistics.median(values)
        ratio, goal = (
            (None, None) if what.startswith("Object") else (median / base, 1.0 if what == "get_kernel" else None)
        )
        lines.append(Line(f"once loaded: {what}", median * 1e6, "us", quartiles(values, 1e6), ratio, goal))
    return lines


def per_call(call: Callable[[], object], number: int = 20_000) -> float:
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def jit_lines(driver: Driver, cache: Path, rounds: int) -> list[Line]:
    """Time PTX that the driver compiles, and the same from the cache."""
    os.environ["CUDA_AOT_FORCE_PTX"] = "1"

    def cold() -> float:
        for entry in cache.glob("*.jit"):
            entry.unlink()
        return cached()

    def cached() -> float:
        from example_pkg._cuda_aot import _loader
        from example_pkg._cuda_aot.loader import Loader

        loader = Loader(_loader().folder, "example_pkg")
        loader.kernel_info("axpy<float>", 0)
        start = time.perf_counter()
        loaded = loader.load("axpy<float>", 0)
        seconds = time.perf_counter() - start
        assert loaded.image.kind == "ptx"
        driver.call("cuLibraryUnload", driver.api.CUlibrary(loaded.library))
        return seconds

    times = interleave({"cold": cold, "from the cache": cached}, rounds)
    first = statistics.median(times["cold"])
    return [
        Line("PTX, compiled by the driver", first * 1e3, "ms", quartiles(times["cold"], 1e3)),
        Line(
            "PTX, from the cache",
            statistics.median(times["from the cache"]) * 1e3,
            "ms",
            quartiles(times["from the cache"], 1e3),
            statistics.median(times["from the cache"]) / first,
        ),
    ]


def write_package(driver: Driver, folder: Path, kernels: int, instructions: int, constants: int) -> Path:
    """Write a package whose image for this device holds so much, and return that image."""
    device = driver.call("cuDeviceGet", 0)
    attribute = driver.api.CUdevice_attribute
    major, minor = (
        driver.call(
            "cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}"), device
        )
        for part in ("MAJOR", "MINOR")
    )
    own = Arch(10 * major + minor)
    texts = [HEAD, *(CONSTANT.format(number=number) for number in range(constants))]
    data = assemble(driver, "".join([*texts, *(kernel_text(number, instructions) for number in range(kernels))]))
    images = tuple(
        Image(arch, arch.as_virtual, data if arch == own else b"-", 12000, None, {"touch0": Resources(8, 0, 0, 0, 0)})
        for arch in sorted({own, *map(Arch.parse, OTHERS)})
    )
    module = ModuleResult("touch", (Kernel("touch0", "touch0", ()),), {}, images, ())
    toolchain = Toolchain("12.9", "12.9.86", "12.9.86", "", "", (), (90,))
    write_folder(folder, manifest_files("benchmark", [module], toolchain, "0"))
    return folder / f"touch.{own}.cubin"


HEAD = ".version 7.0\n.target sm_75\n.address_size 64\n"

CONSTANT = ".visible .global .align 1 .b8 _ZN4cuda3std3__410constants{number:04}_of_a_header_of_the_toolkitE[1];\n"

KERNEL = """
.visible .entry touch{number}(.param .u64 out)
{{
    .reg .b64 %rd<3>;
    .reg .f32 %f<9>;
    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd2, %rd1;
    {body}
    ret;
}}
"""


def kernel_text(number: int, instructions: int) -> str:
    """Return the PTX of a kernel whose instructions each need the ones before, so that none can be left out."""
    registers = range(1, 8)
    body = [f"ld.global.f32 %f{each}, [%rd2+{4 * each}];" for each in registers]
    body += [
        f"fma.rn.f32 %f{at % 7 + 1}, %f{(at + 3) % 7 + 1}, %f{(at + 5) % 7 + 1}, 0F{0x3F800000 + at * 977 + number:08X};"
        for at in range(instructions)
    ]
    body += [f"st.global.f32 [%rd2+{4 * each}], %f{each};" for each in registers]
    return KERNEL.format(number=number, body="\n    ".join(body))


def assemble(driver: Driver, ptx: str) -> bytes:
    """Return machine code for this device, from the driver's own assembler."""
    text = ptx.encode() + b"\0"
    state = driver.call("cuLinkCreate", 0, [], [])
    driver.call(
        "cuLinkAddData", state, driver.api.CUjitInputType.CU_JIT_INPUT_PTX, text, len(text), b"touch", 0, [], []
    )
    address, length = driver.call("cuLinkComplete", state)
    code = ctypes.string_at(int(address), length)
    driver.call("cuLinkDestroy", state)
    return code


if __name__ == "__main__":
    main()
