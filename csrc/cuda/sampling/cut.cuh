// The last token that top-k and top-p keep, without sorting a row.
//
// One histogram over equal parts of the range of logits bounds the cut from below. Where few tokens
// lie above that bound, as a rule, they are collected and compared each with each; else the cut is
// found digit by digit of its logit, then among equal logits by id.
#pragma once

#include "cuda/sampling/histogram.cuh"

namespace vllm::cuda {

struct Cut {
  Order order;         // of the last token kept; 0 where all are
  int num_candidates;  // the first tokens of the row, at least down to the cut, lie in
                       // shared.candidates, their masses in shared.masses; 0 where they do not
};

// Puts the tokens for which keep(order) holds into shared.candidates of every block, in any order.
// There are at most kFewTokens of them. Once in a kernel.
template <typename Keep>
__device__ int collect_candidates(Team& team, const Keep& keep, Shared& shared) {
  if (threadIdx.x == 0) shared.num_candidates = 0;
  __syncthreads();
  for_tokens(team, [&](float x, int id) {
    if (x != kMinusInf && keep(x, id)) {
      shared.candidates[atomicAdd(&shared.num_candidates, 1u)] = order_of(x, id);
    }
  });
  __syncthreads();
  if (team.parts == 1) return static_cast<int>(shared.num_candidates);
  RowScratch& row = *team.scratch;
  if (threadIdx.x == 0) shared.base = atomicAdd(&row.num_candidates, shared.num_candidates);
  __syncthreads();
  for (unsigned i = threadIdx.x; i < shared.num_candidates; i += kThreads) {
    row.candidates[shared.base + i] = shared.candidates[i];
  }
  team.sync();
  const int count = static_cast<int>(__ldcg(&row.num_candidates));
  for (int i = threadIdx.x; i < count; i += kThreads) {
    shared.candidates[i] = __ldcg(&row.candidates[i]);
  }
  __syncthreads();
  return count;
}

__device__ inline void weigh_candidates(int count, const Scale& scale, Shared& shared) {
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    shared.masses[i] = mass_of(scale.weigh(logit_of_order(shared.candidates[i])));
  }
  __syncthreads();
}

// The candidate with which the measure reaches `target`; `mass` is what it and those before have.
__device__ inline Order find_candidate(Measure measure, Word target, int count, Mass& mass,
                                       Shared& shared) {
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const Order own = shared.candidates[i];
    Word count_sum = 0;
    Mass mass_sum = 0;
    for (int j = 0; j < count; ++j) {
      if (shared.candidates[j] < own) continue;
      ++count_sum;
      mass_sum += shared.masses[j];
    }
    const Word after = measure == Measure::kMass ? mass_sum : count_sum;
    const Word self = measure == Measure::kMass ? shared.masses[i] : 1;
    if (after >= target && after - self < target) {
      shared.cut = own;
      shared.cut_mass = mass_sum;
    }
  }
  __syncthreads();
  const Order cut = shared.cut;
  mass = shared.cut_mass;
  __syncthreads();
  return cut;
}

// The order of the `rank`-th token, counted from 1, among those whose logit has this key.
__device__ inline Order find_equal(Team& team, uint32_t key, Word rank, Shared& shared) {
  const auto is_equal = [&](float x, int) -> Word { return key_of(x) == key ? 1 : 0; };
  const RowSum sum = sum_row(team, is_equal, shared);
  const int id = find_at_sum(team, sum, rank - 1, is_equal, shared);
  Word order = id < 0 ? 0 : Word{key} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
  Word unused = 0;
  reduce_row(team, order, unused, Max(), shared);
  return order;
}

// What find_candidate finds, over all tokens of the row that count: three digits of the logit's
// key, most significant first.
__device__ inline Order search_row(Team& team, Measure measure, Word target, const Scale& scale,
                                   bool with_massless, Mass& mass, Shared& shared) {
  DigitBins bins{.shift = 21, .bits = 11, .prefix = 0};
  Word count_before = 0;
  Mass mass_before = 0;
  Place place;
  for (;;) {
    fill_histogram(team, bins, scale, with_massless, shared);
    const Word before = measure == Measure::kMass ? mass_before : count_before;
    place = find_place(measure, target - before, shared);
    count_before += place.count_before;
    mass_before += place.mass_before;
    const uint32_t digit = (1u << bins.bits) - 1 - static_cast<uint32_t>(place.bin);
    bins.prefix = bins.prefix << bins.bits | digit;
    if (bins.shift == 0) break;
    bins.bits = bins.shift == 10 ? 10 : 11;
    bins.shift = bins.shift == 10 ? 0 : 10;
  }
  const Mass each = mass_of(scale.weigh(logit_of(bins.prefix)));
  const Word rank =
      measure == Measure::kMass ? (target - mass_before + each - 1) / each : target - count_before;
  mass = mass_before + rank * each;
  if (rank == place.count - place.count_before) return Word{bins.prefix} << 32;
  return find_equal(team, bins.prefix, rank, shared);
}

struct Filter {
  float temperature, top_p, min_p;
  int top_k;

  __device__ bool is_greedy(float most) const {
    return !(temperature >= 1e-5f) || clean(most / temperature) == kMinusInf;
  }
  __device__ bool has_cut(int n) const { return top_p < 1.0f || (top_k > 0 && top_k < n); }
};

__device__ inline Word find_mass_target(float top_p, Mass total) {
  const double target = ceil(static_cast<double>(top_p) * static_cast<double>(total));
  return target < 1.0 ? 1 : min(static_cast<Word>(target), total);
}

// The cut of a row whose finite logits lie between `low` and the top of `scale`.
__device__ inline Cut find_cut(Team& team, const Filter& filter, const Scale& scale, float most,
                               float low, Shared& shared) {
  const LinearBins bins(most, low, -kNoMass * filter.temperature);
  fill_histogram(team, bins, scale, false, shared);
  Word count;
  Mass total;
  sum_bins(count, total, shared);
  const bool has_top_k = filter.top_k > 0 && filter.top_k < team.n;
  const bool has_top_p = filter.top_p < 1.0f;
  const Measure measure = has_top_k ? Measure::kCount : Measure::kMass;
  const Word target = has_top_k ? min(static_cast<Word>(filter.top_k), count)
                                : find_mass_target(filter.top_p, total);
  const Place place = find_place(measure, target, shared);
  Mass mass;
  if (place.count <= kFewTokens) {
    const int found = collect_candidates(
        team, [&](float x, int) { return bins(x) <= place.bin && scale.weigh(x) > 0.0f; }, shared);
    weigh_candidates(found, scale, shared);
    Order order = find_candidate(measure, target, found, mass, shared);
    if (has_top_k && has_top_p) {
      const Word left = find_mass_target(filter.top_p, mass);
      order = find_candidate(Measure::kMass, left, found, mass, shared);
    }
    return Cut{order, found};
  }
  Order order = search_row(team, measure, target, scale, false, mass, shared);
  if (has_top_k && has_top_p) {
    const Word left = find_mass_target(filter.top_p, mass);
    order = search_row(team, Measure::kMass, left, scale, false, mass, shared);
  }
  return Cut{order, 0};
}

// The largest token of the row and its least finite logit (+inf where there is none). Clears what
// the searches of the kernel need.
__device__ inline Order find_range(Team& team, float& low, Shared& shared) {
  clear_histograms(team);
  Word best = 0, lowest = 0;  // the latter as the largest key of a negated logit
  for_tokens(team, [&](float x, int id) {
    best = max(best, order_of(x, id));
    if (x != kMinusInf) lowest = max(lowest, static_cast<Word>(key_of(-x)));
  });
  reduce_row(team, best, lowest, Max(), shared);
  low = lowest == 0 ? INFINITY : -logit_of(static_cast<uint32_t>(lowest));
  return best;
}

}  // namespace vllm::cuda
