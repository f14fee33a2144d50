// Groups of lanes: a short row (a head) is held by a power of two of neighbouring lanes of a warp,
// so that a warp holds as many rows as fit. Norm, rotary and fused ops share this layout, and with
// it the order of sums: pack p of lane l begins at element (p * lanes + l) * Pack<T>::kSize. It
// depends on the row's length and type alone.
#pragma once

#include "cuda/pack.cuh"

namespace vllm::cuda {

inline constexpr int kGroupThreads = 128;  // of a block
inline constexpr int kMaxLanePacks = 4;    // a lane holds 1, 2 or 4 packs

template <typename T>
constexpr int64_t max_lane_row(int packs) {
  return int64_t{32} * packs * Pack<T>::kSize;
}

template <typename T>
constexpr int lanes_of(int64_t n) {
  int lanes = 1;
  while (lanes < 32 && lanes * Pack<T>::kSize < n) lanes *= 2;
  return lanes;
}

// Sum over groups of `lanes` neighbours; every lane of the warp takes part.
__device__ __forceinline__ float sum_lanes(float x, int lanes) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (offset < lanes) x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

// Where a thread stands: in which group of the grid, at which lane of it.
struct LaneGroup {
  uint32_t index;
  int lane, lanes;

  __device__ __forceinline__ explicit LaneGroup(int num_lanes) : lanes(num_lanes) {
    const int bits = __ffs(num_lanes) - 1;
    index = blockIdx.x * (kGroupThreads >> bits) + (threadIdx.x >> bits);
    lane = static_cast<int>(threadIdx.x) & (num_lanes - 1);
  }

  // This group's part of shared memory that has `packs` packs for each thread of the block.
  template <typename T>
  __device__ __forceinline__ T* share(Pack<T>* of_block, int packs) const {
    const int first = static_cast<int>(threadIdx.x) - lane;
    return reinterpret_cast<T*>(of_block) + first * packs * Pack<T>::kSize;
  }
  template <typename T>
  __device__ __forceinline__ int64_t begin_of(int p) const {
    return static_cast<int64_t>(p * lanes + lane) * Pack<T>::kSize;
  }
};

template <typename T, int kPacks>
__device__ __forceinline__ void load_lanes(Pack<T> (&packs)[kPacks], const T* row, int64_t n,
                                           bool is_packed, const LaneGroup& group) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    packs[p] = load_pack(row, group.begin_of<T>(p), n, is_packed);
  }
}

template <typename T, int kPacks>
__device__ __forceinline__ void store_lanes(const Pack<T> (&packs)[kPacks], T* row, int64_t n,
                                            bool is_packed, const LaneGroup& group) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    store_pack(row, group.begin_of<T>(p), n, is_packed, packs[p]);
  }
}

template <typename T, int kPacks>
struct LanePacks {};

// Calls f(LanePacks<T, kPacks>{}) for rows of n elements of one type.
template <typename T, typename F>
void dispatch_lane_packs(const char* op, int64_t n, F&& f) {
  const int64_t max_n = max_lane_row<T>(kMaxLanePacks);
  CHECK_ARG(n <= max_n, op, ": a head has ", n, " elements, allowed: up to ", max_n);
  if (n <= max_lane_row<T>(1)) {
    f(LanePacks<T, 1>{});
  } else if (n <= max_lane_row<T>(2)) {
    f(LanePacks<T, 2>{});
  } else {
    f(LanePacks<T, kMaxLanePacks>{});
  }
}

template <typename F>
void dispatch_lanes(const char* op, ScalarType type, int64_t n, F&& f) {
  dispatch_float(type, [&]<typename T>(TypeTag<T>) { dispatch_lane_packs<T>(op, n, f); });
}

// Blocks of a grid over `num_groups` groups.
inline unsigned group_blocks(const char* op, int64_t num_groups, int lanes) {
  constexpr int64_t kMaxGroups = (int64_t{1} << 32) - kGroupThreads;
  CHECK_ARG(num_groups < kMaxGroups, op, ": ", num_groups,
            " heads of all tokens, allowed: fewer than ", kMaxGroups);
  return static_cast<unsigned>(ceil_div(num_groups * lanes, kGroupThreads));
}

}  // namespace vllm::cuda
