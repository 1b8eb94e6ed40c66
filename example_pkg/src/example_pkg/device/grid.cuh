// Where a thread stands in a one-dimensional grid. 64 bits, so that arrays may have more than 2^31 elements.
#pragma once

__device__ inline long long grid_index() {
    return blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
}

__device__ inline long long grid_size() {
    return gridDim.x * static_cast<long long>(blockDim.x);
}
