// Kernels whose source travels in the wheel, so that further instantiations are compiled where the package is used.

#include "affine.cuh"

namespace {

__device__ int hidden = 7;

}  // namespace

__constant__ float factors[4] = {1, 2, 3, 4};
__device__ int counter = 5;

namespace ours {

// y = a * x + y + SHIFT
template <typename T>
__global__ void axpy(float a, const T* x, T* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = affine(a, x[i], y[i]);
}

}  // namespace ours

// Writes how the compiler calls this file; N tells instantiations apart.
template <int N>
__global__ void file_name(char* out, int size) {
    const char* name = __FILE__;
    for (int i = 0; i < size && name[i]; ++i) out[i] = name[i];
}

// Reads the variables.
extern "C" __global__ void read_variables(float* out) {
    for (int i = 0; i < 4; ++i) out[i] = factors[i];
    out[4] = counter++;
    out[5] = hidden;
}
