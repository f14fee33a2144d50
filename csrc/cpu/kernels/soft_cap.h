// Kernel of the soft cap (csrc/cpu/soft_cap.cpp).
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "cpu/types.h"

namespace vllm::cpu {

struct SoftCapArgs {
  void* x;  // [rows, n], in place
  Element element;
  int64_t rows, n, stride;  // stride in elements
  float scale, cap;
};

VLLM_DECLARE_KERNEL(void soft_cap(const SoftCapArgs& args))

}  // namespace vllm::cpu
