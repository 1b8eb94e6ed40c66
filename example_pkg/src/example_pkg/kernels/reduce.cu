// One sum per block. A second launch, of one block over the first one's sums, gives the total.
#include <cub/block/block_reduce.cuh>

#include "grid.cuh"

template <class T, int BLOCK>
__global__ void __launch_bounds__(BLOCK) block_sum(const T* x, long long n, T* sums) {
    using Reduce = cub::BlockReduce<T, BLOCK>;
    __shared__ typename Reduce::TempStorage storage;

    T sum = 0;
    for (long long i = grid_index(); i < n; i += grid_size()) {
        sum += x[i];
    }
    sum = Reduce(storage).Sum(sum);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = sum;
    }
}
