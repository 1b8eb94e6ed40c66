// How often each byte occurs.
#include <cub/block/block_histogram.cuh>
#include <cub/block/block_load.cuh>

constexpr int BLOCK = 128;
constexpr int ITEMS = 4;

extern "C" __global__ void block_histogram(const unsigned char* in, unsigned* counts) {
    using Histogram = cub::BlockHistogram<unsigned char, BLOCK, ITEMS, 256, cub::BLOCK_HISTO_ATOMIC>;
    __shared__ typename Histogram::TempStorage shared;
    __shared__ unsigned bins[256];
    unsigned char items[ITEMS];
    cub::LoadDirectBlocked(threadIdx.x, in + blockIdx.x * BLOCK * ITEMS, items);
    Histogram(shared).Histogram(items, bins);
    __syncthreads();
    for (int bin = threadIdx.x; bin < 256; bin += BLOCK) {
        atomicAdd(&counts[bin], bins[bin]);
    }
}
