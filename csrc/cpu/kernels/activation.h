// Kernels of the activation ops (csrc/cpu/activation.cpp).
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "cpu/rows.h"
#include "cpu/types.h"

namespace vllm::cpu {

enum class Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kGeluQuick = 3 };

struct ActivationArgs {
  void* out;
  const void* x;  // rows of n elements, or of 2 * n for the gated form: gate, then up
  Element element;
  Activation activation;
  Rows out_rows, x_rows;
  int64_t n;
};

VLLM_DECLARE_KERNEL(void act_and_mul(const ActivationArgs& args))
VLLM_DECLARE_KERNEL(void act(const ActivationArgs& args))

}  // namespace vllm::cpu
