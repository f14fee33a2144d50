// Rotary embedding of one head; used by the rotary op and by the fused decoder layers, which
// therefore agree bit for bit.
#pragma once

#include "cpu/vec.h"

namespace VLLM_KERNEL_NAMESPACE {

// Turns pairs (x[i], x[i + half]) by the angles of one table row: half cosines, then half sines.
template <typename T>
VLLM_INLINE void rope_head_neox(T* x, const float* cos_sin, int64_t half) {
  const float* cos = cos_sin;
  const float* sin = cos_sin + half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec c = load(cos + i), s = load(sin + i);
    const Vec a = load(x + i), b = load(x + half + i);
    store(x + i, fnma(b, s, mul(a, c)));
    store(x + half + i, fma(a, s, mul(b, c)));
  }
  if (i < half) {
    const int64_t rest = half - i;
    const Vec c = load_n(cos + i, rest), s = load_n(sin + i, rest);
    const Vec a = load_n(x + i, rest), b = load_n(x + half + i, rest);
    store_n(x + i, fnma(b, s, mul(a, c)), rest);
    store_n(x + half + i, fma(a, s, mul(b, c)), rest);
  }
}

// Turns pairs (x[2i], x[2i + 1]).
template <typename T>
VLLM_INLINE void rope_head_interleaved(T* x, const float* cos_sin, int64_t half) {
  const float* cos = cos_sin;
  const float* sin = cos_sin + half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
    x[2 * i] = from_float<T>(a * cos[i] - b * sin[i]);
    x[2 * i + 1] = from_float<T>(b * cos[i] + a * sin[i]);
  }
}

template <typename T>
VLLM_INLINE void rope_head(T* x, const float* cos_sin, int64_t rot_dim, bool is_neox) {
  if (is_neox) {
    rope_head_neox(x, cos_sin, rot_dim / 2);
  } else {
    rope_head_interleaved(x, cos_sin, rot_dim / 2);
  }
}

}  // namespace VLLM_KERNEL_NAMESPACE
