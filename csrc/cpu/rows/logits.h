// Passes over one row of logits, in chunks of fixed size so that a row gives the same bits on any
// number of threads; used by the sampling ops. NaN reads as -inf, +inf as the largest float.
#pragma once

#include <cfloat>

#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/select.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

constexpr float kMinusInf = -__builtin_inff();
constexpr int64_t kBlock = 64;     // has one maximum
constexpr int64_t kChunk = 4096;   // has one sum; a multiple of kBlock
constexpr int kBandSplits = 4;     // thresholds tried in one pass, see mass_band.h
constexpr float kNoMass = -87.3f;  // below this distance from the maximum a token has no mass

VLLM_INLINE Vec clean(Vec x) { return min(max(x, set1(kMinusInf)), set1(FLT_MAX)); }
VLLM_INLINE float clean(float x) {
  if (!(x > kMinusInf)) return kMinusInf;
  return x > FLT_MAX ? FLT_MAX : x;
}

VLLM_INLINE Vec load_clean(const float* x, int64_t n) {
  if (n >= kLanes) return clean(load(x));
  return select_first(n, clean(load_n(x, n)), set1(kMinusInf));
}

VLLM_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One token of a row. The order of tokens: larger logit first, then lower id.
struct Token {
  float logit;
  int32_t id;
};

struct TokenBefore {
  VLLM_INLINE bool operator()(const Token& a, const Token& b) const {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  }
};

struct FloatBefore {
  VLLM_INLINE bool operator()(float a, float b) const { return a > b; }
};

// Memory of the calling thread for the passes over one row of n logits.
struct RowScratch {
  explicit RowScratch(int64_t n) {
    const int64_t chunks = ceil_div(n, kChunk), size = chunks * kChunk, blocks = size / kBlock;
    const int64_t doubles = chunks * (1 + 2 * kBandSplits);
    const int64_t bytes = size * 12 + doubles * 8 + blocks * 8;
    tokens = static_cast<Token*>(thread_scratch(Scratch::kLogits, static_cast<size_t>(bytes)));
    sums = reinterpret_cast<double*>(tokens + size);
    band_sums = sums + chunks;
    mass = reinterpret_cast<float*>(sums + doubles);
    maxima = mass + size;
    sorted_maxima = maxima + blocks;
  }
  Token* tokens;         // candidates
  double* sums;          // of the mass in each chunk
  double* band_sums;     // of each chunk, see mass_band.h
  float* mass;           // of each token
  float* maxima;         // of each block
  float* sorted_maxima;  // a copy to select in
};

// Runs fn(chunk, first, last) over the chunks of a row, on several threads where the caller is on
// one and the row is long: waking a thread takes longer than a pass over 100,000 logits.
template <typename Fn>
VLLM_INLINE void for_chunks(int64_t n, const Fn& fn) {
  parallel_for(ceil_div(n, kChunk), n / 4, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      fn(c, c * kChunk, (c + 1) * kChunk < n ? (c + 1) * kChunk : n);
    }
  });
}

// Fills scratch.maxima; returns the maximum of the row.
inline float find_maxima(const float* x, int64_t n, const RowScratch& scratch) {
  for_chunks(n, [&](int64_t, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kBlock) {
      const int64_t end = i + kBlock < last ? i + kBlock : last;
      Vec most = set1(kMinusInf);
      for (int64_t j = i; j < end; j += kLanes) most = max(load_clean(x + j, end - j), most);
      scratch.maxima[i / kBlock] = reduce_max(most);
    }
  });
  float most = kMinusInf;
  for (int64_t b = 0; b < ceil_div(n, kBlock); ++b) {
    if (scratch.maxima[b] > most) most = scratch.maxima[b];
  }
  return most;
}

// The first id with this logit, which find_maxima returned for the row.
inline int64_t find_first(const float* x, int64_t n, float most, const RowScratch& scratch) {
  int64_t b = 0;
  while (scratch.maxima[b] != most) ++b;
  for (int64_t i = b * kBlock; i < n; ++i) {
    if (clean(x[i]) == most) return i;
  }
  return 0;
}

// e^(x / temperature - top), 0 far below the top.
VLLM_INLINE Vec mass_of(Vec x, Vec temperature, Vec top) {
  const Vec distance = sub(min(div(x, temperature), set1(FLT_MAX)), top);
  return select_less(distance, set1(kNoMass), zero(), exp(distance));
}

// Fills scratch.mass and scratch.sums; returns the mass of the row.
inline double find_mass(const float* x, int64_t n, float temperature, float top,
                        const RowScratch& scratch) {
  for_chunks(n, [&](int64_t chunk, int64_t first, int64_t last) {
    Vec sum = zero();
    for (int64_t i = first; i < last; i += kLanes) {
      const Vec mass = mass_of(load_clean(x + i, last - i), set1(temperature), set1(top));
      store(scratch.mass + i, mass);
      sum = add(sum, mass);
    }
    scratch.sums[chunk] = reduce_add(sum);
  });
  double total = 0.0;
  for (int64_t c = 0; c < ceil_div(n, kChunk); ++c) total += scratch.sums[c];
  return total;
}

// Collects the tokens with a logit of at least `least` and above -inf; returns how many.
inline int64_t collect_tokens(const float* x, int64_t n, float least, const RowScratch& scratch) {
  if (!(least > -FLT_MAX)) least = -FLT_MAX;
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kBlock) {
    if (scratch.maxima[i / kBlock] < least) continue;
    const int64_t end = i + kBlock < n ? i + kBlock : n;
    for (int64_t j = i; j < end; j += kLanes) {
      uint32_t below = lanes_less(load_clean(x + j, end - j), set1(least));
      for (uint32_t rest = ~below & ((1u << kLanes) - 1); rest != 0; rest &= rest - 1) {
        const int64_t id = j + __builtin_ctz(rest);
        scratch.tokens[count++] = Token{clean(x[id]), static_cast<int32_t>(id)};
      }
    }
  }
  return count;
}

// A logit that at least k tokens reach, from the maxima of blocks; -inf where they do not say.
inline float find_kth_bound(int64_t n, int64_t k, const RowScratch& scratch) {
  const int64_t blocks = ceil_div(n, kBlock);
  if (k > blocks) return kMinusInf;
  for (int64_t b = 0; b < blocks; ++b) scratch.sorted_maxima[b] = scratch.maxima[b];
  select_first_k(scratch.sorted_maxima, blocks, k, FloatBefore());
  float bound = scratch.sorted_maxima[0];
  for (int64_t b = 1; b < k; ++b) {
    if (scratch.sorted_maxima[b] < bound) bound = scratch.sorted_maxima[b];
  }
  return bound;
}

// Collects the k first tokens in front of scratch.tokens, unordered; returns how many there are
// (fewer than k where the rest is -inf).
inline int64_t collect_first_k(const float* x, int64_t n, int64_t k, const RowScratch& scratch) {
  const int64_t count = collect_tokens(x, n, find_kth_bound(n, k, scratch), scratch);
  if (count <= k) return count;
  select_first_k(scratch.tokens, count, k, TokenBefore());
  return k;
}

}  // namespace

}  // namespace VLLM_KERNEL_NAMESPACE
