// Checked views of the tensors that attention and the fused decoder layers take.
#pragma once

#include "cpu/kernels/attention.h"
#include "cpu/op.h"

namespace vllm::cpu {

// A cache [units, block_tokens, kv_heads, head_size] whose units may overlap (stride(0) = 256
// bytes).
KeyValueRows cache_rows(const char* op, const char* name, const Tensor& cache, ScalarType type,
                        int64_t num_kv_heads, int64_t head_size);

// block_offsets [B, max_blocks], cu_query_lens [B + 1], seq_lens [B], all int32; every offset that
// a row needs must lie in [0, num_units). `is_fresh`: new tokens' rows are not read from the cache.
AttentionBatch attention_batch(const char* op, const Tensor& block_offsets,
                               const Tensor& cu_query_lens, const Tensor& seq_lens,
                               int64_t num_tokens, int64_t num_units, int64_t block_tokens,
                               bool is_fresh);

void check_heads(const char* op, int64_t num_heads, int64_t num_kv_heads, int64_t head_size);

}  // namespace vllm::cpu
