// Element types as kernels see them; no torch here.
#pragma once

#include <cstdint>

namespace vllm::cpu {

struct bf16 {
  uint16_t bits;
};

enum class Element : int { kFloat = 0, kBf16 = 1 };

}  // namespace vllm::cpu
