// One float vector type, `Vec`, over the instruction sets; included by kernels only.
//
// Loads and stores take float or bf16 memory and convert (bf16 rounds to nearest even), the `_n`
// forms touch only the first n < kLanes elements (the others read as 0). Nothing here fuses or
// reorders on its own: what a row computes is fixed by the calls, whatever the compiler inlines.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/types.h"

#define VLLM_KERNEL_NAMESPACE vllm::cpu::VLLM_ISA
#define VLLM_INLINE inline __attribute__((always_inline))

#if VLLM_ISA_AVX2
#include "cpu/vec_avx2.h"
#else
#include "cpu/vec_avx512.h"
#endif

namespace VLLM_KERNEL_NAMESPACE {

VLLM_INLINE float to_float(float x) { return x; }
VLLM_INLINE float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
VLLM_INLINE T from_float(float x);
template <>
VLLM_INLINE float from_float<float>(float x) {
  return x;
}
template <>
VLLM_INLINE bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40)};
  return bf16{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// x as it reads after having been stored as T.
template <typename T>
VLLM_INLINE Vec round_to(Vec x);
template <>
VLLM_INLINE Vec round_to<float>(Vec x) {
  return x;
}
template <>
VLLM_INLINE Vec round_to<bf16>(Vec x) {
  return round_bf16(x);
}

// e^x, relative error below 2e-7; exactly 1 at 0; 0 below -87.3; x must not be NaN where used.
VLLM_INLINE Vec exp(Vec x) {
  x = max(x, set1(-87.33654f));
  x = min(x, set1(88.72283f));
  const Vec n = round_nearest(mul(x, set1(1.44269504f)));
  Vec r = fnma(n, set1(0.693359375f), x);
  r = fnma(n, set1(-2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  return scale_by_power(p, n);
}

// 2^x for x <= 0 to be stored as T, exactly 1 at 0: relative error below 3e-7 for float, 1.1e-4 for
// bf16 (a twentieth of a rounding step). Fits of 2^r on [-1/2, 1/2], weighted by relative error.
template <typename T>
VLLM_INLINE Vec exp2_for(Vec x) {
  x = max(x, set1(-126.0f));
  const Vec n = round_nearest(x);
  const Vec r = sub(x, n);
  Vec p;
  if constexpr (sizeof(T) == 4) {
    p = set1(1.3264727313e-03f);
    p = fma(p, r, set1(9.6715129912e-03f));
    p = fma(p, r, set1(5.5507335812e-02f));
    p = fma(p, r, set1(2.4022242427e-01f));
    p = fma(p, r, set1(6.9314700365e-01f));
  } else {
    p = set1(5.5008929223e-02f);
    p = fma(p, r, set1(2.4221095443e-01f));
    p = fma(p, r, set1(6.9328290224e-01f));
  }
  return scale_by_power(fma(p, r, set1(1.0f)), n);
}

// tanh(x), absolute error below 3e-7.
VLLM_INLINE Vec tanh(Vec x) {
  const Vec a = min(abs(x), set1(10.0f));
  const Vec e = exp(mul(a, set1(2.0f)));
  const Vec t = sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
  // Near 0 the difference above cancels; the odd polynomial does not.
  const Vec s = mul(x, x);
  Vec p = set1(-5.70498872745e-3f);
  p = fma(p, s, set1(2.06390887954e-2f));
  p = fma(p, s, set1(-5.37397155531e-2f));
  p = fma(p, s, set1(1.33314422036e-1f));
  p = fma(p, s, set1(-3.33332819422e-1f));
  const Vec small = fma(mul(p, s), x, x);
  return select_less(abs(x), set1(0.625f), small, copy_sign(t, x));
}

// 1 / (1 + e^-x).
VLLM_INLINE Vec sigmoid(Vec x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

}  // namespace VLLM_KERNEL_NAMESPACE
