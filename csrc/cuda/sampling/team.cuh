// A row of logits and the blocks that work on it. A row belongs to one block, or to several where
// there are few rows: each then has a slice of the ids, and they meet at barriers in global memory
// (their kernel is launched cooperatively, so that all of them run).
//
// What is merged here is integers, by maximum or sum: the outcome does not depend on how many
// blocks there are, and every block of a row gets it, so that all take the same branches.
#pragma once

#include "cuda/sampling/token.cuh"

namespace vllm::cuda {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 256;  // ids that a warp reads at once, and that have one sum
constexpr int kMaxTiles = kMaxVocab / kTile;
constexpr int kMaxParts = 64;    // blocks of a row
constexpr int kBins = 2048;      // of a histogram; four a thread
constexpr int kFewTokens = 512;  // so many are ordered by comparing each with each
constexpr int kBinBuffers = 3;   // one filled, one read, one cleared

static_assert(kBins == 4 * kThreads);

// Of one row, in global memory; only where a row has several blocks.
struct RowScratch {
  unsigned arrived, num_candidates;  // 0 when the kernel starts
  Word values[2][2][kMaxParts];
  Order candidates[kFewTokens];
  Mass masses[kBinBuffers][kBins];
  unsigned counts[kBinBuffers][kBins];
};

struct Place {
  int bin;
  unsigned count;         // in the bins up to and including this one
  unsigned count_before;  // in the bins before it
  Mass mass_before;
};

struct Shared {
  Mass masses[kBins];
  unsigned counts[kBins];
  Word sums[kMaxTiles];
  Order candidates[kFewTokens];
  Word partial[2][kWarps];
  Order cut;
  Mass cut_mass;
  Place place;
  int found;
  unsigned num_candidates, base;
};

struct Max {
  __device__ Word operator()(Word a, Word b) const { return a > b ? a : b; }
};
struct Add {
  __device__ Word operator()(Word a, Word b) const { return a + b; }
};

__device__ inline int lane_id() { return threadIdx.x % 32; }
__device__ inline int warp_id() { return threadIdx.x / 32; }

struct Team {
  const float* x;
  int n, first, last;  // of the row; slice of this block
  int part, parts;
  RowScratch* scratch;
  unsigned num_syncs = 0, num_histograms = 0;

  __device__ Team(const float* logits, int size, RowScratch* rows)
      : x(logits), n(size), part(blockIdx.y), parts(gridDim.y), scratch(rows + blockIdx.x) {
    const int tiles = (n + kTile - 1) / kTile;
    first = min(n, static_cast<int>(int64_t{tiles} * part / parts) * kTile);
    last = min(n, static_cast<int>(int64_t{tiles} * (part + 1) / parts) * kTile);
  }

  __device__ int num_tiles() const { return (last - first + kTile - 1) / kTile; }

  // What any block of the row wrote before is visible to all after; read it with __ldcg.
  __device__ void sync() {
    __syncthreads();
    if (parts == 1) return;
    ++num_syncs;
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(&scratch->arrived, 1u);
      while (*static_cast<volatile unsigned*>(&scratch->arrived) < num_syncs * parts) {
        __nanosleep(20);
      }
      __threadfence();
    }
    __syncthreads();
  }
};

// Merges two words over the threads of a block; every thread gets the outcome.
template <typename Op>
__device__ void reduce_block(Word& a, Word& b, Op op, Shared& shared) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    a = op(a, __shfl_xor_sync(~0u, a, mask));
    b = op(b, __shfl_xor_sync(~0u, b, mask));
  }
  __syncthreads();
  if (lane_id() == 0) {
    shared.partial[0][warp_id()] = a;
    shared.partial[1][warp_id()] = b;
  }
  __syncthreads();
  a = shared.partial[0][lane_id() % kWarps];
  b = shared.partial[1][lane_id() % kWarps];
#pragma unroll
  for (int mask = kWarps / 2; mask > 0; mask /= 2) {
    a = op(a, __shfl_xor_sync(~0u, a, mask));
    b = op(b, __shfl_xor_sync(~0u, b, mask));
  }
}

// The same over all threads of a row; 0 must change nothing under `op`.
template <typename Op>
__device__ void reduce_row(Team& team, Word& a, Word& b, Op op, Shared& shared) {
  reduce_block(a, b, op, shared);
  if (team.parts == 1) return;
  Word(*values)[kMaxParts] = team.scratch->values[team.num_syncs % 2];
  if (threadIdx.x == 0) {
    values[0][team.part] = a;
    values[1][team.part] = b;
  }
  team.sync();
  const bool has_part = static_cast<int>(threadIdx.x) < team.parts;
  a = has_part ? __ldcg(&values[0][threadIdx.x]) : 0;
  b = has_part ? __ldcg(&values[1][threadIdx.x]) : 0;
  reduce_block(a, b, op, shared);
}

// Calls fn(cleaned logit, id) for the ids of one tile of the slice, by one warp.
template <typename Fn>
__device__ void for_tile(const Team& team, int tile, const Fn& fn) {
  constexpr int kLoads = 8;
  const int begin = team.first + tile * kTile + lane_id();
#pragma unroll
  for (int start = begin; start < begin + kTile; start += 32 * kLoads) {
    float x[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int id = start + 32 * i;
      x[i] = id < team.last ? team.x[id] : kMinusInf;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int id = start + 32 * i;
      if (id < team.last) fn(clean(x[i]), id);
    }
  }
}

template <typename Fn>
__device__ void for_tokens(const Team& team, const Fn& fn) {
  for (int tile = warp_id(); tile < team.num_tiles(); tile += kWarps) for_tile(team, tile, fn);
}

}  // namespace vllm::cuda
