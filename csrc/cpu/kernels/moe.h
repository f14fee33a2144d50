// Kernels of the mixture-of-experts ops (csrc/cpu/moe.cpp).
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "cpu/types.h"

namespace vllm::cpu {

struct TopkSoftmaxArgs {
  float* weights;    // [tokens, k]
  int32_t* indices;  // [tokens, k]
  const void* gating;
  Element element;
  int64_t tokens, experts, k;
  int64_t stride;  // of gating, in elements
  bool renormalize;
};

// What stands between the two products of an expert. The first gives kRelu2 `inner` outputs, which
// have no gate; kClamped gates and their factors in turn; the others all gates, then all factors.
enum class ExpertActivation : int { kSilu, kGelu, kGeluTanh, kClamped, kRelu2 };

struct Experts {
  const void* first;                  // of each expert, packed [first_size, hidden]
  const void* first_bias = nullptr;   // [count, first_size], or null
  const void* second;                 // of each expert, packed [hidden, inner]
  const void* second_bias = nullptr;  // [count, hidden], or null
  ExpertActivation activation;
  float alpha = 0.0f, limit = 0.0f;  // of kClamped
  int64_t count, inner;
  int64_t first_size;  // outputs of the first product
};

// A pair is one token with one of its experts; pairs are numbered by expert, then by token.
struct ExpertsArgs {
  void* out;      // [tokens, hidden]
  const void* x;  // [tokens, hidden]
  Experts experts;
  const float* weights;      // [tokens, k]
  const int32_t* pair_of;    // [tokens, k], the number of each pair
  const int32_t* token_of;   // [pairs], the token of each pair
  const int32_t* pair_ends;  // [experts.count], one past the last pair of each expert
  Element element;
  int64_t tokens, k, hidden;
  int64_t out_stride, x_stride;  // in elements
};

VLLM_DECLARE_KERNEL(void topk_softmax(const TopkSoftmaxArgs& args))
VLLM_DECLARE_KERNEL(void fused_experts(const ExpertsArgs& args))

}  // namespace vllm::cpu
