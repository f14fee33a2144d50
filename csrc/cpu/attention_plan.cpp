// Cuts the attention of a step into units of work; compiled once, for baseline x86-64.
#include "cpu/attention_plan.h"

namespace vllm::cpu {

namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One tile of one KV head: a unit, or a unit for each part of its keys.
void add_item(AttentionPlanMemory& memory, AttentionUnit unit, int64_t parts, int64_t part_floats,
              int64_t& partial_floats) {
  if (parts == 1) {
    memory.units.push_back(unit);
    return;
  }
  unit.item = static_cast<int32_t>(memory.num_parts.size());
  memory.num_parts.push_back(static_cast<int32_t>(parts));
  memory.missing_parts.push_back(static_cast<int32_t>(parts));
  memory.partial_starts.push_back(partial_floats);
  partial_floats += parts * part_floats;
  for (int64_t part = 0; part < parts; ++part) {
    unit.part = static_cast<int32_t>(part);
    memory.units.push_back(unit);
  }
}

}  // namespace

AttentionPlan plan_attention(AttentionPlanMemory& memory, const AttentionBatch& batch,
                             int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
                             int64_t num_threads) {
  const int64_t group = num_heads / num_kv_heads;
  const int64_t tile_tokens = group < kTileQueryRows ? kTileQueryRows / group : 1;
  memory.units.clear();
  memory.num_parts.clear();
  memory.missing_parts.clear();
  memory.partial_starts.clear();
  memory.next_unit = 0;

  int64_t num_items = 0, most_tiles = 0;
  for (int64_t b = 0; b < batch.num_rows; ++b) {
    const int64_t q = batch.cu_query_lens[b + 1] - batch.cu_query_lens[b];
    const int64_t tiles = divide_up(q, tile_tokens);
    num_items += tiles * num_kv_heads;
    most_tiles = tiles > most_tiles ? tiles : most_tiles;
  }
  const bool split = num_items < 2 * num_threads;
  const int64_t state_floats = divide_up(head_size, 32) * 32 + 2;
  int64_t partial_floats = 0;
  for (int64_t b = 0; b < batch.num_rows; ++b) {
    const int64_t q = batch.cu_query_lens[b + 1] - batch.cu_query_lens[b];
    for (int64_t tile = divide_up(q, tile_tokens) - 1; tile >= 0; --tile) {  // largest first
      const int64_t first = tile * tile_tokens;
      const int64_t tokens = q - first < tile_tokens ? q - first : tile_tokens;
      const int64_t keys = batch.seq_lens[b] - q + first + tokens;
      const int64_t parts = split ? divide_up(keys, kPartKeys) : 1;
      for (int64_t head = 0; head < num_kv_heads; ++head) {
        const AttentionUnit unit{.row = static_cast<int32_t>(b),
                                 .first_token = static_cast<int32_t>(first),
                                 .num_tokens = static_cast<int32_t>(tokens),
                                 .kv_head = static_cast<int32_t>(head),
                                 .part = -1,
                                 .item = -1};
        add_item(memory, unit, parts, tokens * group * state_floats, partial_floats);
      }
    }
  }
  const int64_t num_units = static_cast<int64_t>(memory.units.size());
  const bool is_long = num_units >= 4 * num_threads * num_kv_heads;
  return AttentionPlan{.units = memory.units.data(),
                       .num_units = num_units,
                       .grain = is_long ? num_kv_heads : 1,
                       .has_whole_rows = most_tiles <= 1 && memory.num_parts.empty(),
                       .next_unit = &memory.next_unit,
                       .num_parts = memory.num_parts.data(),
                       .missing_parts = memory.missing_parts.data(),
                       .partial_starts = memory.partial_starts.data(),
                       .partial_floats = partial_floats,
                       .partials = nullptr};
}

}  // namespace vllm::cpu
