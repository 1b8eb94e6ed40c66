// Adds to counts[bin] how many bytes of `data` are in that bin. Bytes of bins from `bins` on are not counted.
#include "grid.cuh"

struct Table {
    unsigned char bin[256];

    __host__ __device__ constexpr Table() : bin() {
        for (int byte = 0; byte < 256; ++byte) {
            bin[byte] = static_cast<unsigned char>(byte);
        }
    }
};

// The bin of each byte value. At first every value is its own bin; the host may set another table.
__constant__ Table bin_of;

extern "C" __global__ void histogram(const unsigned char* data, long long n, unsigned int* counts, int bins) {
    // Constant memory serves one address at a time, but the lanes of a warp look up 32 of them.
    __shared__ Table table;
    __shared__ unsigned int block_counts[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) {
        table.bin[i] = bin_of.bin[i];
        block_counts[i] = 0;
    }
    __syncthreads();
    for (long long i = grid_index(); i < n; i += grid_size()) {
        atomicAdd(&block_counts[table.bin[data[i]]], 1u);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) {
        if (block_counts[bin] > 0) {
            atomicAdd(&counts[bin], block_counts[bin]);
        }
    }
}
