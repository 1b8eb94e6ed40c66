// Inclusive prefix sums within each block.
#include <cub/block/block_load.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_store.cuh>

constexpr int BLOCK = 128;
constexpr int ITEMS = 4;

extern "C" __global__ void block_scan(const int* in, int* sums) {
    using Load = cub::BlockLoad<int, BLOCK, ITEMS, cub::BLOCK_LOAD_TRANSPOSE>;
    using Store = cub::BlockStore<int, BLOCK, ITEMS, cub::BLOCK_STORE_TRANSPOSE>;
    using Scan = cub::BlockScan<int, BLOCK>;
    __shared__ union {
        typename Load::TempStorage load;
        typename Store::TempStorage store;
        typename Scan::TempStorage scan;
    } shared;
    const int first = blockIdx.x * BLOCK * ITEMS;
    int items[ITEMS];
    Load(shared.load).Load(in + first, items);
    __syncthreads();
    Scan(shared.scan).InclusiveSum(items, items);
    __syncthreads();
    Store(shared.store).Store(sums + first, items);
}
