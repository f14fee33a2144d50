// Where in a row of masses a given sum is reached, without sorting: narrows a band of masses by
// passes over the row until few tokens lie in it. Used by top-p.
#pragma once

#include "cpu/rows/logits.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

// Tokens with low <= mass < high; those at or above `high` have `mass_above` together.
struct MassBand {
  float low, high;
  double mass_above;
};

constexpr int64_t kFewTokens = 512;
constexpr int kMostPasses = 6;  // equal masses cannot be told apart by more

VLLM_INLINE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
VLLM_INLINE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Mass and number of the tokens at or above each of kBandSplits rising thresholds.
inline void sum_above(int64_t n, const float* thresholds, double* mass, double* count,
                      const RowScratch& scratch) {
  for_chunks(n, [&](int64_t chunk, int64_t first, int64_t last) {
    Vec sums[kBandSplits];
    int64_t counts[kBandSplits] = {};
    for (Vec& sum : sums) sum = zero();
    for (int64_t i = first; i < last; i += kLanes) {
      const Vec w = load(scratch.mass + i);
      for (int t = 0; t < kBandSplits; ++t) {
        const Vec threshold = set1(thresholds[t]);
        sums[t] = add(sums[t], select_less(w, threshold, zero(), w));
        counts[t] += kLanes - __builtin_popcount(lanes_less(w, threshold));
      }
    }
    double* out = scratch.band_sums + chunk * 2 * kBandSplits;
    for (int t = 0; t < kBandSplits; ++t) {
      out[t] = reduce_add(sums[t]);
      out[kBandSplits + t] = static_cast<double>(counts[t]);
    }
  });
  for (int t = 0; t < kBandSplits; ++t) mass[t] = count[t] = 0.0;
  for (int64_t c = 0; c < ceil_div(n, kChunk); ++c) {
    const double* chunk = scratch.band_sums + c * 2 * kBandSplits;
    for (int t = 0; t < kBandSplits; ++t) mass[t] += chunk[t];
    for (int t = 0; t < kBandSplits; ++t) count[t] += chunk[kBandSplits + t];
  }
}

// A band in which the mass, summed from the heaviest token down, reaches `target`. The tokens at or
// above `low` must reach it.
inline MassBand find_band(int64_t n, float low, double target, const RowScratch& scratch) {
  constexpr float kAboveAll = 1.0000001f;  // the next float after the heaviest mass, which is 1
  MassBand band{.low = low, .high = kAboveAll, .mass_above = 0.0};
  double count_low = static_cast<double>(n), count_high = 0.0;
  for (int pass = 0; pass < kMostPasses; ++pass) {
    const uint32_t width = bits_of(band.high) - bits_of(band.low);
    if (count_low - count_high <= kFewTokens || width <= kBandSplits) break;
    float thresholds[kBandSplits];
    for (int t = 0; t < kBandSplits; ++t) {
      const uint64_t part = uint64_t{width} * static_cast<uint64_t>(t + 1) / (kBandSplits + 1);
      thresholds[t] = float_of(bits_of(band.low) + static_cast<uint32_t>(part));
    }
    double mass[kBandSplits], count[kBandSplits];
    sum_above(n, thresholds, mass, count, scratch);
    for (int t = 0; t < kBandSplits; ++t) {
      if (mass[t] >= target) {
        band.low = thresholds[t];
        count_low = count[t];
      } else {
        band.high = thresholds[t];
        band.mass_above = mass[t];
        count_high = count[t];
        break;
      }
    }
  }
  return band;
}

// Collects the tokens of a band, in order of their ids; returns how many.
inline int64_t collect_band(const float* x, int64_t n, const MassBand& band,
                            const RowScratch& scratch) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec w = load(scratch.mass + i);
    uint32_t inside = lanes_less(w, set1(band.high)) & ~lanes_less(w, set1(band.low));
    for (; inside != 0; inside &= inside - 1) {
      const int64_t id = i + __builtin_ctz(inside);
      scratch.tokens[count++] = Token{clean(x[id]), static_cast<int32_t>(id)};
    }
  }
  return count;
}

}  // namespace

}  // namespace VLLM_KERNEL_NAMESPACE
