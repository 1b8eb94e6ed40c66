// Softmax of rows of 128 numbers, one warp a row.
#include <cub/block/block_load.cuh>
#include <cub/block/block_store.cuh>
#include <cub/warp/warp_reduce.cuh>

constexpr int WARPS = 4;
constexpr int ITEMS = 4;

extern "C" __global__ void warp_softmax(const float* in, float* out) {
    using Reduce = cub::WarpReduce<float>;
    __shared__ typename Reduce::TempStorage shared[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = (blockIdx.x * WARPS + warp) * 32 * ITEMS;
    float items[ITEMS];
    cub::LoadDirectBlocked(lane, in + first, items);
    float largest = items[0];
    for (int i = 1; i < ITEMS; ++i) {
        largest = fmaxf(largest, items[i]);
    }
    largest = Reduce(shared[warp]).Reduce(largest, cuda::maximum<>{});
    largest = __shfl_sync(0xffffffff, largest, 0);
    float sum = 0;
    for (int i = 0; i < ITEMS; ++i) {
        items[i] = __expf(items[i] - largest);
        sum += items[i];
    }
    sum = Reduce(shared[warp]).Sum(sum);
    sum = __shfl_sync(0xffffffff, sum, 0);
    for (int i = 0; i < ITEMS; ++i) {
        items[i] = __fdividef(items[i], sum);
    }
    cub::StoreDirectBlocked(lane, out + first, items);
}
