// The sum of each block's items.
#include <cub/block/block_load.cuh>
#include <cub/block/block_reduce.cuh>

constexpr int BLOCK = 256;
constexpr int ITEMS = 4;

extern "C" __global__ void block_reduce(const float* in, float* sums) {
    using Load = cub::BlockLoad<float, BLOCK, ITEMS, cub::BLOCK_LOAD_VECTORIZE>;
    using Reduce = cub::BlockReduce<float, BLOCK>;
    __shared__ typename Reduce::TempStorage shared;
    float items[ITEMS];
    Load().Load(in + blockIdx.x * BLOCK * ITEMS, items);
    const float sum = Reduce(shared).Sum(items);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = sum;
    }
}
