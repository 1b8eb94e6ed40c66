// softmax over each row of a rows x cols matrix; y may be x. One warp per row, sums in float.
#include <math_constants.h>

#include "compute.cuh"
#include "grid.cuh"
#include "warp.cuh"

constexpr int BLOCK = 128;  // four warps, so four rows at a time; a warpgroup of Hopper

template <class T>
__global__ void __launch_bounds__(BLOCK, 8) softmax(const T* x, T* y, long long rows, long long cols) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    // A Hopper instruction, in sm_90a alone: the warpgroup hands registers back to its block, here just to show that
    // such code may stand beside code for all. The results are the same.
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#endif
    const int lane = threadIdx.x % WARP;
    for (long long row = grid_index() / WARP; row < rows; row += grid_size() / WARP) {
        const T* in = x + row * cols;
        T* out = y + row * cols;

        float max = -CUDART_INF_F;
        for (long long i = lane; i < cols; i += WARP) {
            max = fmaxf(max, static_cast<float>(in[i]));
        }
        max = warp_max(max);

        float sum = 0;
        for (long long i = lane; i < cols; i += WARP) {
            sum += expf(static_cast<float>(in[i]) - max);
        }
        sum = warp_sum(sum);

        for (long long i = lane; i < cols; i += WARP) {
            out[i] = static_cast<T>(expf(static_cast<float>(in[i]) - max) / sum);
        }
    }
}
