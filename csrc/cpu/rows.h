// Rows of a tensor of one to three dimensions whose last is contiguous: where row i begins. Shared
// by op files and kernels; no torch here.
#pragma once

#include <cstdint>

namespace vllm::cpu {

struct Rows {
  int64_t outer, inner;                // number of rows = outer * inner
  int64_t outer_stride, inner_stride;  // in elements

  __attribute__((always_inline)) int64_t count() const { return outer * inner; }
  __attribute__((always_inline)) int64_t offset(int64_t row) const {
    return row / inner * outer_stride + row % inner * inner_stride;
  }
};

}  // namespace vllm::cpu
