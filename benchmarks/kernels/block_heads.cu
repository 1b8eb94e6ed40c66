// Marks where runs of equal items begin.
#include <cub/block/block_discontinuity.cuh>
#include <cub/block/block_load.cuh>
#include <cub/block/block_store.cuh>
#include <cuda/std/functional>

constexpr int BLOCK = 256;
constexpr int ITEMS = 4;

extern "C" __global__ void block_heads(const int* in, int* heads) {
    using Discontinuity = cub::BlockDiscontinuity<int, BLOCK>;
    __shared__ typename Discontinuity::TempStorage shared;
    const int first = blockIdx.x * BLOCK * ITEMS;
    int items[ITEMS], flags[ITEMS];
    cub::LoadDirectBlocked(threadIdx.x, in + first, items);
    Discontinuity(shared).FlagHeads(flags, items, cuda::std::not_equal_to<>{});
    cub::StoreDirectBlocked(threadIdx.x, heads + first, flags);
}
