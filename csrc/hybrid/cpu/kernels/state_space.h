// Kernels of the state ops (csrc/hybrid/cpu/state_space.cpp).
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "cpu/types.h"

namespace vllm::cpu {

// The rows of a batch and where their states lie.
struct StateRows {
  const int32_t* offsets;   // unit of row b's state
  const int32_t* bounds;    // tokens of row b: bounds[b] to bounds[b + 1] - 1
  const int32_t* computed;  // 0: the state counts as zero
  int64_t count;
  int64_t tokens;       // of all rows together
  int64_t unit_stride;  // elements of the state between two units

  __attribute__((always_inline)) int64_t begin(int64_t row) const { return bounds[row]; }
  __attribute__((always_inline)) int64_t end(int64_t row) const { return bounds[row + 1]; }
  __attribute__((always_inline)) bool is_new(int64_t row) const { return computed[row] == 0; }
  __attribute__((always_inline)) int64_t place(int64_t row) const {
    return static_cast<int64_t>(offsets[row]) * unit_stride;
  }
};

// A tensor of heads over tokens whose last dimension is contiguous.
struct HeadsOf {
  void* data;
  int64_t token_stride, head_stride;

  template <typename T>
  __attribute__((always_inline)) T* at(int64_t token, int64_t head) const {
    return static_cast<T*>(data) + token * token_stride + head * head_stride;
  }
};

struct CausalConvArgs {
  void* out;
  const void* x;
  const void* weight;  // [taps][channels]
  const void* bias;    // or null
  void* state;         // per unit [taps - 1][channels]
  StateRows rows;
  Element element;
  int64_t channels, taps;
  int64_t out_stride, x_stride, weight_stride, state_stride;
  bool silu;
};

struct DeltaRuleArgs {
  HeadsOf out, q, k, v;
  const float* g;     // [tokens][heads]
  const float* beta;  // same
  float* state;       // per unit [heads][key_size][value_size]
  StateRows rows;
  Element element;
  int64_t heads, key_heads, key_size, value_size;
  float scale;
  bool l2norm;
};

struct Mamba2Args {
  HeadsOf out, x, b, c;
  const void* dt;
  int64_t dt_stride;
  const float* a;
  const float* d;        // or null
  const float* dt_bias;  // or null
  float* state;          // per unit [heads][head_size][state_size]
  StateRows rows;
  Element element;
  int64_t heads, groups, head_size, state_size;
  float dt_min, dt_max;
};

struct DeltaGatesArgs {
  float* g;
  float* beta;
  const void* a;
  const void* b;
  const float* a_log;
  const float* dt_bias;
  Element element;
  int64_t tokens, heads, a_stride, b_stride;
};

struct GatedNormArgs {
  void* out;
  const void* x;
  const void* gate;
  const void* weight;
  Element element;
  int64_t tokens, groups, group_size;
  int64_t out_stride, x_stride, gate_stride;
  int64_t weight_stride;  // elements between the weights of two groups
  float epsilon;
  bool gate_first;
};

// Tokens whose vectors are prepared together before the state is walked; the most a key head or a
// Mamba-2 state may have in its last dimension.
inline constexpr int64_t kChunkTokens = 64;
inline constexpr int64_t kMaxKeySize = 256;
inline constexpr int64_t kMaxTaps = 8;

VLLM_DECLARE_KERNEL(void causal_conv(const CausalConvArgs& args))
VLLM_DECLARE_KERNEL(void gated_delta_rule(const DeltaRuleArgs& args))
VLLM_DECLARE_KERNEL(void delta_rule_gates(const DeltaGatesArgs& args))
VLLM_DECLARE_KERNEL(void mamba2_scan(const Mamba2Args& args))
VLLM_DECLARE_KERNEL(void gated_rms_norm(const GatedNormArgs& args))

}  // namespace vllm::cpu
