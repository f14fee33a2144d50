// Brings the K and V rows of a block of keys into the layout of packed weights (gemm.h), so that
// both products of attention run on the same tiles as linear layers; included by kernels only.
#pragma once

#include "cpu/gemm.h"

namespace VLLM_KERNEL_NAMESPACE {

#if VLLM_ISA_AVX2

// out[d][key] = rows[key][d] for 8 keys and `count` <= 8 dwords.
VLLM_INLINE void transpose_dwords(const char* const* rows, int64_t start, int64_t count,
                                  char* out) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) {
    const float* p = reinterpret_cast<const float*>(rows[i]) + start;
    r[i] = count == 8 ? load(p) : load_n(p, count);
  }
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
  float* target = reinterpret_cast<float*>(out);
  for (int i = 0; i < count; ++i) store(target + i * kBlockCols, t[i]);
}

// Two rows of 32 bf16 (count <= 32 of them) into 32 pairs.
VLLM_INLINE void interleave_rows(const bf16* a, const bf16* b, int64_t count, bf16* out) {
  bf16 padded[2][32] = {};
  if (count < 32) {
    std::memcpy(padded[0], a, static_cast<size_t>(count) * sizeof(bf16));
    std::memcpy(padded[1], b, static_cast<size_t>(count) * sizeof(bf16));
    a = padded[0];
    b = padded[1];
  }
  for (int i = 0; i < 32; i += 16) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + i));
    const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + i));
    const __m256i lo = _mm256_unpacklo_epi16(x, y), hi = _mm256_unpackhi_epi16(x, y);
    __m256i* target = reinterpret_cast<__m256i*>(out + 2 * i);
    _mm256_storeu_si256(target, _mm256_permute2x128_si256(lo, hi, 0x20));
    _mm256_storeu_si256(target + 1, _mm256_permute2x128_si256(lo, hi, 0x31));
  }
}

#else

// out[d][key] = rows[key][d] for 16 keys and `count` <= 16 dwords.
VLLM_INLINE void transpose_dwords(const char* const* rows, int64_t start, int64_t count,
                                  char* out) {
  __m512i r[16], t[16];
  const __mmask16 mask = first_lanes(count);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + start * 4);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4g + c] holds, in 128-bit lane l, dword 4l + c of keys 4g … 4g + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm512_shuffle_i32x4(t[c], t[4 + c], 0x88);
    r[8 + c] = _mm512_shuffle_i32x4(t[c], t[4 + c], 0xdd);
    r[4 + c] = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0x88);
    r[12 + c] = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i < count) _mm512_storeu_si512(out + i * kBlockCols * 4, r[i]);
  }
}

// Two rows of 32 bf16 (count <= 32 of them) into 32 pairs.
VLLM_INLINE void interleave_rows(const bf16* a, const bf16* b, int64_t count, __m512i& first,
                                 __m512i& second) {
  const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << count) - 1);
  const __m512i x = _mm512_maskz_loadu_epi16(mask, a);
  const __m512i y = _mm512_maskz_loadu_epi16(mask, b);
  const __m512i even =
      _mm512_set_epi32(0x002f000f, 0x002e000e, 0x002d000d, 0x002c000c, 0x002b000b, 0x002a000a,
                       0x00290009, 0x00280008, 0x00270007, 0x00260006, 0x00250005, 0x00240004,
                       0x00230003, 0x00220002, 0x00210001, 0x00200000);
  first = _mm512_permutex2var_epi16(x, even, y);
  second = _mm512_permutex2var_epi16(x, _mm512_add_epi16(even, _mm512_set1_epi16(16)), y);
}

VLLM_INLINE void interleave_rows(const bf16* a, const bf16* b, int64_t count, bf16* out) {
  __m512i first, second;
  interleave_rows(a, b, count, first, second);
  _mm512_storeu_si512(out, first);
  _mm512_storeu_si512(out + 32, second);
}

#endif

// K rows of `num_keys` keys (a multiple of 16) as packed blocks of 32 columns: columns are keys.
template <typename T, typename Fetch>
VLLM_INLINE void pack_keys(T* packed, const char* const* rows, int64_t num_keys, int64_t head_size,
                           Fetch& prefetch) {
  const int64_t dwords = head_size * static_cast<int64_t>(sizeof(T)) / 4;
  const int64_t block_bytes = block_elements<T>(head_size) * static_cast<int64_t>(sizeof(T));
  for (int64_t key = 0; key < num_keys; key += kLanes) {
    char* block =
        reinterpret_cast<char*>(packed) + key / kBlockCols * block_bytes + key % kBlockCols * 4;
    for (int64_t d = 0; d < dwords; d += kLanes) {
      const int64_t count = dwords - d < kLanes ? dwords - d : kLanes;
      transpose_dwords(rows + key, d, count, block + d * kBlockCols * 4);
      prefetch.step();
    }
  }
}

// V rows of `num_keys` keys (even) as packed blocks of 32 columns: columns are elements of the
// head. A block has room for all kBlockKeys keys.
template <typename Fetch>
VLLM_INLINE void pack_values(bf16* packed, int64_t block_size, const char* const* rows,
                             int64_t num_keys, int64_t head_size, Fetch& prefetch) {
  for (int64_t key = 0; key < num_keys; key += 2) {
    const bf16* a = reinterpret_cast<const bf16*>(rows[key]);
    const bf16* b = reinterpret_cast<const bf16*>(rows[key + 1]);
    bf16* out = packed + key * kBlockCols;
    for (int64_t c = 0; c < head_size; c += kBlockCols, out += block_size) {
      const int64_t count = head_size - c < kBlockCols ? head_size - c : kBlockCols;
      interleave_rows(a + c, b + c, count, out);
    }
    if (key % 4 == 0) prefetch.step();
  }
}

template <typename Fetch>
VLLM_INLINE void pack_values(float* packed, int64_t block_size, const char* const* rows,
                             int64_t num_keys, int64_t head_size, Fetch& prefetch) {
  for (int64_t key = 0; key < num_keys; ++key) {
    const float* row = reinterpret_cast<const float*>(rows[key]);
    float* out = packed + key * kBlockCols;
    for (int64_t c = 0; c < head_size; c += kBlockCols, out += block_size) {
      for (int64_t i = 0; i < kBlockCols; i += kLanes) {
        const int64_t rest = head_size - c - i;
        store(out + i, rest >= kLanes ? load(row + c + i)
                       : rest > 0     ? load_n(row + c + i, rest)
                                      : zero());
      }
    }
    if (key % 4 == 0) prefetch.step();
  }
}

}  // namespace VLLM_KERNEL_NAMESPACE
