// The units of an attention plan, as one thread of a parallel region works them off; included by
// kernels only.
#pragma once

#include "cpu/attention_tile.h"

namespace VLLM_KERNEL_NAMESPACE {

VLLM_INLINE TileTask task_of(const AttentionArgs& args, const AttentionUnit& unit) {
  const AttentionBatch& batch = args.batch;
  const int64_t q = batch.cu_query_lens[unit.row + 1] - batch.cu_query_lens[unit.row];
  const int64_t start = batch.seq_lens[unit.row] - q;
  return TileTask{.row = unit.row,
                  .kv_head = unit.kv_head,
                  .first_token = unit.first_token,
                  .tokens = unit.num_tokens,
                  .group = args.num_heads / args.num_kv_heads,
                  .start = start,
                  .first = start + unit.first_token,
                  .last = start + unit.first_token + unit.num_tokens - 1,
                  .upcoming = {0, 0, 0, 0}};
}

// The keys that a unit reads first.
VLLM_INLINE KeyRange first_range(const AttentionArgs& args, const AttentionUnit& unit) {
  const TileTask task = task_of(args, unit);
  const int64_t first = args.visibility.sink_tokens > 0 ? 0 : args.visibility.first(task.first);
  const int64_t part_first = unit.part * kPartKeys;
  return block_range(args, task,
                     (first > part_first ? first : part_first) / kBlockKeys * kBlockKeys);
}

// Place of the state of one part of an item whose parts are computed apart.
VLLM_INLINE SoftmaxState partial_state(const AttentionPlan& plan, int64_t item, int64_t part,
                                       int64_t rows, int64_t value_cols) {
  float* start = plan.partials + plan.partial_starts[item] + part * rows * (value_cols + 2);
  return SoftmaxState{
      .acc = start, .top = start + rows * value_cols, .sum = start + rows * (value_cols + 1)};
}

// One part of an item; whoever completes the item folds the parts, in rising order as always.
template <typename T>
VLLM_INLINE void run_part_unit(const AttentionArgs& args, const AttentionPlan& plan,
                               const AttentionUnit& unit, TileMemory<T> memory) {
  const TileTask task = task_of(args, unit);
  const int64_t rows = task.tokens * task.group;
  const int64_t value_cols = num_blocks(args.head_size) * kBlockCols;
  const SoftmaxState partial = partial_state(plan, unit.item, unit.part, rows, value_cols);
  clear_state(partial, rows, value_cols);
  load_query(args, task, memory.query);
  if (attend_part(args, task, memory, unit.part)) {
    std::memcpy(partial.acc, memory.part.acc, static_cast<size_t>(rows * value_cols) * 4);
    std::memcpy(partial.top, memory.part.top, static_cast<size_t>(rows) * 4);
    std::memcpy(partial.sum, memory.part.sum, static_cast<size_t>(rows) * 4);
  }
  if (__atomic_sub_fetch(&plan.missing_parts[unit.item], 1, __ATOMIC_ACQ_REL) > 0) return;
  const int32_t parts = plan.num_parts[unit.item];
  const SoftmaxState total = partial_state(plan, unit.item, 0, rows, value_cols);
  for (int32_t part = 1; part < parts; ++part) {
    fold_state(total, partial_state(plan, unit.item, part, rows, value_cols), rows, value_cols);
  }
  store_tile<T>(args, task, total);
  __atomic_store_n(&plan.missing_parts[unit.item], parts, __ATOMIC_RELAXED);  // for the next layer
}

template <typename T>
VLLM_INLINE void run_whole_unit(const AttentionArgs& args, const AttentionUnit& unit,
                                const KeyRange& upcoming, TileMemory<T> memory) {
  TileTask task = task_of(args, unit);
  task.upcoming = upcoming;
  const int64_t rows = task.tokens * task.group;
  const int64_t value_cols = num_blocks(args.head_size) * kBlockCols;
  load_query(args, task, memory.query);
  const int64_t first_key = args.visibility.sink_tokens > 0 ? 0 : args.visibility.first(task.first);
  bool any = false;
  for (int64_t part = first_key / kPartKeys; part <= task.last / kPartKeys; ++part) {
    if (!attend_part(args, task, memory, part)) continue;
    if (any) {
      fold_state(memory.total, memory.part, rows, value_cols);
    } else {
      const SoftmaxState first = memory.part;
      memory.part = memory.total;
      memory.total = first;
    }
    any = true;
  }
  store_tile<T>(args, task, memory.total);
}

// Takes units off the plan until none is left. Every thread of a region calls this; the counter
// must be 0 before and is left beyond the end. `prepare(unit)` runs before a unit, on its thread.
template <typename T, typename Prepare>
VLLM_INLINE void run_units(const AttentionArgs& args, const AttentionPlan& plan,
                           const Prepare& prepare) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  const int64_t rows = group < kTileQueryRows ? kTileQueryRows / group * group : group;
  const TileMemory<T> memory = tile_memory<T>(rows, args.head_size);
  const int32_t grain = static_cast<int32_t>(plan.grain);
  while (true) {
    const int64_t begin = __atomic_fetch_add(plan.next_unit, grain, __ATOMIC_RELAXED);
    if (begin >= plan.num_units) return;
    const int64_t end = begin + grain < plan.num_units ? begin + grain : plan.num_units;
    for (int64_t i = begin; i < end; ++i) {
      const AttentionUnit& unit = plan.units[i];
      prepare(unit);
      if (unit.part < 0) {
        // Another thread may take it; then the guess has cost little.
        const bool has_next = i + 1 < plan.num_units;
        run_whole_unit(args, unit, has_next ? first_range(args, plan.units[i + 1]) : KeyRange{},
                       memory);
      } else {
        run_part_unit(args, plan, unit, memory);
      }
    }
  }
}

}  // namespace VLLM_KERNEL_NAMESPACE
