// A grid over the packs of rows for kernels that work on each element alone: no thread divides by
// the length of a row. A block has several short rows, or a part of a long one.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/rows.cuh"

namespace vllm::cuda {

inline constexpr int kGridThreads = 256;                 // of a block, about
inline constexpr int64_t kManyPacks = int64_t{1} << 19;  // more than run at once

struct RowGrid {
  uint32_t rows, tiles;  // blocks side by side have the tiles of the same rows
  uint32_t blocks;
  dim3 threads;  // x along a row, y over rows

  // Where pack p of `packs` of this thread begins in its row.
  template <typename T>
  __device__ __forceinline__ int64_t begin_of(int p, int packs) const {
    const uint32_t tile = blockIdx.x % tiles * packs + p;
    return (static_cast<int64_t>(tile) * blockDim.x + threadIdx.x) * Pack<T>::kSize;
  }
  __device__ __forceinline__ uint32_t row() const {
    return blockIdx.x / tiles * blockDim.y + threadIdx.y;
  }
};

// A grid whose threads have `packs` packs each; `num_packs` and `rows` are positive.
inline RowGrid row_grid(const char* op, int64_t num_packs, uint32_t rows, int packs) {
  RowGrid grid{.rows = rows, .tiles = 0, .blocks = 0, .threads = {}};
  const int64_t tiles = ceil_div(num_packs, packs * kGridThreads);
  int64_t along = ceil_div(num_packs, tiles * packs);
  if (along > 16) along = ceil_div(along, 32) * 32;  // warps begin on whole lines of memory
  const int64_t rows_of_block = along > kGridThreads / 2 ? 1 : kGridThreads / along;
  const int64_t blocks = tiles * ceil_div(int64_t{rows}, rows_of_block);
  CHECK_ARG(blocks < kMaxRows, op, ": ", rows, " rows of ", num_packs,
            " packs of 16 bytes are too many");
  grid.tiles = static_cast<uint32_t>(tiles);
  grid.blocks = static_cast<uint32_t>(blocks);
  grid.threads = dim3(static_cast<unsigned>(along), static_cast<unsigned>(rows_of_block));
  return grid;
}

// How a thread reads its packs. Whether they are whole is known when the kernel is compiled: behind
// a branch, each load would be waited for before the next is sent.
template <int kPacks, bool kIsPacked>
struct ThreadPacks {};

// Calls f(ThreadPacks<kPacks, kIsPacked>{}, grid): one pack a thread where that spreads the work
// wider, two where there is enough of it, so that more loads are under way.
template <typename F>
void dispatch_row_grid(const char* op, int64_t n, int64_t pack_size, uint32_t rows, bool is_packed,
                       F&& f) {
  if (rows == 0 || n == 0) return;
  const int64_t num_packs = ceil_div(n, pack_size);
  if (!is_packed) return f(ThreadPacks<1, false>{}, row_grid(op, num_packs, rows, 1));
  if (num_packs * rows < kManyPacks) {
    return f(ThreadPacks<1, true>{}, row_grid(op, num_packs, rows, 1));
  }
  f(ThreadPacks<2, true>{}, row_grid(op, num_packs, rows, 2));
}

}  // namespace vllm::cuda
