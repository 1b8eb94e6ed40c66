// Reductions over the 32 lanes of a warp. All lanes take part, and all get the result.
#pragma once

constexpr int WARP = 32;

__device__ inline float warp_max(float value) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, step));
    }
    return value;
}

__device__ inline float warp_sum(float value) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(0xffffffff, value, step);
    }
    return value;
}
