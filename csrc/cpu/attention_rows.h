// Which keys a tile of query rows sees, and where their K and V rows lie; included by kernels only.
#pragma once

#include "cpu/kernels/attention.h"
#include "cpu/vec.h"

namespace VLLM_KERNEL_NAMESPACE {

// Cached keys of one KV head of a row, positions begin … end - 1.
struct KeyRange {
  int64_t row, kv_head, begin, end;
};

// What a unit is about.
struct TileTask {
  int64_t row, kv_head, first_token, tokens, group;
  int64_t start;        // position of the row's first new token
  int64_t first, last;  // positions of the tile
  KeyRange upcoming;    // where the next unit begins to read; empty if not known
};

VLLM_INLINE uint64_t bit_range(int64_t begin, int64_t end) {
  if (begin < 0) begin = 0;
  if (end > kBlockKeys) end = kBlockKeys;
  if (begin >= end) return 0;
  const uint64_t below_end = end == 64 ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
  return below_end & ~((uint64_t{1} << begin) - 1);
}

// Which keys of the block at position `base` the positions from..to see between them.
VLLM_INLINE uint64_t visible_keys(const Visibility& v, int64_t from, int64_t to, int64_t base) {
  const int64_t sinks = v.sink_tokens < to + 1 ? v.sink_tokens : to + 1;
  return bit_range(v.first(from) - base, to + 1 - base) | bit_range(-base, sinks - base);
}

// Stands for the row of a key which nobody sees.
alignas(64) inline constexpr char kZeroRow[kMaxHeadSize * 4] = {};

// Addresses of the K and V rows of the keys at base + i, for i < count where bit i of `live` is
// set; kZeroRow elsewhere.
VLLM_INLINE void find_rows(const AttentionArgs& args, const TileTask& task, int64_t base,
                           int64_t count, uint64_t live, const char** keys, const char** values) {
  const AttentionBatch& batch = args.batch;
  const int32_t* offsets = batch.block_offsets + task.row * batch.max_blocks;
  const int64_t known = task.last + 1 - base < count ? task.last + 1 - base : count;
  int64_t cached = args.fresh_key.data == nullptr ? known : task.start - base;
  if (cached > known) cached = known;
  int64_t i = 0;
  while (i < cached) {
    const int64_t block = (base + i) / batch.block_tokens, row = (base + i) % batch.block_tokens;
    const int64_t stop = i + batch.block_tokens - row;
    const char* key = args.key.cached(offsets[block], row, task.kv_head);
    const char* value = args.value.cached(offsets[block], row, task.kv_head);
    for (; i < stop && i < cached; ++i) {
      keys[i] = key;
      values[i] = value;
      key += args.key.token_stride;
      value += args.value.token_stride;
    }
  }
  for (; i < known; ++i) {
    const int64_t token = batch.cu_query_lens[task.row] + base + i - task.start;
    keys[i] = args.fresh_key.fresh(token, task.kv_head);
    values[i] = args.fresh_value.fresh(token, task.kv_head);
  }
  for (uint64_t dead = ~live & bit_range(0, count); dead != 0; dead &= dead - 1) {
    const int key = __builtin_ctzll(dead);
    keys[key] = values[key] = kZeroRow;
  }
}

// Brings the K and V rows of a range of keys closer, a row at each step. The steps of a block
// number about as many as its keys, whatever the sizes: requests for memory and arithmetic overlap.
class RowPrefetcher {
 public:
  VLLM_INLINE RowPrefetcher(const AttentionArgs& args, const KeyRange& range)
      : args_(args),
        offsets_(args.batch.block_offsets + range.row * args.batch.max_blocks),
        kv_head_(range.kv_head),
        position_(range.begin),
        end_(range.end),
        row_bytes_(args.head_size * (args.element == Element::kFloat ? 4 : 2)) {}

  VLLM_INLINE void step() {
    if (position_ >= end_) return;
    if (left_ == 0) enter_block();
    for (int64_t byte = 0; byte < row_bytes_; byte += 64) {
      _mm_prefetch(key_ + byte, _MM_HINT_T1);
      _mm_prefetch(value_ + byte, _MM_HINT_T1);
    }
    key_ += args_.key.token_stride;
    value_ += args_.value.token_stride;
    --left_;
    ++position_;
  }

 private:
  void enter_block() {
    const int64_t tokens = args_.batch.block_tokens;
    const int64_t offset = offsets_[position_ / tokens], row = position_ % tokens;
    key_ = args_.key.cached(offset, row, kv_head_);
    value_ = args_.value.cached(offset, row, kv_head_);
    left_ = tokens - row;
  }

  const AttentionArgs& args_;
  const int32_t* offsets_;
  const char *key_ = nullptr, *value_ = nullptr;
  int64_t kv_head_, position_, end_, row_bytes_, left_ = 0;
};

// Cached keys of the block at `base` as a task sees them.
VLLM_INLINE KeyRange block_range(const AttentionArgs& args, const TileTask& task, int64_t base) {
  const int64_t cached = args.fresh_key.data == nullptr ? task.last + 1 : task.start;
  const int64_t end = base + kBlockKeys < cached ? base + kBlockKeys : cached;
  return KeyRange{task.row, task.kv_head, base, end};
}

}  // namespace VLLM_KERNEL_NAMESPACE
