// Kernels of the norm ops (csrc/cpu/norm.cpp).
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "cpu/rows.h"
#include "cpu/types.h"

namespace vllm::cpu {

struct RmsNormArgs {
  void* out;
  const void* x;
  void* residual;  // or null: else x is added to it first and the sum is normalised
  const void* weight;
  Element element;         // of out, x and residual
  Element weight_element;  // float or `element`
  Rows out_rows, x_rows, residual_rows;
  int64_t n;  // elements of a row
  float epsilon;
};

VLLM_DECLARE_KERNEL(void rms_norm(const RmsNormArgs& args))

}  // namespace vllm::cpu
