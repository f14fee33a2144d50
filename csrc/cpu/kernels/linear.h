// Kernels of the linear ops (csrc/cpu/linear.cpp); the packed layout is described in cpu/gemm.h.
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "cpu/types.h"

namespace vllm::cpu {

struct LinearArgs {
  void* out;      // [m, n]
  const void* x;  // [m, k]
  const void* packed;
  const void* bias;  // [n] of the element type, or null
  Element element;
  Element out_element;  // `element`, or float: then values are rounded to `element` first
  int64_t m, n, k;
  int64_t out_stride, x_stride;  // in elements
};

struct PackArgs {
  void* packed;
  void* plain;  // [n, k]
  Element element;
  int64_t n, k;
  int64_t stride;  // of plain, in elements
};

struct EmbeddingArgs {
  void* out;           // [m, k]
  const int64_t* ids;  // [m]
  const void* packed;
  Element element;
  int64_t m, k, out_stride;
};

VLLM_DECLARE_KERNEL(void linear(const LinearArgs& args))
VLLM_DECLARE_KERNEL(void pack_weight(const PackArgs& args))
VLLM_DECLARE_KERNEL(void unpack_weight(const PackArgs& args))
VLLM_DECLARE_KERNEL(void embedding(const EmbeddingArgs& args))

}  // namespace vllm::cpu
