// Memory and state of the fused decoder layers during one step; included by kernels only.
#pragma once

#include "cpu/attention_units.h"
#include "cpu/gemm_share.h"
#include "cpu/kernels/decoder.h"
#include "cpu/team.h"

namespace VLLM_KERNEL_NAMESPACE {

// Up to this many tokens every thread keeps the residual stream and norms all rows by itself, which
// is cheaper than two barriers.
inline constexpr int64_t kOwnRows = 8;

// A matrix of the step; strides keep neighbouring rows out of one set of the cache.
template <typename T>
struct StepMatrix {
  T* data;
  int64_t stride;

  VLLM_INLINE T* row(int64_t i) const { return data + i * stride; }
};

// Largest sizes over the layers.
struct StepSizes {
  int64_t qkv, heads, inner, gate_up;
};

// Buffers that all threads share, and those of one thread.
template <typename T>
struct StepMemory {
  StepMatrix<T> residual, normed;                   // shared, or this thread's own
  StepMatrix<T> qkv, heads, delta, inner, gate_up;  // shared
  T *gate_tile, *up_tile;                           // this thread's, [kRowsOfCache, kBlockCols]
};

template <typename T>
VLLM_INLINE int64_t step_stride(int64_t n) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  const int64_t lines = (n + kLine - 1) / kLine;
  return (lines + (lines % 2 == 0 ? 1 : 0)) * kLine;  // an odd number of lines
}

// gate_up is multiplied tile by tile where the halves begin on a block, else as a whole.
VLLM_INLINE bool has_split_blocks(const DecoderLayer& layer) {
  return layer.intermediate_size % kBlockCols == 0;
}

VLLM_INLINE StepSizes step_sizes(const DecoderArgs& args) {
  StepSizes sizes{0, 0, 0, 0};
  const auto grow = [](int64_t& size, int64_t n) { size = n > size ? n : size; };
  for (int64_t i = 0; i < args.num_layers; ++i) {
    const DecoderLayer& layer = args.layers[i];
    grow(sizes.qkv, layer.qkv.n);
    grow(sizes.heads, layer.out.k);
    grow(sizes.inner, layer.intermediate_size);
    if (!has_split_blocks(layer)) grow(sizes.gate_up, layer.gate_up.n);
  }
  return sizes;
}

// Cuts matrices out of one allocation.
template <typename T>
class StepAllocator {
 public:
  explicit StepAllocator(char* start) : next_(start) {}

  VLLM_INLINE StepMatrix<T> matrix(int64_t rows, int64_t n) {
    const int64_t stride = step_stride<T>(n);
    return StepMatrix<T>{take(rows * stride), stride};
  }
  VLLM_INLINE T* take(int64_t elements) {
    T* place = reinterpret_cast<T*>(next_);
    next_ += (elements * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return place;
  }
  VLLM_INLINE int64_t used(const char* start) const { return next_ - start; }

 private:
  char* next_;
};

// Lays out the step's memory from `start`; returns the bytes used. Threads call it with the same
// start and get the same shared buffers and their own private ones.
template <typename T>
VLLM_INLINE int64_t lay_out_step(const DecoderArgs& args, const StepSizes& sizes, char* start,
                                 int64_t rank, int64_t size, StepMemory<T>& memory) {
  StepAllocator<T> allocator(start);
  const int64_t tokens = args.tokens;
  memory.qkv = allocator.matrix(tokens, sizes.qkv);
  memory.heads = allocator.matrix(tokens, sizes.heads);
  memory.delta = allocator.matrix(tokens, args.hidden_size);
  memory.inner = allocator.matrix(tokens, sizes.inner);
  memory.gate_up = allocator.matrix(tokens, sizes.gate_up);
  const bool has_own_rows = tokens <= kOwnRows;
  if (!has_own_rows) {
    memory.normed = allocator.matrix(tokens, args.hidden_size);
    memory.residual = StepMatrix<T>{static_cast<T*>(args.hidden), args.hidden_stride};
  }
  for (int64_t thread = 0; thread < size; ++thread) {
    StepMemory<T> own = memory;
    if (has_own_rows) {
      own.normed = allocator.matrix(tokens, args.hidden_size);
      own.residual = allocator.matrix(tokens, args.hidden_size);
    }
    own.gate_tile = allocator.take(kRowsOfCache * kBlockCols);
    own.up_tile = allocator.take(kRowsOfCache * kBlockCols);
    if (thread == rank) memory = own;
  }
  return allocator.used(start);
}

}  // namespace VLLM_KERNEL_NAMESPACE
