#pragma once

#include <cuda_bf16.h>
#include <cuda/std/type_traits>

namespace ours {

template <typename T>
__device__ float to_float(T x) {
    return static_cast<float>(x);
}

template <typename T>
__device__ T from_float(float x) {
    static_assert(!cuda::std::is_pointer_v<T>);
    return static_cast<T>(x);
}

}  // namespace ours
