// Kernel of the fused decoder layers (csrc/cpu/decoder.cpp).
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "cpu/kernels/activation.h"
#include "cpu/kernels/attention.h"
#include "cpu/types.h"

namespace vllm::cpu {

// A packed weight [n, k] and its bias [n] or null.
struct PackedLinear {
  const void* packed;
  const void* bias;
  int64_t n, k;
};

// What one layer is; pointers are null where a layer does without.
struct DecoderLayer {
  const void *input_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm;  // [hidden]
  const void *q_norm, *k_norm;                                              // [head_size]
  PackedLinear qkv, out, gate_up, down;
  const float* sinks;  // [num_heads]
  int64_t num_heads, num_kv_heads, head_size, intermediate_size;
  int64_t rope_table;  // index, negative for a layer without positions
  int64_t rotary_dim;
  bool is_neox;
  Activation activation;
  Visibility visibility;
  float scale, soft_cap;
};

struct DecoderLayerCache {
  KeyValueRows key, value;
  int64_t group;
};

struct DecoderArgs {
  const DecoderLayer* layers;
  const DecoderLayerCache* caches;  // one for each layer
  const AttentionPlan* plans;       // one for each shape of heads
  const int32_t* plan_of_layer;
  int64_t num_layers;
  const AttentionBatch* batches;    // one for each cache group
  const int32_t* const* slots;      // [tokens, 2] for each cache group
  const float* const* rope_tables;  // [positions, rotary_dim] each
  const int64_t* positions;         // [tokens]
  const void* final_norm;           // or null
  void* hidden;                     // [tokens, hidden_size], in and out
  int64_t tokens, hidden_size, hidden_stride;
  float epsilon;
  Element element, norm_element;
};

VLLM_DECLARE_KERNEL(void decoder_layers(const DecoderArgs& args))

}  // namespace vllm::cpu
