// Vec for AVX2 with FMA. See vec.h.
#pragma once

namespace VLLM_KERNEL_NAMESPACE {

using Vec = __m256;
inline constexpr int kLanes = 8;

VLLM_INLINE __m256i first_lanes(int64_t n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
}

VLLM_INLINE Vec zero() { return _mm256_setzero_ps(); }
VLLM_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
VLLM_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
VLLM_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
VLLM_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
VLLM_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
VLLM_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
VLLM_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
VLLM_INLINE Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
VLLM_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }    // a*b + c
VLLM_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a*b
VLLM_INLINE Vec round_nearest(Vec a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// a * 2^n for whole n in [-126, 128]; in two factors, since 2^128 is no float.
VLLM_INLINE Vec scale_by_power(Vec a, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i rest = _mm256_sub_epi32(whole, half);
  const __m256i bias = _mm256_set1_epi32(127);
  const Vec x = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const Vec y = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return mul(mul(a, x), y);
}
VLLM_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  const Vec mask = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(mask, magnitude), _mm256_and_ps(mask, sign));
}
// a < b ? x : y, lane by lane.
VLLM_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
// Bit i says whether a < b in lane i.
VLLM_INLINE uint32_t lanes_less(Vec a, Vec b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
}
// lane < n ? x : y.
VLLM_INLINE Vec select_first(int64_t n, Vec x, Vec y) {
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(first_lanes(n)));
}
// bit `lane` of bits ? x : y.
VLLM_INLINE Vec select_bits(uint64_t bits, Vec x, Vec y) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits & 0xff));
  const __m256i mask = _mm256_cmpeq_epi32(_mm256_and_si256(all, lane), lane);
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(mask));
}
VLLM_INLINE float reduce_add(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
VLLM_INLINE float reduce_max(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

VLLM_INLINE __m128i narrow_bf16(Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
VLLM_INLINE Vec widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
VLLM_INLINE Vec round_bf16(Vec x) { return widen_bf16(narrow_bf16(x)); }

VLLM_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
VLLM_INLINE Vec load(const bf16* p) {
  return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
VLLM_INLINE Vec load_n(const float* p, int64_t n) { return _mm256_maskload_ps(p, first_lanes(n)); }
VLLM_INLINE Vec load_n(const bf16* p, int64_t n) {
  bf16 buffer[kLanes] = {};
  std::memcpy(buffer, p, static_cast<size_t>(n) * sizeof(bf16));
  return load(buffer);
}
VLLM_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
VLLM_INLINE void store(bf16* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(x));
}
VLLM_INLINE void store_n(float* p, Vec x, int64_t n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
VLLM_INLINE void store_n(bf16* p, Vec x, int64_t n) {
  bf16 buffer[kLanes];
  store(buffer, x);
  std::memcpy(p, buffer, static_cast<size_t>(n) * sizeof(bf16));
}

}  // namespace VLLM_KERNEL_NAMESPACE
