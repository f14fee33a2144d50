// What the kernels of the fused query, key and value op are given.
#pragma once

#include "cuda/cache/cache_rows.cuh"
#include "cuda/norm/head_norm.cuh"
#include "cuda/rope/head_rope.cuh"

namespace vllm::cuda {

struct QkvArgs {
  void* qkv;
  int64_t token_stride;
  const int64_t* positions;
  const int2* slots;
  CacheRows key_cache, value_cache;
  const void *q_weight, *k_weight;  // null: no norm
  float epsilon;
  RopeTable table;  // rot_dim 0: no rotary embedding
  uint32_t tokens, num_heads, num_kv_heads;
  uint32_t first_head;       // heads before it stay as they are, and are not read
  uint32_t groups_of_token;  // each serves every groups_of_token-th head
  int head_size, lanes;
  bool is_packed;        // heads inside qkv, and norm weights
  bool is_cache_packed;  // rows of the caches
  bool is_table_packed;  // see RopeTurn
};

// Whether all is whole packs and pairs lie half a turning part apart, or nothing turns.
inline bool is_all_packed(const QkvArgs& args) {
  return args.is_packed && args.is_cache_packed &&
         (args.table.rot_dim == 0 || (args.table.is_neox && args.is_table_packed));
}

// Whether queries and keys have a norm both or neither.
inline bool are_norms_alike(const QkvArgs& args) {
  return (args.q_weight == nullptr) == (args.k_weight == nullptr);
}

template <typename T, typename W, int kPacks>
__device__ __forceinline__ void load_head_weight(WeightPack<T, W> (&weights)[kPacks],
                                                 const void* weight, const LaneGroup& group,
                                                 bool is_packed, int head_size) {
  if (weight == nullptr) return;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    weights[p].load(static_cast<const W*>(weight), group.begin_of<T>(p), head_size, is_packed);
  }
}

}  // namespace vllm::cuda
