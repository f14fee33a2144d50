// Number and mass of the tokens of a row in bins that follow the order of tokens, and the bin in
// which the first so many tokens, or the first so much mass, end.
#pragma once

#include "cuda/sampling/walk.cuh"

namespace vllm::cuda {

// What a search adds up from the first token on.
enum class Measure { kCount, kMass };

// Equal parts of the range of logits: neighbours of the top share no bin where the bits of a float
// would put half of all tokens into one.
struct LinearBins {
  float most, scale;

  // `low` is the least finite logit of the row; nothing below `reach` under the top matters.
  __device__ LinearBins(float most_, float low, float reach) : most(most_) {
    const float range = fminf(most - low, reach);
    scale = range > 0.0f && range <= FLT_MAX ? kBins / range : 0.0f;
    if (!(scale <= FLT_MAX)) scale = 0.0f;
  }
  __device__ int operator()(float x) const {
    return min(kBins - 1, __float2int_rz((most - x) * scale));
  }
};

// One digit of the key, of the tokens whose higher digits are `prefix`.
struct DigitBins {
  int shift, bits;
  uint32_t prefix;

  __device__ int operator()(float x) const {
    const uint64_t key = key_of(x);
    if (key >> (shift + bits) != prefix) return -1;
    return (1 << bits) - 1 - static_cast<int>(key >> shift & ((1u << bits) - 1));
  }
};

// Adds the blocks' histograms; afterwards every block has the row's.
__device__ inline void merge_histograms(Team& team, Shared& shared) {
  RowScratch& row = *team.scratch;
  const unsigned filled = team.num_histograms % kBinBuffers;
  const unsigned cleared = (team.num_histograms + 2) % kBinBuffers;
  ++team.num_histograms;
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    if (shared.counts[bin] == 0) continue;
    atomicAdd(&row.counts[filled][bin], shared.counts[bin]);
    atomicAdd(&row.masses[filled][bin], shared.masses[bin]);
  }
  team.sync();
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    shared.counts[bin] = __ldcg(&row.counts[filled][bin]);
    shared.masses[bin] = __ldcg(&row.masses[filled][bin]);
  }
  // Read last before the barrier above, filled next after the one to come.
  for (int bin = team.part * kThreads + threadIdx.x; bin < kBins; bin += team.parts * kThreads) {
    row.counts[cleared][bin] = 0;
    row.masses[cleared][bin] = 0;
  }
  __syncthreads();
}

// Before the first barrier of a kernel that makes histograms.
__device__ inline void clear_histograms(const Team& team) {
  if (team.parts == 1) return;
  for (int bin = team.part * kThreads + threadIdx.x; bin < kBins; bin += team.parts * kThreads) {
    for (int buffer = 0; buffer < kBinBuffers; ++buffer) {
      team.scratch->counts[buffer][bin] = 0;
      team.scratch->masses[buffer][bin] = 0;
    }
  }
}

// Fills shared.counts and shared.masses; bins(x) is negative for tokens that do not count, and
// tokens without mass count only where `with_massless`.
template <typename Bins>
__device__ void fill_histogram(Team& team, const Bins& bins, const Scale& scale, bool with_massless,
                               Shared& shared) {
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    shared.counts[bin] = 0;
    shared.masses[bin] = 0;
  }
  __syncthreads();
  for_tokens(team, [&](float x, int) {
    const float weight = scale.weigh(x);
    if (x == kMinusInf || (weight == 0.0f && !with_massless)) return;
    const int bin = bins(x);
    if (bin < 0) return;
    atomicAdd(&shared.counts[bin], 1u);
    const Mass mass = mass_of(weight);
    if (mass != 0) atomicAdd(&shared.masses[bin], mass);
  });
  __syncthreads();
  if (team.parts > 1) merge_histograms(team, shared);
}

// Number and mass of all tokens in the histogram.
__device__ inline void sum_bins(Word& count, Mass& mass, Shared& shared) {
  count = mass = 0;
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    count += shared.counts[bin];
    mass += shared.masses[bin];
  }
  reduce_block(count, mass, Add(), shared);
}

// The bin in which the measure reaches `target`, which is at least 1 and at most that of all bins.
__device__ inline Place find_place(Measure measure, Word target, Shared& shared) {
  const int begin = threadIdx.x * 4;
  Word count = 0, mass = 0;
  for (int bin = begin; bin < begin + 4; ++bin) {
    count += shared.counts[bin];
    mass += shared.masses[bin];
  }
  const Word count_sum = sum_up_to_lane(count), mass_sum = sum_up_to_lane(mass);
  __syncthreads();
  if (lane_id() == 31) {
    shared.partial[0][warp_id()] = count_sum;
    shared.partial[1][warp_id()] = mass_sum;
  }
  __syncthreads();
  Word count_before = count_sum - count, mass_before = mass_sum - mass;
  for (int warp = 0; warp < warp_id(); ++warp) {
    count_before += shared.partial[0][warp];
    mass_before += shared.partial[1][warp];
  }
  for (int bin = begin; bin < begin + 4; ++bin) {
    const Word count_after = count_before + shared.counts[bin];
    const Word mass_after = mass_before + shared.masses[bin];
    const Word before = measure == Measure::kMass ? mass_before : count_before;
    const Word after = measure == Measure::kMass ? mass_after : count_after;
    if (before < target && target <= after) {
      shared.place = Place{bin, static_cast<unsigned>(count_after),
                           static_cast<unsigned>(count_before), mass_before};
    }
    count_before = count_after;
    mass_before = mass_after;
  }
  __syncthreads();
  return shared.place;
}

}  // namespace vllm::cuda
