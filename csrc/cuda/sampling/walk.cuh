// Sums of weights over a row in order of its ids, and the id at which such a sum passes a target.
#pragma once

#include "cuda/sampling/team.cuh"

namespace vllm::cuda {

// Of the weights of a row: those of earlier slices, of this block's slice, of all.
struct RowSum {
  Word before, own, total;
};

__device__ inline Word sum_up_to_lane(Word value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Word other = __shfl_up_sync(~0u, value, distance);
    if (lane_id() >= distance) value += other;
  }
  return value;
}

// Sums weight(cleaned logit, id) over the row; tile sums stay in shared.sums.
template <typename Weight>
__device__ RowSum sum_row(Team& team, const Weight& weight, Shared& shared) {
  Word own = 0, unused = 0;
  for (int tile = warp_id(); tile < team.num_tiles(); tile += kWarps) {
    Word sum = 0;
    for_tile(team, tile, [&](float x, int id) { sum += weight(x, id); });
    own += sum;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (lane_id() == 0) shared.sums[tile] = sum;
  }
  reduce_block(own, unused, Add(), shared);
  if (team.parts == 1) return RowSum{0, own, own};
  Word* values = team.scratch->values[team.num_syncs % 2][0];
  if (threadIdx.x == 0) values[team.part] = own;
  team.sync();
  const int part = threadIdx.x;
  Word total = part < team.parts ? __ldcg(&values[part]) : 0;
  Word before = part < team.part ? total : 0;
  reduce_block(before, total, Add(), shared);
  return RowSum{before, own, total};
}

// The first of `count` indices at which the sum of value(index) exceeds `target`, by one warp;
// takes what comes before it off the target. -1 where the sum never does.
template <typename Value>
__device__ int walk(Word& target, int count, const Value& value) {
  for (int begin = 0; begin < count; begin += 32) {
    const int index = begin + lane_id();
    const Word own = index < count ? value(index) : 0;
    const Word sum = sum_up_to_lane(own);
    const unsigned beyond = __ballot_sync(~0u, sum > target);
    const int lane = beyond != 0 ? __ffs(beyond) - 1 : 31;
    const Word before = __shfl_sync(~0u, sum - own, lane);
    if (beyond != 0) {
      target -= before;
      return begin + lane;
    }
    target -= __shfl_sync(~0u, sum, 31);
  }
  return -1;
}

// The first id at which the sum of weights exceeds `target`, or -1 where it lies in the slice of
// another block. `sum` is what sum_row returned for these weights.
template <typename Weight>
__device__ int find_at_sum(const Team& team, const RowSum& sum, Word target, const Weight& weight,
                           Shared& shared) {
  if (target < sum.before || target >= sum.before + sum.own) return -1;
  target -= sum.before;
  if (warp_id() == 0) {
    const int tile = walk(target, team.num_tiles(), [&](int i) { return shared.sums[i]; });
    const int begin = team.first + tile * kTile;
    const int index = walk(target, min(kTile, team.last - begin),
                           [&](int i) { return weight(clean(team.x[begin + i]), begin + i); });
    if (lane_id() == 0) shared.found = begin + index;
  }
  __syncthreads();
  return shared.found;
}

}  // namespace vllm::cuda
