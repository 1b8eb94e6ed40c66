"""What the first question costs in a package of 10,000 kernels, compared with a package of one.

Import, `kernel_info` and `explain` of one kernel, in a new process.  Needs neither a GPU nor a CUDA package.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path

from common import Line, interleave, parser, printed, quartiles, report

from hatch_cuda_aot.compile.ptx import Param
from hatch_cuda_aot.compile.tasks import Resources
from hatch_cuda_aot.manifest import manifest_files
from hatch_cuda_aot.results import Image, Kernel, ModuleResult
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.stage import runtime_files, write_folder
from hatch_cuda_aot.toolchain import Toolchain

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "compute_75")
PARAMS = (Param("f32", 4, 0), Param("u64", 8, 8), Param("u64", 8, 16), Param("s64", 8, 24))

MEASURED = """
import time
start = time.perf_counter()
from {package}._cuda_aot import explain, kernel_info
info = kernel_info({kernel!r})
table = str(explain({kernel!r}, cc="9.0"))
print(time.perf_counter() - start)
"""


def main() -> None:
    arguments = parser(__doc__, wheel=False).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        make(site, "small_pkg", modules=1, kernels=1)
        make(site, "large_pkg", modules=1000, kernels=10)
        environ = {"PYTHONPATH": str(site)}
        calls = {
            package: partial(measure, MEASURED.format(package=package, kernel=kernel), environ)
            for package, kernel in (("small_pkg", name_of(0, 0)), ("large_pkg", name_of(567, 3)))
        }
        times = interleave(calls, arguments.rounds or 41)
        index = (site / "large_pkg/_cuda_aot/manifest.json").stat().st_size
    small, large = (statistics.median(times[package]) * 1e3 for package in ("small_pkg", "large_pkg"))
    lines = [
        Line("1 kernel: import, kernel_info, explain", small, "ms", quartiles(times["small_pkg"], 1e3)),
        Line("10,000 kernels, 1,000 modules, 8 architectures", large, "ms", quartiles(times["large_pkg"], 1e3)),
        Line("the difference", large - small, "ms", goal=5),
    ]
    report("scale", __doc__, lines, write=arguments.write, notes=[f"The larger index has {index / 1e3:.0f} kB."])


def measure(code: str, environ: dict[str, str]) -> float:
    return float(printed(code, environ))


def make(site: Path, package: str, *, modules: int, kernels: int) -> None:
    """Write a package as a build does, with images that hold nothing."""
    results = [module_of(number, kernels) for number in range(modules)]
    toolchain = Toolchain("12.9", "12.9.86", "12.9.86", "", "", (), (90,))
    files = manifest_files(package, results, toolchain, "0")
    names = [kernel.name for module in results for kernel in module.kernels]
    write_folder(site / package / "_cuda_aot", {**runtime_files(names), **files})
    (site / package / "__init__.py").touch()


def module_of(number: int, kernels: int) -> ModuleResult:
    made = tuple(Kernel(name_of(number, index), f"_Z{number}_{index}IfEvPKfPfx", PARAMS) for index in range(kernels))
    images = []
    for arch in map(Arch.parse, ARCHS):
        held = {kernel.name: None if arch.virtual else Resources(32, 1024, 0, 0, 0) for kernel in made}
        images.append(Image(arch, arch.as_virtual, b"", 12000, None, held))
    return ModuleResult(f"module_{number:04}", made, {}, tuple(images), ())


def name_of(module: int, index: int) -> str:
    return f"project::part{module}::transform<float,{index}>"


if __name__ == "__main__":
    main()
