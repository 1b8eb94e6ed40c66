#pragma once

#include "detail/convert.cuh"

namespace ours {

template <typename T>
__device__ T affine(float a, T x, T y) {
    return from_float<T>(a * to_float(x) + to_float(y) + SHIFT);
}

}  // namespace ours
