"""Building: cold against nvcc, with nothing changed against no hook at all, after one edit, and with all results cached.

Needs hatch-cuda-aot installed with the compiler's wheels (`pip install -e '.[cu13]'`), and no network.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from common import ROOT, Line, parser, report

from hatch_cuda_aot.compile.parts import describe, find_parts, installed_line
from hatch_cuda_aot.toolchain import Needs, Toolchain

KERNELS = Path(__file__).resolve().parent / "kernels"

#: What the eight are that every supported line knows, but for those of Jetson.
CCS = ("75", "80", "86", "89", "90", "100", "103", "120")

#: Front ends for each CPU, from which on the CPUs should be busy all the time.
ENOUGH = 12

HATCHLING = (sys.executable, "-m", "hatchling", "build", "-t", "wheel")
PIP = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index", "-w", "dist", ".")

PROJECT = """\
[build-system]
requires = ["hatchling", "hatch-cuda-aot"]
build-backend = "hatchling.build"

[project]
name = "kernels-of-a-benchmark"
version = "1.0"
requires-python = ">=3.10"
dependencies = ["cuda-core", "cuda-bindings", "platformdirs"]

[tool.hatch.build.targets.wheel]
packages = ["src/benchmark_pkg"]
"""

HOOK = """
[tool.hatch.build.targets.wheel.hooks.cuda-aot]

[tool.cuda-aot]
sources = ["src/benchmark_pkg/*.cu"]
cuda = "{cuda}"
archs = [{archs}]
share-front-end = "{sharing}"
precompiled-headers = {precompile}
"""

SMALL = """\
extern "C" __global__ void kernel_{number}(float* x, const float* y, int n) {{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += y[i] * {number}.0f;
}}
"""


@dataclass(frozen=True)
class Cost:
    """Seconds that something took, on the clock and of all CPUs."""

    wall: float
    cpu: float


def main() -> None:
    arguments = _arguments()
    toolchain = describe(find_parts(installed_line(), Needs()))
    lines: list[Line] = []
    about = (
        f"CUDA {toolchain.nvrtc}, {cores()} CPUs for this process. Load of the machine at the start: "
        f"{os.getloadavg()[0]:.1f}; other work on it makes wall times long, and CPU times a little longer. Everything that "
        "is compared was measured in turn."
    )
    notes = [about]
    parts = {"cold": cold, "precompiled": precompiled, "rebuild": rebuild, "edit": edit, "cached": cached}
    for name, part in parts.items():
        if name in arguments.only:
            with tempfile.TemporaryDirectory() as folder:
                found, note = part(Path(folder), toolchain, arguments)
            lines += found
            notes.append(note)
            # After each part, as all of them take long on a small machine.
            some = "" if set(arguments.only) == set(parts) else "-" + "-".join(arguments.only)
            report(f"build-{cores()}-cores{some}", __doc__, lines, write=arguments.write, notes=notes)


def _arguments() -> argparse.Namespace:
    arguments = parser(__doc__, wheel=False)
    arguments.add_argument("--nvcc", help="default: that of the wheel, or else of PATH")
    arguments.add_argument(
        "--only", nargs="+", default=["cold", "precompiled", "rebuild", "edit", "cached"], metavar="PART"
    )
    arguments.add_argument("--modules", type=int, default=1000, help="modules of the part `cached`")
    return arguments.parse_args()


def cold(folder: Path, toolchain: Toolchain, arguments: argparse.Namespace) -> tuple[list[Line], str]:
    """Build six kernels with CUB for eight architectures without any cache."""
    nvcc = find_nvcc(arguments.nvcc, toolchain)
    projects = {
        sharing: write_project(folder / sharing, kernels(), toolchain.line, sharing)
        for sharing in ("none", "major", "all")
    }
    fatbins = folder / "fatbins"
    fatbins.mkdir()
    environ = {"HATCH_CUDA_AOT_CACHE": "0"}
    calls: dict[str, Callable[[], object]] = {"nvcc": partial(run_nvcc, nvcc, toolchain, fatbins)}
    calls |= {sharing: partial(run, HATCHLING, root, environ) for sharing, root in projects.items()}
    copies = max(1, -(-ENOUGH * cores() // (len(kernels()) * len(CCS))))
    if copies > 1:
        texts = {f"{path.stem}_{copy}.cu": path.read_text() for path in kernels() for copy in range(copies)}
        calls["many"] = partial(run, HATCHLING, write_project(folder / "many", texts, toolchain.line), environ)
    costs = measure(calls, arguments.rounds or 3)
    theirs = sum(path.stat().st_size for path in fatbins.iterdir())
    lines = [Line("cold, `nvcc -fatbin`", median(costs["nvcc"], "wall"), "s", spread(costs["nvcc"], "wall"))]
    cpu = median(costs["nvcc"], "cpu")
    names = {"none": "by default", "major": "front ends shared per major", "all": "one front end"}
    for (sharing, name), goal in zip(names.items(), (0.75, 0.5, 0.2), strict=True):
        lines.append(compared(f"cold, {name}", costs[sharing], costs["nvcc"], "wall", goal))
        lines.append(compared(f"— its CPU time, nvcc's is {cpu:.1f} s", costs[sharing], costs["nvcc"], "cpu", goal))
    lines += [efficiency(f"cold, {names[sharing]}", costs[sharing]) for sharing in ("none", "all")]
    if copies > 1:
        lines.append(efficiency(f"cold, {names['none']}, with {copies} copies of each kernel", costs["many"]))
    for sharing, name in names.items():
        ours = cubin_bytes(projects[sharing])
        goal = 0.65 if sharing == "none" else None
        lines.append(Line(f"size of 48 cubins, {name}", ours / 1e3, "kB", ratio=ours / theirs, goal=goal))
    note = (
        f"Cold: {len(kernels())} kernels with CUB, one in each of benchmarks/kernels, for sm_{', sm_'.join(CCS)}. Ours is "
        "`hatchling build -t wheel` as a whole, with `HATCH_CUDA_AOT_CACHE=0`. Theirs is `nvcc -fatbin -no-compress` "
        f"({version_of(nvcc)}) with the same CCCL headers, {min(cores(), len(kernels()))} at a time, each with `--threads "
        f"{threads()}`, no host compilation and no wheel. Sizes: all cubins of the wheel, and the six uncompressed fatbins "
        "of the same architectures, without PTX in either. CPU time is that of all processes together; it has "
        "the same goals, for where the machine has other work. Wall time over CPU time ÷ CPUs tells how busy a "
        f"build keeps the CPUs. With less than {ENOUGH} front ends for each, much of a build is its start, and the time at "
        "the end in which some CPUs have nothing left to do."
    )
    return lines, note


def precompiled(folder: Path, toolchain: Toolchain, arguments: argparse.Namespace) -> tuple[list[Line], str]:
    """Build sources that all begin with the same header, with and without precompiling it."""
    header = "".join(
        sorted({line for path in kernels() for line in path.read_text().splitlines(True) if "#include" in line})
    )
    bodies = {
        path.stem: "".join(line for line in path.read_text().splitlines(True) if "#include" not in line)
        for path in kernels()
    }
    lines = []
    for copies in (1, 2, 4) if cores() > 4 else (1, 2):
        texts = {
            f"{name}_{copy}.cu": f'#include "common.cuh"\n{body}'
            for name, body in bodies.items()
            for copy in range(copies)
        }
        texts["common.cuh"] = f"#pragma once\n{header}"
        roots = {
            use: write_project(folder / f"{copies}-{use}", texts, toolchain.line, precompile=use)
            for use in (False, True)
        }
        environ = {"HATCH_CUDA_AOT_CACHE": "0"}
        calls = {str(use): partial(run, HATCHLING, root, environ) for use, root in roots.items()}
        costs = measure(calls, arguments.rounds or 3)
        lines += [
            Line(f"cold, {len(bodies) * copies} sources that begin alike", median(costs["False"], "wall"), "s"),
            compared("— with a precompiled header", costs["True"], costs["False"], "wall"),
            compared("— its CPU time", costs["True"], costs["False"], "cpu"),
        ]
    note = (
        "Sources that begin alike: the same kernels, once and more often, each of which includes one header with all "
        "that any of them includes; `precompiled-headers = false` against `true`."
    )
    return lines, note


def rebuild(folder: Path, toolchain: Toolchain, arguments: argparse.Namespace) -> tuple[list[Line], str]:
    """Build a project again that did not change, with the hook and without it."""
    environ = {"HATCH_CUDA_AOT_CACHE_DIR": str(folder / "cache")}
    hooked = write_project(folder / "with", kernels(), toolchain.line, "all")
    plain = write_project(folder / "without", kernels(), None)
    run(HATCHLING, hooked, environ)
    frontends = {"pip wheel": (PIP, 1.3), "hatchling build": (HATCHLING, None)}
    if find_spec("pip") is None:
        del frontends["pip wheel"]
    lines = []
    for name, (command, goal) in frontends.items():
        calls: dict[str, Callable[[], object]] = {
            "without": partial(run, command, plain, environ),
            "with": partial(run, command, hooked, environ),
        }
        costs = measure(calls, (arguments.rounds or 3) * 5)
        without, hook = costs["without"], costs["with"]
        lines.append(Line(f"`{name}` without the hook", median(without, "wall"), "s", spread(without, "wall")))
        lines.append(compared(f"`{name}` with it, nothing changed", hook, without, "wall", goal))
        lines.append(compared("— its CPU time", hook, without, "cpu", goal))
    note = (
        "Nothing changed: the six kernels again, all results cached. Without the hook the wheel has none of the cubins, nor "
        "the loader. `pip wheel --no-build-isolation` is what people run; the isolated default would add the fetching of "
        "packages to both. hatchling alone shows what the hook costs."
    )
    return lines, note


def edit(folder: Path, toolchain: Toolchain, arguments: argparse.Namespace) -> tuple[list[Line], str]:
    """Build a project of 100 modules again after one of them was edited."""
    environ = {"HATCH_CUDA_AOT_CACHE_DIR": str(folder / "cache")}
    root = write_project(folder / "project", small(100), toolchain.line)
    start = time.perf_counter()
    run(HATCHLING, root, environ)
    all_of_it = time.perf_counter() - start
    edited = root / "src/benchmark_pkg/kernel_50.cu"

    def once() -> None:
        edited.write_text(edited.read_text() + f"// {time.time_ns()}\n")
        run(HATCHLING, root, environ)

    costs = measure({"edit": once}, (arguments.rounds or 3) * 2)["edit"]
    seconds = median(costs, "wall")
    line = Line("one edited file of 100", seconds, "s", spread(costs, "wall"), ratio=seconds / all_of_it)
    return [
        line
    ], f"One edited file: 100 small modules for 8 architectures, against the {all_of_it:.1f} s of all of them."


def cached(folder: Path, toolchain: Toolchain, arguments: argparse.Namespace) -> tuple[list[Line], str]:
    """Build a large project with every result in the cache."""
    environ = {"HATCH_CUDA_AOT_CACHE_DIR": str(folder / "cache")}
    root = write_project(folder / "project", small(arguments.modules), toolchain.line)
    run(HATCHLING, root, environ)
    costs = measure({"cached": partial(run, HATCHLING, root, environ)}, arguments.rounds or 3)["cached"]
    jobs = arguments.modules * len(CCS)
    scale = 1e3 / jobs
    low, high = spread(costs, "wall") or (0.0, 0.0)
    line = Line(
        f"{arguments.modules:,} modules for 8 architectures, all cached: a job",
        median(costs, "wall") * scale,
        "ms",
        (low * scale, high * scale),
        goal=2,
    )
    return [
        line
    ], f"All cached: `hatchling build -t wheel` as a whole, divided by {jobs:,} jobs (one module and architecture)."


def efficiency(what: str, costs: Sequence[Cost]) -> Line:
    """Return how far a build is from one that keeps all CPUs busy, which is 1."""
    value = statistics.median(cost.wall * cores() / cost.cpu for cost in costs)
    return Line(f"{what}: wall time over CPU time ÷ CPUs", value, "", goal=1.15)


def run(command: Sequence[str], root: Path, environ: Mapping[str, str]) -> None:
    """Run a command in a project's folder, as it would run installed: with compiled modules of Python."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    shutil.rmtree(root / "dist", ignore_errors=True)
    done = subprocess.run(
        command, cwd=root, env={**inherited, "PYTHONPATH": path, **environ}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def run_nvcc(nvcc: str, toolchain: Toolchain, out: Path) -> None:
    """Compile every kernel to a fatbin, as many at a time as there are CPUs."""
    targets = [item for cc in CCS for item in ("-gencode", f"arch=compute_{cc},code=sm_{cc}")]
    cccl = dict(toolchain.include_dirs).get("cccl")
    options = ["-fatbin", "-no-compress", "-std=c++17", "--threads", str(threads()), *targets]
    if cccl is not None:
        options.append(f"-I{cccl}")

    def compile_one(source: Path) -> None:
        command = [nvcc, *options, str(source), "-o", str(out / f"{source.stem}.fatbin")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(compile_one, kernels()))


def find_nvcc(chosen: str | None, toolchain: Toolchain) -> str:
    beside = Path(toolchain.ptxas_path).with_name("nvcc")
    found = chosen or (str(beside) if os.access(beside, os.X_OK) else shutil.which("nvcc"))
    if not found:
        raise SystemExit("there is no nvcc: install nvidia-cuda-nvcc or the toolkit, or name it with --nvcc")
    return found


def version_of(nvcc: str) -> str:
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[-2]


def cores() -> int:
    return len(os.sched_getaffinity(0))


def threads() -> int:
    """Return the threads for each nvcc, so that six of them use all CPUs."""
    return max(1, -(-cores() // len(kernels())))


def kernels() -> list[Path]:
    return sorted(KERNELS.glob("*.cu"))


def small(count: int) -> dict[str, str]:
    return {f"kernel_{number}.cu": SMALL.format(number=number) for number in range(count)}


def write_project(
    root: Path,
    sources: Sequence[Path] | Mapping[str, str],
    cuda: str | None,
    sharing: str = "none",
    *,
    precompile: bool = True,
) -> Path:
    """Write a project; without a CUDA line, one without the hook."""
    package = root / "src/benchmark_pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    texts = sources if isinstance(sources, Mapping) else {path.name: path.read_text() for path in sources}
    for name, text in texts.items():
        (package / name).write_text(text)
    archs = ", ".join(f'"sm_{cc}"' for cc in CCS)
    hook = HOOK.format(cuda=cuda, archs=archs, sharing=sharing, precompile=str(precompile).lower()) if cuda else ""
    (root / "pyproject.toml").write_text(PROJECT + hook)
    return root


def cubin_bytes(root: Path) -> int:
    (wheel,) = (root / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sizes = [info.file_size for info in archive.infolist() if info.filename.endswith(".cubin")]
    assert len(sizes) == len(CCS) * len(kernels())
    return sum(sizes)


def measure(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[Cost]]:
    """Call everything `rounds` times in turn, so that what changes with time meets all alike."""
    costs: dict[str, list[Cost]] = {name: [] for name in calls}
    for number in range(rounds):
        for name, call in calls.items():
            before, start = cpu_of_children(), time.perf_counter()
            call()
            cost = Cost(time.perf_counter() - start, cpu_of_children() - before)
            costs[name].append(cost)
            print(f"{number + 1}/{rounds} {name}: {cost.wall:.2f} s, CPU {cost.cpu:.2f} s", file=sys.stderr, flush=True)
    return costs


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def median(costs: Sequence[Cost], what: str) -> float:
    return statistics.median(getattr(cost, what) for cost in costs)


def spread(costs: Sequence[Cost], what: str) -> tuple[float, float] | None:
    if len(costs) < 2:
        return None
    low, _, high = statistics.quantiles([getattr(cost, what) for cost in costs], n=4, method="inclusive")
    return low, high


def compared(name: str, ours: Sequence[Cost], theirs: Sequence[Cost], what: str, goal: float | None = None) -> Line:
    """Return a line whose ratio is the median of those of each round, as both were measured one after the other."""
    pairs = zip(ours, theirs, strict=True)
    ratio = statistics.median(getattr(one, what) / getattr(other, what) for one, other in pairs)
    return Line(name, median(ours, what), "s", spread(ours, what), ratio=ratio, goal=goal)


if __name__ == "__main__":
    main()
