// Normalisation of one row; used by the norm ops and by the fused decoder layers, which therefore
// agree bit for bit.
#pragma once

#include <cmath>

#include "cpu/vec.h"

namespace VLLM_KERNEL_NAMESPACE {

// 1 / sqrt(mean(x^2) + epsilon); the order of the sum depends on n only.
template <typename T>
VLLM_INLINE float inverse_rms(const T* x, int64_t n, float epsilon) {
  Vec sum0 = zero(), sum1 = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const Vec a = load(x + i), b = load(x + i + kLanes);
    sum0 = fma(a, a, sum0);
    sum1 = fma(b, b, sum1);
  }
  for (; i < n; i += kLanes) {
    const Vec a = n - i >= kLanes ? load(x + i) : load_n(x + i, n - i);
    sum0 = fma(a, a, sum0);
  }
  const float mean = reduce_add(add(sum0, sum1)) / static_cast<float>(n);
  return 1.0f / std::sqrt(mean + epsilon);
}

// A weight of the model's type multiplies what was rounded to that type; a float32 weight beside
// a narrower type multiplies before the rounding (Gemma's 1 + w).
template <typename T, typename W>
VLLM_INLINE Vec scale_normed(Vec x, Vec weight) {
  if constexpr (sizeof(W) == sizeof(T)) x = round_to<T>(x);
  return mul(x, weight);
}

// out[i] = x[i] * inverse_rms(x) * weight[i]; out may be x.
template <typename T, typename W>
VLLM_INLINE void rms_norm_row(T* out, const T* x, const W* weight, int64_t n, float epsilon) {
  const Vec scale = set1(inverse_rms(x, n, epsilon));
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(out + i, scale_normed<T, W>(mul(load(x + i), scale), load(weight + i)));
  }
  if (i < n) {
    const int64_t rest = n - i;
    const Vec y = mul(load_n(x + i, rest), scale);
    store_n(out + i, scale_normed<T, W>(y, load_n(weight + i, rest)), rest);
  }
}

// residual[i] += x[i], rounded to T.
template <typename T>
VLLM_INLINE void add_row(T* residual, const T* x, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(residual + i, add(load(x + i), load(residual + i)));
  if (i < n) {
    const int64_t rest = n - i;
    store_n(residual + i, add(load_n(x + i, rest), load_n(residual + i, rest)), rest);
  }
}

}  // namespace VLLM_KERNEL_NAMESPACE
