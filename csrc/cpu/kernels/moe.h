// Kernels of the mixture-of-experts ops (csrc/cpu/moe.cpp).
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "cpu/kernels/activation.h"
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

// A pair is one token with one of its experts; pairs are numbered by expert, then by token.
struct ExpertsArgs {
  void* out;                 // [tokens, hidden]
  const void* x;             // [tokens, hidden]
  const void* w13;           // of each expert, packed [2 * inner, hidden]
  const void* w2;            // of each expert, packed [hidden, inner]
  const float* weights;      // [tokens, k]
  const int32_t* pair_of;    // [tokens, k], the number of each pair
  const int32_t* token_of;   // [pairs], the token of each pair
  const int32_t* pair_ends;  // [experts], one past the last pair of each expert
  Element element;
  Activation activation;
  int64_t tokens, k, experts, hidden, inner;
  int64_t out_stride, x_stride;  // in elements
};

VLLM_DECLARE_KERNEL(void topk_softmax(const TopkSoftmaxArgs& args))
VLLM_DECLARE_KERNEL(void fused_experts(const ExpertsArgs& args))

}  // namespace vllm::cpu
