// From a torch tensor of one to three dimensions to the kernels' Rows; included by op files only.
#pragma once

#include "cpu/op.h"
#include "cpu/rows.h"

namespace vllm::cpu {

// Checks that the rows of `t` are contiguous on the CPU, and says where they begin.
inline Rows rows_of(const char* op, const char* name, const Tensor& t) {
  const int64_t rank = t.dim();
  CHECK_ARG(rank >= 1 && rank <= 3, op, ": ", name, " has shape ", shape_text(t),
            ", expected rank 1 to 3");
  check_tensor(op, name, t, rank);
  Rows rows{.outer = 1, .inner = 1, .outer_stride = 0, .inner_stride = 0};
  if (rank >= 2) {
    rows.outer = t.size(0);
    rows.outer_stride = t.stride(0);
  }
  if (rank == 3) {
    rows.inner = t.size(1);
    rows.inner_stride = t.stride(1);
  }
  return rows;
}

// Checks that `t` has the dtype and the shape of `like`.
inline void check_like(const char* op, const char* name, const Tensor& t, const Tensor& like) {
  check_dtype(op, name, t, like.scalar_type());
  CHECK_ARG(t.dim() == like.dim(), op, ": ", name, " has shape ", shape_text(t), ", expected ",
            shape_text(like));
  for (int64_t i = 0; i < like.dim(); ++i) {
    CHECK_ARG(t.size(i) == like.size(i), op, ": ", name, " has shape ", shape_text(t),
              ", expected ", shape_text(like));
  }
}

}  // namespace vllm::cpu
