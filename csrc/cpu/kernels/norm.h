// Kernels of the norm ops (csrc/cpu/norm.cpp).
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "cpu/types.h"

namespace vllm::cpu {

struct RmsNormArgs {
  void* out;       // [rows, n]
  const void* x;   // [rows, n]
  void* residual;  // [rows, n] or null: then x is added to it first and the sum is normalised
  const void* weight;
  Element element;         // of out, x and residual
  Element weight_element;  // float or `element`
  int64_t rows, n;
  int64_t out_stride, x_stride, residual_stride;  // in elements
  float epsilon;
};

VLLM_DECLARE_KERNEL(void rms_norm(const RmsNormArgs& args))

}  // namespace vllm::cpu
