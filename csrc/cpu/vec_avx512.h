// Vec for AVX-512 (F, BW, VL, DQ), with or without BF16. See vec.h.
#pragma once

namespace VLLM_KERNEL_NAMESPACE {

using Vec = __m512;
inline constexpr int kLanes = 16;

VLLM_INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

VLLM_INLINE Vec zero() { return _mm512_setzero_ps(); }
VLLM_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
VLLM_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
VLLM_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
VLLM_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
VLLM_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
VLLM_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
VLLM_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
VLLM_INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }
VLLM_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }    // a*b + c
VLLM_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a*b
VLLM_INLINE Vec round_nearest(Vec a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
VLLM_INLINE Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }  // a * 2^n
VLLM_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  const Vec mask = _mm512_set1_ps(-0.0f);
  return _mm512_or_ps(_mm512_andnot_ps(mask, magnitude), _mm512_and_ps(mask, sign));
}
// a < b ? x : y, lane by lane.
VLLM_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
// Bit i says whether a < b in lane i.
VLLM_INLINE uint32_t lanes_less(Vec a, Vec b) {
  return static_cast<uint32_t>(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ));
}
// lane < n ? x : y.
VLLM_INLINE Vec select_first(int64_t n, Vec x, Vec y) {
  return _mm512_mask_blend_ps(first_lanes(n), y, x);
}
// bit `lane` of bits ? x : y.
VLLM_INLINE Vec select_bits(uint64_t bits, Vec x, Vec y) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), y, x);
}
VLLM_INLINE float reduce_add(Vec a) { return _mm512_reduce_add_ps(a); }
VLLM_INLINE float reduce_max(Vec a) { return _mm512_reduce_max_ps(a); }

VLLM_INLINE __m256i narrow_bf16(Vec x) {
#if VLLM_ISA_AVX512_BF16
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
VLLM_INLINE Vec widen_bf16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
VLLM_INLINE Vec round_bf16(Vec x) { return widen_bf16(narrow_bf16(x)); }

VLLM_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
VLLM_INLINE Vec load(const bf16* p) {
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
VLLM_INLINE Vec load_n(const float* p, int64_t n) {
  return _mm512_maskz_loadu_ps(first_lanes(n), p);
}
VLLM_INLINE Vec load_n(const bf16* p, int64_t n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
VLLM_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
VLLM_INLINE void store(bf16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x));
}
VLLM_INLINE void store_n(float* p, Vec x, int64_t n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), x);
}
VLLM_INLINE void store_n(bf16* p, Vec x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(x));
}

}  // namespace VLLM_KERNEL_NAMESPACE
