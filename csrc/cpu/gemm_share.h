// One thread's share of out = x · W^T + bias, and how results are stored; included by kernels only.
#pragma once

#include "cpu/gemm.h"

namespace VLLM_KERNEL_NAMESPACE {

// Stores columns [column, column + 32) of out, as far as they exist.
template <typename T, typename Out>
struct ColumnStore {
  Out* out;
  int64_t stride, n;
  const T* bias;  // or null
  int64_t column;

  VLLM_INLINE void operator()(int64_t row, int v, Vec value) const {
    const int64_t c = column + v * kLanes;
    Out* p = out + row * stride + c;
    if (c + kLanes <= n) {
      if (bias != nullptr) value = add(value, load(bias + c));
      if constexpr (sizeof(Out) != sizeof(T)) value = round_to<T>(value);
      store(p, value);
    } else if (c < n) {
      const int64_t rest = n - c;
      if (bias != nullptr) value = add(value, load_n(bias + c, rest));
      if constexpr (sizeof(Out) != sizeof(T)) value = round_to<T>(value);
      store_n(p, value, rest);
    }
  }
};

// Rows and blocks that one thread multiplies.
struct Share {
  int64_t row_begin, row_end, block_begin, block_end;
};

VLLM_INLINE Share share_of(int64_t rows, int64_t blocks, int64_t rank, int64_t size) {
  const Grid grid = choose_grid(rows, blocks, size);
  const int64_t i = rank / grid.block_parts, j = rank % grid.block_parts;
  return Share{rows * i / grid.row_parts, rows * (i + 1) / grid.row_parts,
               blocks * j / grid.block_parts, blocks * (j + 1) / grid.block_parts};
}

// What lies `blocks` blocks from the start of a packed weight, to be read soon.
template <typename T>
VLLM_INLINE Ahead block_ahead(const void* packed, int64_t blocks, int64_t k) {
  const int64_t size = block_elements<T>(k);
  return Ahead{static_cast<const T*>(packed) + blocks * size,
               size * static_cast<int64_t>(sizeof(T))};
}

// Multiplies a share of rows x blocks. `after` is what this thread reads next.
template <typename T, typename Out>
void multiply_share(const Share& share, const T* x, int64_t x_stride, const T* packed, int64_t k,
                    const T* bias, Out* out, int64_t out_stride, int64_t n, Ahead after) {
  const int64_t block_size = block_elements<T>(k);
  for (int64_t row = share.row_begin; row < share.row_end; row += kRowsOfCache) {
    const int64_t left = share.row_end - row;
    const int64_t rows = left < kRowsOfCache ? left : kRowsOfCache;
    for (int64_t block = share.block_begin; block < share.block_end; ++block) {
      const Ahead ahead =
          block + 1 < share.block_end ? block_ahead<T>(packed, block + 1, k) : after;
      Prefetcher prefetch = spread_over<T>(ahead, rows, k);
      const ColumnStore<T, Out> finish{out + row * out_stride, out_stride, n, bias,
                                       block * kBlockCols};
      multiply_block(x + row * x_stride, x_stride, rows, packed + block * block_size, k, prefetch,
                     FromZero{}, finish);
    }
  }
}

}  // namespace VLLM_KERNEL_NAMESPACE
