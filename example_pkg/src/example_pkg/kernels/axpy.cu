// y = a * x + y
#include "compute.cuh"
#include "grid.cuh"

template <class T>
__global__ void axpy(T a, const T* x, T* y, long long n) {
    using C = compute_t<T>;
    for (long long i = grid_index(); i < n; i += grid_size()) {
        y[i] = static_cast<T>(static_cast<C>(a) * static_cast<C>(x[i]) + static_cast<C>(y[i]));
    }
}
