// Cuts the attention of a step into units of work; compiled once, for baseline x86-64.
#include "cpu/attention_plan.h"

#include <vector>

#include "cpu/memory.h"

namespace vllm::cpu {

namespace {

struct PlanMemory {
  std::vector<AttentionUnit> units;
  std::vector<int32_t> num_parts, missing_parts;
  std::vector<int64_t> partial_starts;
  int32_t next_unit;
};

int64_t parts_of(int64_t num_keys) { return (num_keys + kPartKeys - 1) / kPartKeys; }

}  // namespace

AttentionPlan plan_attention(const AttentionBatch& batch, int64_t num_heads, int64_t num_kv_heads,
                             int64_t head_size, int64_t num_threads) {
  thread_local PlanMemory memory;
  const int64_t group = num_heads / num_kv_heads;
  const int64_t tile_tokens = group < kTileQueryRows ? kTileQueryRows / group : 1;
  memory.units.clear();
  memory.num_parts.clear();
  memory.missing_parts.clear();
  memory.partial_starts.clear();

  int64_t num_items = 0;
  for (int64_t b = 0; b < batch.num_rows; ++b) {
    const int64_t q = batch.cu_query_lens[b + 1] - batch.cu_query_lens[b];
    num_items += (q + tile_tokens - 1) / tile_tokens * num_kv_heads;
  }
  const bool split = num_items < 2 * num_threads;
  const int64_t state_floats = (head_size + 31) / 32 * 32 + 2;
  int64_t partial_floats = 0;
  for (int64_t b = 0; b < batch.num_rows; ++b) {
    const int64_t q = batch.cu_query_lens[b + 1] - batch.cu_query_lens[b];
    const int64_t tiles = (q + tile_tokens - 1) / tile_tokens;
    for (int64_t tile = tiles - 1; tile >= 0; --tile) {  // the last sees most: largest first
      const int64_t first = tile * tile_tokens;
      const int64_t tokens = q - first < tile_tokens ? q - first : tile_tokens;
      const int64_t keys = batch.seq_lens[b] - q + first + tokens;
      const int64_t parts = split ? parts_of(keys) : 1;
      for (int64_t head = 0; head < num_kv_heads; ++head) {
        const int32_t item = static_cast<int32_t>(memory.num_parts.size());
        if (parts > 1) {
          memory.num_parts.push_back(static_cast<int32_t>(parts));
          memory.missing_parts.push_back(static_cast<int32_t>(parts));
          memory.partial_starts.push_back(partial_floats);
          partial_floats += parts * tokens * group * state_floats;
        }
        for (int64_t part = 0; part < parts; ++part) {
          memory.units.push_back(AttentionUnit{.row = static_cast<int32_t>(b),
                                               .first_token = static_cast<int32_t>(first),
                                               .num_tokens = static_cast<int32_t>(tokens),
                                               .kv_head = static_cast<int32_t>(head),
                                               .part = parts > 1 ? static_cast<int32_t>(part) : -1,
                                               .item = item});
        }
      }
    }
  }
  memory.next_unit = 0;
  const int64_t num_units = static_cast<int64_t>(memory.units.size());
  const bool many = num_units >= 4 * num_threads * num_kv_heads;
  return AttentionPlan{
      .units = memory.units.data(),
      .num_units = num_units,
      .grain = many ? num_kv_heads : 1,
      .next_unit = &memory.next_unit,
      .num_parts = memory.num_parts.data(),
      .missing_parts = memory.missing_parts.data(),
      .partial_starts = memory.partial_starts.data(),
      .partials = partial_floats == 0
                      ? nullptr
                      : static_cast<float*>(thread_scratch(
                            Scratch::kPartials, static_cast<size_t>(partial_floats) * 4))};
}

}  // namespace vllm::cpu
