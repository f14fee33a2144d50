// Kernel of the rotary embedding (csrc/cpu/rope.cpp).
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "cpu/types.h"

namespace vllm::cpu {

// The heads of one tensor, turned in place.
struct RopeHeads {
  void* data;
  int64_t num_heads;
  int64_t token_stride, head_stride;  // in elements
};

struct RopeArgs {
  RopeHeads query, key;
  Element element;
  const int64_t* positions;  // [tokens], inside the table
  const float* cos_sin;      // [max_pos, rot_dim]
  int64_t tokens, rot_dim;
  bool is_neox;
};

VLLM_DECLARE_KERNEL(void rotary_embedding(const RopeArgs& args))

}  // namespace vllm::cpu
