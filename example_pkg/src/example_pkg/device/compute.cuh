// compute_t<T>: the type in which values of the storage type T are computed. 16-bit types are only for storage.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T>
struct Compute {
    using type = T;
};

template <>
struct Compute<__half> {
    using type = float;
};

template <>
struct Compute<__nv_bfloat16> {
    using type = float;
};

template <class T>
using compute_t = typename Compute<T>::type;
