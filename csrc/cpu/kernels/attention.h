// Kernels of paged attention (csrc/cpu/attention.cpp).
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "cpu/types.h"

namespace vllm::cpu {

// K or V rows [token][head][head_size] somewhere in memory; strides in bytes. In a cache, the rows
// of a block start `offset * unit_stride` bytes from data.
struct KeyValueRows {
  char* data;
  int64_t unit_stride, token_stride, head_stride;

  char* cached(int64_t offset, int64_t row, int64_t head) const {
    return data + offset * unit_stride + row * token_stride + head * head_stride;
  }
  char* fresh(int64_t token, int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

// The rows (sequences) of a step.
struct AttentionBatch {
  const int32_t* block_offsets;  // [num_rows, max_blocks]
  const int32_t* cu_query_lens;  // [num_rows + 1]
  const int32_t* seq_lens;       // [num_rows]
  int64_t num_rows, max_blocks, block_tokens;
};

// What position p may see: p itself and what lies before it, restricted to the last `window`
// positions or to its chunk where these are not 0, and always the first `sink_tokens` ones.
struct Visibility {
  int64_t window, chunk, sink_tokens;

  int64_t first(int64_t p) const {
    int64_t first = 0;
    if (window > 0 && p + 1 > window) first = p + 1 - window;
    if (chunk > 0 && p / chunk * chunk > first) first = p / chunk * chunk;
    return first;
  }
};

// A piece of work: the query heads of one KV head at consecutive new tokens of one row, against all
// keys (part < 0) or against the keys of one part.
struct AttentionUnit {
  int32_t row, first_token, num_tokens, kv_head, part, item;
};

// How a step is cut into units; made once a step by plan_attention.
struct AttentionPlan {
  const AttentionUnit* units;
  int64_t num_units;
  int64_t grain;        // units taken at once
  bool has_whole_rows;  // each unit holds all new tokens of its row, and all their keys
  int32_t* next_unit;   // shared counter, 0 at the start of a layer
  // Items whose parts are computed apart: parts of each, parts still missing, where results wait.
  const int32_t* num_parts;
  int32_t* missing_parts;
  const int64_t* partial_starts;  // in floats
  int64_t partial_floats;         // room that `partials` must have
  float* partials;                // given by the caller
};

struct AttentionArgs {
  char* out;          // [tokens, heads, head_size]
  const char* query;  // [tokens, heads, head_size]
  int64_t out_token_stride, out_head_stride, query_token_stride, query_head_stride;  // in bytes
  KeyValueRows key, value;                                                           // the cache
  KeyValueRows fresh_key, fresh_value;  // new tokens' rows, data null where they are in the cache
  AttentionBatch batch;
  Visibility visibility;
  const float* sinks;  // [heads] logits that join each softmax, or null
  Element element;
  int64_t num_heads, num_kv_heads, head_size;
  float scale, soft_cap;  // soft_cap 0: none
};

// Keys of a block and of a part: what a row computes is cut at multiples of these positions.
inline constexpr int64_t kBlockKeys = 64;
inline constexpr int64_t kPartKeys = 512;
inline constexpr int64_t kTileQueryRows = 96;

inline constexpr int64_t kMaxHeadSize = 640;  // compressed keys of 512 + 64 elements and more

VLLM_DECLARE_KERNEL(void attention(const AttentionArgs& args, const AttentionPlan& plan))

}  // namespace vllm::cpu
