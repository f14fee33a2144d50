// A long row in the registers of a block: pack p of thread t is pack p * threads + t of the row.
// Used by the norm ops for hidden states.
#pragma once

#include "cuda/norm/head_norm.cuh"

namespace vllm::cuda {

inline constexpr int kMaxThreads = 1024;
inline constexpr int kMaxRowPacks = 4;  // of a thread

// Threads of a block at most; fewer where packs need registers.
constexpr int max_row_threads(int packs) { return packs == 2 ? kMaxThreads / 2 : kMaxThreads; }
inline constexpr int kMaxRuns = kMaxRowPacks * kMaxThreads / 32;
inline constexpr int64_t kFewRows = 264;  // two blocks for each processor of a large device

inline void check_row_size(const char* op, int64_t n, int64_t item) {
  const int64_t max_n = kMaxRowPacks * kMaxThreads * kPackBytes / item;
  CHECK_ARG(n <= max_n, op, ": rows have ", n, " elements, allowed: up to ", max_n);
}

// First element of pack p of this thread.
template <typename T>
__device__ __forceinline__ int64_t row_begin(int p) {
  return static_cast<int64_t>(p * blockDim.x + threadIdx.x) * Pack<T>::kSize;
}

template <typename T, int kPacks>
__device__ __forceinline__ void load_row(Pack<T> (&packs)[kPacks], const T* row, int64_t n,
                                         bool is_packed) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) packs[p] = load_pack(row, row_begin<T>(p), n, is_packed);
}

template <typename T, int kPacks>
__device__ __forceinline__ void store_row(const Pack<T> (&packs)[kPacks], T* row, int64_t n,
                                          bool is_packed) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) store_pack(row, row_begin<T>(p), n, is_packed, packs[p]);
}

template <typename T, typename W, int kPacks>
__device__ __forceinline__ void load_row_weight(WeightPack<T, W> (&weights)[kPacks],
                                                const void* weight, int64_t n, bool is_packed) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    weights[p].load(static_cast<const W*>(weight), row_begin<T>(p), n, is_packed);
  }
}

// packs += added, rounded to T.
template <typename T, int kPacks>
__device__ __forceinline__ void add_row(Pack<T> (&packs)[kPacks], const Pack<T> (&added)[kPacks]) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    packs[p] = map_pairs<T>([&](int e) {
      return make_float2(to_float(packs[p].item[e]) + to_float(added[p].item[e]),
                         to_float(packs[p].item[e + 1]) + to_float(added[p].item[e + 1]));
    });
  }
}

// 1 / rms of the row. The order of the sum depends on the row's length alone and not on how many
// threads hold it: each run of 32 packs has one sum, whichever warp has the run, and lane l adds
// runs l, l + 32, ... of `of_runs`, which is shared memory of one use.
template <typename T, int kPacks>
__device__ __forceinline__ float row_scale(const Pack<T> (&packs)[kPacks], int64_t n, float epsilon,
                                           float (&of_runs)[kMaxRuns]) {
  const int lane = threadIdx.x % 32, num_warps = blockDim.x / 32, num_runs = kPacks * num_warps;
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    sum = sum_lanes(sum_of_squares(packs[p], 0.0f), 32);
    if (lane == 0) of_runs[p * num_warps + threadIdx.x / 32] = sum;
  }
  if (num_runs > 1) {
    __syncthreads();
    sum = lane < num_runs ? of_runs[lane] : 0.0f;
    for (int run = lane + 32; run < num_runs; run += 32) sum += of_runs[run];
    sum = sum_lanes(sum, 32);
  }
  return inverse_rms(sum, n, epsilon);
}

template <typename T, typename W, int kPacks>
__device__ __forceinline__ void scale_row(Pack<T> (&packs)[kPacks],
                                          const WeightPack<T, W> (&weights)[kPacks], float scale) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) scale_pack(packs[p], weights[p], scale);
}

template <int kPacks>
struct RowPacks {};

// Calls f(RowPacks<kPacks>{}, threads). Where rows are few, as many threads as there are packs make
// the shortest way; where they are many, smaller blocks overlap better and each thread has more
// loads under way.
template <typename F>
void dispatch_row_packs(int64_t num_packs, int64_t num_rows, F&& f) {
  const auto threads = [&](int packs) {
    return static_cast<unsigned>(ceil_div(ceil_div(num_packs, packs), 32) * 32);
  };
  if (num_packs <= (num_rows <= kFewRows ? kMaxThreads : 128)) return f(RowPacks<1>{}, threads(1));
  if (num_packs <= 2 * max_row_threads(2)) return f(RowPacks<2>{}, threads(2));
  f(RowPacks<kMaxRowPacks>{}, threads(kMaxRowPacks));
}

}  // namespace vllm::cuda
