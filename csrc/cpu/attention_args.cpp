// Checked views of the tensors that attention and the fused decoder layers take.
#include "cpu/attention_args.h"

namespace vllm::cpu {

void check_heads(const char* op, int64_t num_heads, int64_t num_kv_heads, int64_t head_size) {
  CHECK_ARG(head_size >= 8 && head_size <= kMaxHeadSize && head_size % 8 == 0, op,
            ": head size is ", head_size, ", allowed: multiples of 8 up to ", kMaxHeadSize);
  CHECK_ARG(num_kv_heads > 0 && num_heads % num_kv_heads == 0, op, ": ", num_heads,
            " query heads cannot share ", num_kv_heads, " KV heads evenly");
}

KeyValueRows cache_rows(const char* op, const char* name, const Tensor& cache, ScalarType type,
                        int64_t num_kv_heads, int64_t head_size) {
  check_tensor(op, name, cache, 4);
  check_dtype(op, name, cache, type);
  check_size(op, name, cache, 2, num_kv_heads);
  check_size(op, name, cache, 3, head_size);
  CHECK_ARG(cache.size(1) > 0, op, ": ", name, " has shape ", shape_text(cache),
            ", a block must hold tokens");
  const int64_t item = static_cast<int64_t>(cache.element_size());
  return KeyValueRows{.data = static_cast<char*>(cache.data_ptr()),
                      .unit_stride = cache.stride(0) * item,
                      .token_stride = cache.stride(1) * item,
                      .head_stride = cache.stride(2) * item};
}

AttentionBatch attention_batch(const char* op, const Tensor& block_offsets,
                               const Tensor& cu_query_lens, const Tensor& seq_lens,
                               int64_t num_tokens, int64_t num_units, int64_t block_tokens,
                               bool is_fresh) {
  check_tensor(op, "seq_lens", seq_lens, 1);
  check_tensor(op, "cu_query_lens", cu_query_lens, 1);
  check_tensor(op, "block_offsets", block_offsets, 2);
  check_dtype(op, "seq_lens", seq_lens, ScalarType::Int);
  check_dtype(op, "cu_query_lens", cu_query_lens, ScalarType::Int);
  check_dtype(op, "block_offsets", block_offsets, ScalarType::Int);
  const int64_t rows = seq_lens.size(0);
  check_size(op, "cu_query_lens", cu_query_lens, 0, rows + 1);
  check_size(op, "block_offsets", block_offsets, 0, rows);
  CHECK_ARG(rows <= 1 || block_offsets.stride(0) == block_offsets.size(1), op,
            ": block_offsets must be contiguous");
  const AttentionBatch batch{.block_offsets = static_cast<const int32_t*>(block_offsets.data_ptr()),
                             .cu_query_lens = static_cast<const int32_t*>(cu_query_lens.data_ptr()),
                             .seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr()),
                             .num_rows = rows,
                             .max_blocks = block_offsets.size(1),
                             .block_tokens = block_tokens};
  CHECK_ARG(batch.cu_query_lens[0] == 0 && batch.cu_query_lens[rows] == num_tokens, op,
            ": cu_query_lens runs from ", batch.cu_query_lens[0], " to ", batch.cu_query_lens[rows],
            ", there are ", num_tokens, " tokens");
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t query_len = batch.cu_query_lens[b + 1] - batch.cu_query_lens[b];
    const int64_t seq_len = batch.seq_lens[b];
    CHECK_ARG(query_len >= 0 && query_len <= seq_len, op, ": row ", b, " has ", query_len,
              " new tokens of ", seq_len);
    const int64_t cached = is_fresh ? seq_len - query_len : seq_len;
    const int64_t blocks = (cached + block_tokens - 1) / block_tokens;
    CHECK_ARG(blocks <= batch.max_blocks, op, ": row ", b, " needs ", blocks,
              " blocks, block_offsets has ", batch.max_blocks);
    const int32_t* offsets = batch.block_offsets + b * batch.max_blocks;
    for (int64_t i = 0; i < blocks; ++i) {
      CHECK_ARG(offsets[i] >= 0 && offsets[i] < num_units, op, ": block_offsets[", b, ", ", i,
                "] is ", offsets[i], ", the cache has ", num_units, " units");
    }
  }
  return batch;
}

}  // namespace vllm::cpu
