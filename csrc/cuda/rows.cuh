// Rows of a tensor of one to three dimensions whose last is contiguous: where row i begins, and
// whether its elements can be read 16 bytes at a time.
#pragma once

#include "cuda/pack.cuh"

namespace vllm::cuda {

inline constexpr int64_t kMaxRows = int64_t{1} << 31;

// Row numbers have 32 bits, since divisions of 64 bits are slow on a GPU; addresses have 64.
struct Rows {
  uint32_t outer, inner;               // number of rows = outer * inner
  int64_t outer_stride, inner_stride;  // in elements

  __host__ __device__ uint32_t count() const { return outer * inner; }
  __host__ __device__ int64_t offset(uint32_t row) const {
    if (inner == 1) return row * outer_stride;
    return row / inner * outer_stride + row % inner * inner_stride;
  }
};

// Checks that the rows of `t` are contiguous on a CUDA device, and says where they begin.
inline Rows rows_of(const char* op, const char* name, const Tensor& t) {
  const int64_t rank = t.dim();
  CHECK_ARG(rank >= 1 && rank <= 3, op, ": ", name, " has shape ", shape_text(t),
            ", expected rank 1 to 3");
  check_tensor(op, name, t, rank);
  Rows rows{.outer = 1, .inner = 1, .outer_stride = 0, .inner_stride = 0};
  if (rank >= 2) {
    rows.outer = static_cast<uint32_t>(t.size(0));
    rows.outer_stride = t.stride(0);
  }
  if (rank == 3) {
    rows.inner = static_cast<uint32_t>(t.size(1));
    rows.inner_stride = t.stride(1);
  }
  CHECK_ARG(rank == 1 || t.size(0) * (rank == 3 ? t.size(1) : 1) < kMaxRows, op, ": ", name,
            " has shape ", shape_text(t), ", allowed: fewer than ", kMaxRows, " rows");
  return rows;
}

inline bool is_pack_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kPackBytes == 0;
}

// Whether packs of every row, n elements of `item` bytes, are whole and lie on 16 bytes.
inline bool is_packed(const void* data, const Rows& rows, int64_t n, int64_t item) {
  return is_pack_aligned(data) && n * item % kPackBytes == 0 &&
         (rows.outer <= 1 || rows.outer_stride * item % kPackBytes == 0) &&
         (rows.inner <= 1 || rows.inner_stride * item % kPackBytes == 0);
}

}  // namespace vllm::cuda
