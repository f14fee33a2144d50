// The phases of a decoder layer, each as one thread of the team runs it; included by kernels only.
// Between phases that read what other threads wrote lies a barrier (kernels/decoder.cpp).
#pragma once

#include "cpu/decoder_step.h"
#include "cpu/rows/activation.h"
#include "cpu/rows/norm.h"
#include "cpu/rows/rope.h"

namespace VLLM_KERNEL_NAMESPACE {

// What a thread needs to know in every phase. W is the element type of norm weights.
template <typename T, typename W>
struct Step {
  const DecoderArgs& args;
  Team team;
  StepMemory<T> memory;
  bool has_own_rows;

  VLLM_INLINE int64_t first_row() const { return has_own_rows ? 0 : team.begin(args.tokens); }
  VLLM_INLINE int64_t last_row() const {
    return has_own_rows ? args.tokens : team.end(args.tokens);
  }

  VLLM_INLINE Share share(const PackedLinear& linear) const {
    return share_of(args.tokens, num_blocks(linear.n), team.rank, team.size);
  }
  // Of the gate half of gate_up, where the halves begin on a block; the up half follows it.
  VLLM_INLINE Share gate_share(const DecoderLayer& layer) const {
    const int64_t blocks = layer.intermediate_size / kBlockCols;
    return share_of(args.tokens, blocks, team.rank, team.size);
  }
  VLLM_INLINE Ahead gate_ahead(const DecoderLayer& layer) const {
    if (!has_split_blocks(layer)) return ahead(layer.gate_up);
    return block_ahead<T>(layer.gate_up.packed, gate_share(layer).block_begin, layer.gate_up.k);
  }
  // What this thread reads first when it multiplies by `linear`.
  VLLM_INLINE Ahead ahead(const PackedLinear& linear) const {
    return block_ahead<T>(linear.packed, share(linear).block_begin, linear.k);
  }
};

// residual += post_norm(delta); out = norm(residual). Nothing is added before the first layer.
template <typename T, typename W>
VLLM_INLINE void norm_rows(const Step<T, W>& step, bool has_delta, const void* post_norm,
                           const void* norm, const StepMatrix<T>& out) {
  const StepMemory<T>& memory = step.memory;
  const int64_t n = step.args.hidden_size;
  const float epsilon = step.args.epsilon;
  for (int64_t i = step.first_row(); i < step.last_row(); ++i) {
    T* residual = memory.residual.row(i);
    if (has_delta) {
      const T* delta = memory.delta.row(i);
      if (post_norm != nullptr) {
        // The output of the norm to come is free until then.
        T* normed = memory.normed.row(i);
        rms_norm_row(normed, delta, static_cast<const W*>(post_norm), n, epsilon);
        delta = normed;
      }
      add_row(residual, delta, n);
    }
    if (norm != nullptr) {
      rms_norm_row(out.row(i), residual, static_cast<const W*>(norm), n, epsilon);
    }
  }
}

template <typename T, typename W>
VLLM_INLINE void multiply(const Step<T, W>& step, const StepMatrix<T>& x,
                          const PackedLinear& linear, const StepMatrix<T>& out, Ahead after) {
  multiply_share(step.share(linear), x.data, x.stride, static_cast<const T*>(linear.packed),
                 linear.k, static_cast<const T*>(linear.bias), out.data, out.stride, linear.n,
                 after);
}

// Norms, turns and caches what one KV head and its query heads have at `token`.
template <typename T, typename W>
void prepare_heads(const Step<T, W>& step, const DecoderLayer& layer,
                   const DecoderLayerCache& cache, int64_t token, int64_t kv_head) {
  const DecoderArgs& args = step.args;
  const int64_t size = layer.head_size, group = layer.num_heads / layer.num_kv_heads;
  T* row = step.memory.qkv.row(token);
  T* query = row + kv_head * group * size;
  T* key = row + (layer.num_heads + kv_head) * size;
  const T* value = key + layer.num_kv_heads * size;
  if (layer.q_norm != nullptr) {
    const W* weight = static_cast<const W*>(layer.q_norm);
    for (int64_t g = 0; g < group; ++g) {
      rms_norm_row(query + g * size, query + g * size, weight, size, args.epsilon);
    }
    rms_norm_row(key, key, static_cast<const W*>(layer.k_norm), size, args.epsilon);
  }
  if (layer.rope_table >= 0) {
    const float* cos_sin =
        args.rope_tables[layer.rope_table] + args.positions[token] * layer.rotary_dim;
    for (int64_t g = 0; g < group; ++g) {
      rope_head(query + g * size, cos_sin, layer.rotary_dim, layer.is_neox);
    }
    rope_head(key, cos_sin, layer.rotary_dim, layer.is_neox);
  }
  const int32_t* slot = args.slots[cache.group] + 2 * token;
  if (slot[0] < 0) return;
  const size_t bytes = static_cast<size_t>(size) * sizeof(T);
  std::memcpy(cache.key.cached(slot[0], slot[1], kv_head), key, bytes);
  std::memcpy(cache.value.cached(slot[0], slot[1], kv_head), value, bytes);
}

template <typename T, typename W>
VLLM_INLINE AttentionArgs attention_args(const Step<T, W>& step, const DecoderLayer& layer,
                                         const DecoderLayerCache& cache) {
  constexpr int64_t kItem = sizeof(T);
  const StepMemory<T>& memory = step.memory;
  const int64_t head_bytes = layer.head_size * kItem, token_bytes = memory.qkv.stride * kItem;
  char* query = reinterpret_cast<char*>(memory.qkv.data);
  char* key = query + layer.num_heads * head_bytes;
  char* value = key + layer.num_kv_heads * head_bytes;
  return AttentionArgs{.out = reinterpret_cast<char*>(memory.heads.data),
                       .query = query,
                       .out_token_stride = memory.heads.stride * kItem,
                       .out_head_stride = head_bytes,
                       .query_token_stride = token_bytes,
                       .query_head_stride = head_bytes,
                       .key = cache.key,
                       .value = cache.value,
                       .fresh_key = {key, 0, token_bytes, head_bytes},
                       .fresh_value = {value, 0, token_bytes, head_bytes},
                       .batch = step.args.batches[cache.group],
                       .visibility = layer.visibility,
                       .sinks = layer.sinks,
                       .element = step.args.element,
                       .num_heads = layer.num_heads,
                       .num_kv_heads = layer.num_kv_heads,
                       .head_size = layer.head_size,
                       .scale = layer.scale,
                       .soft_cap = layer.soft_cap};
}

// Norm, rope and cache writes of all heads, then attention. Where each row is one unit a head,
// whoever attends from a head has prepared it; else all heads are prepared before the first is
// attended from.
template <typename T, typename W>
VLLM_INLINE void attend(const Step<T, W>& step, const DecoderLayer& layer,
                        const DecoderLayerCache& cache, const AttentionPlan& plan) {
  const AttentionArgs args = attention_args(step, layer, cache);
  const auto prepare_tokens = [&](int64_t first, int64_t last, int64_t head, int64_t last_head) {
    for (int64_t t = first; t < last; ++t) {
      for (int64_t h = head; h < last_head; ++h) prepare_heads(step, layer, cache, t, h);
    }
  };
  if (!plan.has_whole_rows) {
    const int64_t tokens = step.args.tokens;
    prepare_tokens(step.team.begin(tokens), step.team.end(tokens), 0, layer.num_kv_heads);
    step.team.wait();
  }
  run_units<T>(args, plan, [&](const AttentionUnit& unit) {
    if (!plan.has_whole_rows) return;
    const int64_t first = args.batch.cu_query_lens[unit.row] + unit.first_token;
    prepare_tokens(first, first + unit.num_tokens, unit.kv_head, unit.kv_head + 1);
  });
}

template <typename T>
VLLM_INLINE void activate_row(Activation activation, T* out, const T* gate, const T* up,
                              int64_t n) {
  switch (activation) {
    case Activation::kSilu:
      return act_and_mul_row<Silu>(out, gate, up, n);
    case Activation::kGelu:
      return act_and_mul_row<Gelu>(out, gate, up, n);
    case Activation::kGeluTanh:
      return act_and_mul_row<GeluTanh>(out, gate, up, n);
    case Activation::kGeluQuick:
      return act_and_mul_row<GeluQuick>(out, gate, up, n);
  }
}

// inner = act(gate) * up, block by block: gate and up of 32 columns, then their product.
template <typename T, typename W>
VLLM_INLINE void multiply_gated(const Step<T, W>& step, const DecoderLayer& layer, Ahead after) {
  const StepMemory<T>& memory = step.memory;
  const PackedLinear& linear = layer.gate_up;
  const int64_t blocks = layer.intermediate_size / kBlockCols, k = linear.k;
  const Share share = step.gate_share(layer);
  const T* packed = static_cast<const T*>(linear.packed);
  const T* bias = static_cast<const T*>(linear.bias);
  for (int64_t row = share.row_begin; row < share.row_end; row += kRowsOfCache) {
    const int64_t left = share.row_end - row;
    const int64_t rows = left < kRowsOfCache ? left : kRowsOfCache;
    const T* x = memory.normed.row(row);
    const auto half = [&](int64_t block, T* tile, Ahead ahead) {
      const T* block_bias = bias == nullptr ? nullptr : bias + block * kBlockCols;
      Prefetcher prefetch = spread_over<T>(ahead, rows, k);
      multiply_block(x, memory.normed.stride, rows, packed + block * block_elements<T>(k), k,
                     prefetch, FromZero{},
                     ColumnStore<T, T>{tile, kBlockCols, kBlockCols, block_bias, 0});
    };
    for (int64_t block = share.block_begin; block < share.block_end; ++block) {
      half(block, memory.gate_tile, block_ahead<T>(packed, blocks + block, k));
      half(blocks + block, memory.up_tile,
           block + 1 < share.block_end ? block_ahead<T>(packed, block + 1, k) : after);
      for (int64_t r = 0; r < rows; ++r) {
        activate_row(layer.activation, memory.inner.row(row + r) + block * kBlockCols,
                     memory.gate_tile + r * kBlockCols, memory.up_tile + r * kBlockCols,
                     kBlockCols);
      }
    }
  }
}

// The same where the halves of the packed weight do not begin on a block.
template <typename T, typename W>
VLLM_INLINE void multiply_gated_whole(const Step<T, W>& step, const DecoderLayer& layer,
                                      Ahead after) {
  const StepMemory<T>& memory = step.memory;
  const int64_t n = layer.intermediate_size;
  multiply(step, memory.normed, layer.gate_up, memory.gate_up, after);
  step.team.wait();
  for (int64_t i = step.team.begin(step.args.tokens); i < step.team.end(step.args.tokens); ++i) {
    const T* row = memory.gate_up.row(i);
    activate_row(layer.activation, memory.inner.row(i), row, row + n, n);
  }
}

}  // namespace VLLM_KERNEL_NAMESPACE
