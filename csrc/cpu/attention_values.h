// The second product of attention: weights times values; included by kernels only.
#pragma once

#include "cpu/attention_pack.h"
#include "cpu/kernels/attention.h"

namespace VLLM_KERNEL_NAMESPACE {

// acc := acc * decay + weights times values, for the keys of one block.
template <typename T>
struct ValueSum {
  const T* weights;    // [rows, kBlockKeys]
  T* packed;           // room for a packed block of values
  float* acc;          // [rows, value_cols]
  const float* decay;  // [rows]
  int64_t rows, count, head_size;

  VLLM_INLINE int64_t value_cols() const { return num_blocks(head_size) * kBlockCols; }
};

// On tiles of packed values: for any number of rows.
template <typename T, typename Fetch>
VLLM_INLINE void add_packed_values(const ValueSum<T>& sum, const char* const* value_rows,
                                   Fetch& prefetch) {
  const int64_t block_size = block_elements<T>(kBlockKeys), cols = sum.value_cols();
  pack_values(sum.packed, block_size, value_rows, sum.count, sum.head_size, prefetch);
  for (int64_t c = 0; c < cols; c += kBlockCols) {
    float* acc = sum.acc + c;
    const float* decay = sum.decay;
    multiply_block(
        sum.weights, kBlockKeys, sum.rows, sum.packed + c / kBlockCols * block_size, sum.count,
        prefetch,
        [=](int64_t r, int v) { return mul(load(acc + r * cols + v * kLanes), set1(decay[r])); },
        [=](int64_t r, int v, Vec x) { store(acc + r * cols + v * kLanes, x); });
  }
}

#if !VLLM_ISA_AVX2

// The same sums, with pairs of values that never leave the registers: for a few rows, where packing
// would cost as much as multiplying.
template <int R, typename Fetch>
VLLM_INLINE void add_unpacked_values(const ValueSum<bf16>& sum, const char* const* value_rows,
                                     Fetch& prefetch) {
  const int64_t cols = sum.value_cols();
  for (int64_t c = 0; c < sum.head_size; c += kBlockCols) {
    const int64_t width = sum.head_size - c < kBlockCols ? sum.head_size - c : kBlockCols;
    Vec acc[R][kVecs];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        acc[r][v] = mul(load(sum.acc + r * cols + c + v * kLanes), set1(sum.decay[r]));
      }
    }
    for (int64_t key = 0; key < sum.count; key += 2) {
      const bf16* a = reinterpret_cast<const bf16*>(value_rows[key]) + c;
      const bf16* b = reinterpret_cast<const bf16*>(value_rows[key + 1]) + c;
      __m512i pairs[kVecs];
      interleave_rows(a, b, width, pairs[0], pairs[1]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const int weights = load_pair(sum.weights + r * kBlockKeys + key);
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) acc[r][v] = add_pairs(acc[r][v], weights, pairs[v]);
      }
      if (key % 4 == 0) prefetch.step();
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) store(sum.acc + r * cols + c + v * kLanes, acc[r][v]);
    }
  }
}

template <typename Fetch>
VLLM_INLINE void add_values(const ValueSum<bf16>& sum, const char* const* value_rows,
                            Fetch& prefetch) {
#define VLLM_ROWS(R) \
  case R:            \
    return add_unpacked_values<R>(sum, value_rows, prefetch)
  switch (sum.rows) {
    VLLM_ROWS(1);
    VLLM_ROWS(2);
    VLLM_ROWS(3);
    VLLM_ROWS(4);
    VLLM_ROWS(5);
    VLLM_ROWS(6);
    VLLM_ROWS(7);
    VLLM_ROWS(8);
    default:
      return add_packed_values(sum, value_rows, prefetch);
  }
#undef VLLM_ROWS
}

#else

template <typename Fetch>
VLLM_INLINE void add_values(const ValueSum<bf16>& sum, const char* const* value_rows,
                            Fetch& prefetch) {
  add_packed_values(sum, value_rows, prefetch);
}

#endif

template <typename Fetch>
VLLM_INLINE void add_values(const ValueSum<float>& sum, const char* const* value_rows,
                            Fetch& prefetch) {
  add_packed_values(sum, value_rows, prefetch);
}

}  // namespace VLLM_KERNEL_NAMESPACE
