// Activations of experts that no op has alone, on one row.
#pragma once

#include "cpu/vec.h"

namespace VLLM_KERNEL_NAMESPACE {

// The 2 * kLanes elements from p on: those of even places, those of odd.
VLLM_INLINE void load_alternating(const float* p, Vec& even, Vec& odd) {
  const Vec a = load(p), b = load(p + kLanes);
#if VLLM_ISA_AVX2
  // Within each half of the register; the four pairs come in the order 0, 2, 1, 3.
  const auto in_order = [](Vec x) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), _MM_SHUFFLE(3, 1, 2, 0)));
  };
  even = in_order(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0)));
  odd = in_order(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
#else
  const __m512i lane = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  even = _mm512_permutex2var_ps(a, lane, b);
  odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(lane, _mm512_set1_epi32(1)), b);
#endif
}
VLLM_INLINE void load_alternating(const bf16* p, Vec& even, Vec& odd) {
#if VLLM_ISA_AVX2
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
#else
  const __m512i pairs = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
#endif
}

// What is not a number stays so: of two operands min and max then give the second.
struct Relu2 {
  VLLM_INLINE static Vec apply(Vec x) {
    const Vec positive = max(zero(), x);
    return mul(positive, positive);
  }
};

VLLM_INLINE Vec clamped_gate(Vec gate, Vec up, float alpha, float limit) {
  gate = min(set1(limit), gate);
  up = max(set1(-limit), min(set1(limit), up));
  return mul(mul(add(up, set1(1.0f)), gate), sigmoid(mul(set1(alpha), gate)));
}

// out[i] = (up + 1) * gate * sigmoid(alpha * gate) of gate = min(x[2 i], limit) and up = x[2 i + 1]
// within plus and minus limit.
template <typename T>
VLLM_INLINE void clamped_gate_row(T* out, const T* x, int64_t n, float alpha, float limit) {
  Vec gate, up;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    load_alternating(x + 2 * i, gate, up);
    store(out + i, clamped_gate(gate, up, alpha, limit));
  }
  if (i < n) {
    const int64_t rest = n - i;
    T last[2 * kLanes] = {};
    std::memcpy(last, x + 2 * i, static_cast<size_t>(2 * rest) * sizeof(T));
    load_alternating(last, gate, up);
    store_n(out + i, clamped_gate(gate, up, alpha, limit), rest);
  }
}

}  // namespace VLLM_KERNEL_NAMESPACE
