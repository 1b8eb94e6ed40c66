// Sorts the keys of each block.
#include <cub/block/block_load.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_store.cuh>

constexpr int BLOCK = 128;
constexpr int ITEMS = 4;

extern "C" __global__ void block_sort(const unsigned* in, unsigned* out) {
    using Sort = cub::BlockRadixSort<unsigned, BLOCK, ITEMS>;
    __shared__ typename Sort::TempStorage shared;
    const int first = blockIdx.x * BLOCK * ITEMS;
    unsigned keys[ITEMS];
    cub::LoadDirectStriped<BLOCK>(threadIdx.x, in + first, keys);
    Sort(shared).SortBlockedToStriped(keys);
    cub::StoreDirectStriped<BLOCK>(threadIdx.x, out + first, keys);
}
