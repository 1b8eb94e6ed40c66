// Variables that the host sets by name, each with an initial value that a compiler might fold into the kernel.

struct Params {
    float a;
    double b;
    int c;
};

__constant__ float scale = 2.0f;
__constant__ Params params = {1.0f, 2.0, 3};
__constant__ float weights[8] = {0, 1, 2, 3, 4, 5, 6, 7};
__device__ int offset = 10;
__device__ int unset;
static __constant__ float hidden_scale = 3.0f;
static __device__ int hidden_offset = 20;

namespace {
__constant__ double inner = 4.0;
}

namespace ns {
__constant__ int named = 5;
}

extern "C" __global__ void read_all(double* out) {
    out[0] = scale;
    out[1] = params.a;
    out[2] = params.b;
    out[3] = params.c;
    out[4] = weights[0];
    out[5] = weights[3];
    out[6] = weights[7];
    out[7] = offset;
    out[8] = unset;
    out[9] = hidden_scale;
    out[10] = hidden_offset;
    out[11] = inner;
    out[12] = ns::named;
}
