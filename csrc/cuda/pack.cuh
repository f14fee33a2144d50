// Elements of a kernel: conversion to float and back, and packs of 16 bytes, the widest access of a
// thread. `dispatch_float` turns a tensor's dtype into an element type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/cuda_check.h"
#include "core/cuda_launch.h"

namespace vllm::cuda {

using bf16 = __nv_bfloat16;
using half = __half;

inline constexpr int kPackBytes = 16;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<T, half>) {
    return __float2half_rn(x);
  } else {
    return x;
  }
}

// The nearest float that T can hold.
template <typename T>
__device__ __forceinline__ float round_to(float x) {
  return to_float(from_float<T>(x));
}

// Two neighbours of a pack of 16-bit numbers, for which the device has instructions.
template <typename T>
using Pair = std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat162, __half2>;

template <typename T>
__device__ __forceinline__ Pair<T> round_pair(float x, float y) {
  if constexpr (std::is_same_v<T, bf16>) {
    return __floats2bfloat162_rn(x, y);
  } else {
    return __floats2half2_rn(x, y);
  }
}

template <typename T>
struct alignas(kPackBytes) Pack {
  static constexpr int kSize = kPackBytes / sizeof(T);
  T item[kSize];
};

// A pack as the four registers that it takes. Copies of a struct of 16-bit numbers would be split
// into accesses of two or four bytes.
template <typename T>
__device__ __forceinline__ uint4 bits_of(const Pack<T>& pack) {
  return *reinterpret_cast<const uint4*>(pack.item);
}

template <typename T>
__device__ __forceinline__ Pack<T> pack_of(const uint4& bits) {
  Pack<T> pack;
  *reinterpret_cast<uint4*>(pack.item) = bits;
  return pack;
}

// One store of 16 bytes to global memory; a plain one may be split into four.
__device__ __forceinline__ void store_bits(void* target, const uint4& bits) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(target)), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                 "r"(bits.w)
               : "memory");
}

// All elements as floats. Of bfloat16 these are the bits at their place: one instruction each,
// where a conversion after taking a pair apart is two.
template <typename T>
__device__ __forceinline__ void unpack(const Pack<T>& pack, float (&out)[Pack<T>::kSize]) {
  if constexpr (std::is_same_v<T, bf16>) {
    const uint4 bits = bits_of(pack);
    const uint32_t pairs[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = __uint_as_float(pairs[i] << 16);
      out[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int e = 0; e < Pack<T>::kSize; ++e) out[e] = to_float(pack.item[e]);
  }
}

// The two floats of f(e) for every even e, rounded to T.
template <typename T, typename F>
__device__ __forceinline__ Pack<T> map_pairs(const F& f) {
  Pack<T> result;
#pragma unroll
  for (int e = 0; e < Pack<T>::kSize; e += 2) {
    const float2 y = f(e);
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<Pair<T>*>(result.item + e) = round_pair<T>(y.x, y.y);
    } else {
      result.item[e] = y.x;
      result.item[e + 1] = y.y;
    }
  }
  return result;
}

// x * y, rounded once: a product of two 16-bit numbers is exact in float32.
template <typename T>
__device__ __forceinline__ Pack<T> multiply_packs(const Pack<T>& x, const Pack<T>& y) {
  Pack<T> result;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int e = 0; e < Pack<T>::kSize; e += 2) {
      *reinterpret_cast<Pair<T>*>(result.item + e) =
          __hmul2(*reinterpret_cast<const Pair<T>*>(x.item + e),
                  *reinterpret_cast<const Pair<T>*>(y.item + e));
    }
  } else {
#pragma unroll
    for (int e = 0; e < Pack<T>::kSize; ++e) result.item[e] = x.item[e] * y.item[e];
  }
  return result;
}

// Elements begin ... begin + kSize - 1 of a row of n, zeros beyond its end. `is_packed`: every pack
// of the row lies on 16 bytes and is whole.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* row, int64_t begin, int64_t n,
                                             bool is_packed) {
  if (is_packed) {
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (begin < n) bits = *reinterpret_cast<const uint4*>(row + begin);
    return pack_of<T>(bits);
  }
  Pack<T> pack{};
#pragma unroll
  for (int e = 0; e < Pack<T>::kSize; ++e) {
    if (begin + e < n) pack.item[e] = row[begin + e];
  }
  return pack;
}

template <typename T>
__device__ __forceinline__ void store_pack(T* row, int64_t begin, int64_t n, bool is_packed,
                                           const Pack<T>& pack) {
  if (is_packed) {
    if (begin < n) store_bits(row + begin, bits_of(pack));
  } else {
#pragma unroll
    for (int e = 0; e < Pack<T>::kSize; ++e) {
      if (begin + e < n) row[begin + e] = pack.item[e];
    }
  }
}

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls f(TypeTag<T>{}) with the element type of a dtype that check_float_dtype has accepted.
template <typename F>
void dispatch_float(ScalarType type, F&& f) {
  if (type == ScalarType::Float) {
    f(TypeTag<float>{});
  } else if (type == ScalarType::BFloat16) {
    f(TypeTag<bf16>{});
  } else {
    f(TypeTag<half>{});
  }
}

}  // namespace vllm::cuda
