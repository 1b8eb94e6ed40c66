"""How a build on a Dask cluster gets faster with its workers.

Six kernels that use CUB, for eight architectures, without a cache, on clusters of one-threaded workers of this machine, up to
as many as it has cores.  Needs `distributed`, a compiler, and no network.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from common import Line, parser, quartiles, report

from hatch_cuda_aot.build import compile_plan, plan_project
from hatch_cuda_aot.compile.parts import installed_line
from hatch_cuda_aot.compile.starter import default_jobs
from hatch_cuda_aot.config import load_config
from hatch_cuda_aot.plan import Plan

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120")
WORKERS = (1, 2, 4, 8, 16)

#: At this many workers the time may be at most that of one, over workers and over 0.7.
GOAL_AT, GOAL = 8, 1 / 0.7

NOTE = (
    f"The ratio is time times workers, over the time of one worker. 1 is linear; the goal of {GOAL:.2f} is 0.7 of linear. "
    "Each cluster is new, and its compilers are started within the time."
)

KERNELS = {
    "reduce": """
#include <cub/block/block_reduce.cuh>
extern "C" __global__ void reduce(const float* x, float* y) {
    using Block = cub::BlockReduce<float, 256>;
    __shared__ typename Block::TempStorage storage;
    float total = Block(storage).Sum(x[threadIdx.x]);
    if (threadIdx.x == 0) *y = total;
}
""",
    "scan": """
#include <cub/block/block_scan.cuh>
extern "C" __global__ void scan(float* x) {
    using Block = cub::BlockScan<float, 256>;
    __shared__ typename Block::TempStorage storage;
    Block(storage).InclusiveSum(x[threadIdx.x], x[threadIdx.x]);
}
""",
    "sort": """
#include <cub/block/block_load.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_store.cuh>
extern "C" __global__ void sort(int* x) {
    using Block = cub::BlockRadixSort<int, 128, 4>;
    __shared__ typename Block::TempStorage storage;
    int items[4];
    cub::LoadDirectBlocked(threadIdx.x, x, items);
    Block(storage).Sort(items);
    cub::StoreDirectBlocked(threadIdx.x, x, items);
}
""",
    "histogram": """
#include <cub/block/block_histogram.cuh>
extern "C" __global__ void histogram(const unsigned char* x, unsigned int* bins) {
    using Block = cub::BlockHistogram<unsigned char, 256, 4, 256>;
    __shared__ typename Block::TempStorage storage;
    unsigned char items[4];
    for (int i = 0; i < 4; ++i) items[i] = x[threadIdx.x * 4 + i];
    Block(storage).Histogram(items, bins);
}
""",
    "select": """
#include <cub/block/block_discontinuity.cuh>
#include <cub/block/block_scan.cuh>
struct Differ { __device__ bool operator()(int a, int b) const { return a != b; } };
extern "C" __global__ void select(const int* x, int* y) {
    using Flags = cub::BlockDiscontinuity<int, 256>;
    using Scan = cub::BlockScan<int, 256>;
    __shared__ union { typename Flags::TempStorage flags; typename Scan::TempStorage scan; } storage;
    int item[1] = {x[threadIdx.x]}, flag[1], place;
    Flags(storage.flags).FlagHeads(flag, item, Differ());
    __syncthreads();
    Scan(storage.scan).ExclusiveSum(flag[0], place);
    if (flag[0]) y[place] = item[0];
}
""",
    "merge": """
#include <cub/block/block_merge_sort.cuh>
struct Less { __device__ bool operator()(float a, float b) const { return a < b; } };
extern "C" __global__ void merge(float* x) {
    using Block = cub::BlockMergeSort<float, 128, 4>;
    __shared__ typename Block::TempStorage storage;
    float items[4];
    for (int i = 0; i < 4; ++i) items[i] = x[threadIdx.x * 4 + i];
    Block(storage).Sort(items, Less());
    for (int i = 0; i < 4; ++i) x[threadIdx.x * 4 + i] = items[i];
}
""",
}


def main() -> None:
    arguments = parser(__doc__, wheel=False)
    arguments.add_argument("--workers", type=int, nargs="+", help="sizes of the cluster", default=WORKERS)
    arguments.add_argument("--modules", type=int, default=len(KERNELS), help="how many; the kernels are repeated")
    given = arguments.parse_args()
    cores = default_jobs()
    sizes = [size for size in given.workers if size <= cores]
    times: dict[int, list[float]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(Path(folder), given.modules)
        for _ in range(given.rounds or 3):
            for size in sizes:
                times[size].append(measure(plan, size))
    medians = {size: statistics.median(found) for size, found in times.items()}
    lines = [
        Line(
            f"{size} {'worker' if size == 1 else 'workers'}",
            medians[size],
            "s",
            quartiles(times[size], 1) if len(times[size]) > 1 else None,
            ratio=medians[size] * size / medians[1] if 1 in medians else None,
            goal=GOAL if size == GOAL_AT else None,
        )
        for size in sizes
    ]
    report("dask_scaling", __doc__, lines, write=given.write, notes=[f"{plan}.", NOTE, versions(cores)])


def make_plan(root: Path, modules: int) -> Plan:
    (root / "pkg").mkdir()
    names = list(KERNELS)
    for number in range(modules):
        name = names[number % len(names)]
        (root / f"{name}{number}.cu").write_text(KERNELS[name])
    table = {"sources": ["*.cu"], "archs": list(ARCHS), "cuda": installed_line().version}
    return plan_project(load_config(root, table, {}, ["pkg"], {}))


def measure(plan: Plan, workers: int) -> float:
    """Return the seconds of a build on a cluster that was just started."""
    import dask.config
    from distributed import LocalCluster

    with LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        cluster.wait_for_workers(workers)
        with dask.config.set({"scheduler-address": cluster.scheduler_address}):
            start = time.perf_counter()
            compile_plan(plan, workers, Silence(), None, executor="dask")
            return time.perf_counter() - start


class Silence:
    """A `Reporter` that says nothing."""

    def planned(self, plan: Plan, tasks: int) -> None:
        """Say nothing."""

    def done(self, module: str, arch: str, step: str, log: str, *, cached: bool) -> None:
        """Say nothing."""


def versions(cores: int) -> str:
    import distributed

    return f"{cores} cores may be used; distributed {distributed.__version__}."


if __name__ == "__main__":
    os.environ.pop("DASK_SCHEDULER_ADDRESS", None)
    main()
