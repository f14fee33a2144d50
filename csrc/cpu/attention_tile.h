// Attention of one tile of query rows over its keys, with one running softmax a row; included by
// kernels only (paged attention, fused decoder layers).
//
// A row meets its keys in blocks of kBlockKeys that start at multiples of kBlockKeys; the running
// softmax starts anew at multiples of kPartKeys and the parts are folded in rising order. A block
// or part in which a row sees nothing leaves its state as it is, bit for bit. So neither the tile,
// nor the chunk, nor the place of a key (cache or fresh) shows in the result.
#pragma once

#include "cpu/attention_rows.h"
#include "cpu/attention_values.h"
#include "cpu/memory.h"

namespace VLLM_KERNEL_NAMESPACE {

inline constexpr float kNothingSeen = -1e30f;  // running maximum before the first key
inline constexpr float kLog2e = 1.44269504f;

// Running softmax of the rows of a tile: sum of weights, weighted sum of values, relative to `top`.
// A weight is 2^(x - top) with logits x in units of log 2.
struct SoftmaxState {
  float* acc;  // [rows, value_cols]
  float* top;  // [rows]
  float* sum;  // [rows]
};

// Working memory of one thread.
template <typename T>
struct TileMemory {
  T* query;       // [rows, head_size]
  T* keys;        // packed block
  T* values;      // packed block
  T* weights;     // [rows, kBlockKeys]
  float* scores;  // [rows, kBlockKeys]
  float* new_top;
  float* decay;
  SoftmaxState part, total;
};

template <typename T>
VLLM_INLINE TileMemory<T> tile_memory(int64_t rows, int64_t head_size) {
  const int64_t value_cols = num_blocks(head_size) * kBlockCols;
  const int64_t lines = (rows + 15) / 16 * 16;
  const int64_t elements[] = {rows * head_size, kBlockKeys * head_size, kBlockKeys * value_cols,
                              rows * kBlockKeys};
  const int64_t floats = rows * kBlockKeys + 2 * rows * value_cols + 6 * lines;
  int64_t bytes = floats * 4 + 64;
  for (const int64_t n : elements) bytes += n * static_cast<int64_t>(sizeof(T)) + 64;
  char* next = static_cast<char*>(thread_scratch(Scratch::kAttention, static_cast<size_t>(bytes)));
  const auto take = [&next](int64_t n, int64_t size) {
    char* place = next;
    next += (n * size + 63) / 64 * 64;
    return place;
  };
  const auto take_floats = [&](int64_t n) { return reinterpret_cast<float*>(take(n, 4)); };
  TileMemory<T> memory;
  memory.query = reinterpret_cast<T*>(take(elements[0], sizeof(T)));
  memory.keys = reinterpret_cast<T*>(take(elements[1], sizeof(T)));
  memory.values = reinterpret_cast<T*>(take(elements[2], sizeof(T)));
  memory.weights = reinterpret_cast<T*>(take(elements[3], sizeof(T)));
  memory.scores = take_floats(rows * kBlockKeys);
  memory.part.acc = take_floats(rows * value_cols);
  memory.total.acc = take_floats(rows * value_cols);
  float** const lists[] = {&memory.new_top,  &memory.decay,     &memory.part.top,
                           &memory.part.sum, &memory.total.top, &memory.total.sum};
  for (float** list : lists) *list = take_floats(lines);
  return memory;
}

// How scores become logits in units of log 2: x = score * factor. With a soft cap scores are shaped
// in place first.
struct Shaping {
  float factor, scale, soft_cap;
  bool is_in_place;

  VLLM_INLINE explicit Shaping(const AttentionArgs& args)
      : factor(args.scale * kLog2e),
        scale(args.scale),
        soft_cap(args.soft_cap),
        is_in_place(false) {
    if (soft_cap > 0.0f || scale < 0.0f) {  // a negative factor would turn maxima into minima
      is_in_place = true;
      factor = kLog2e;
    }
  }
};

// The maximum of one row's logits, in units of log 2.
VLLM_INLINE float top_of_row(float* scores, uint64_t mask, int64_t count, const Shaping& shaping) {
  Vec top = set1(-__builtin_inff());
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec s = load(scores + i);
    if (shaping.is_in_place) {
      s = mul(s, set1(shaping.scale));
      if (shaping.soft_cap > 0.0f) {
        s = mul(tanh(div(s, set1(shaping.soft_cap))), set1(shaping.soft_cap));
      }
      store(scores + i, s);
    }
    if (mask != ~uint64_t{0}) s = select_bits(mask >> i, s, set1(-__builtin_inff()));
    top = max(s, top);
  }
  const float most = reduce_max(top);
  return most == -__builtin_inff() ? kNothingSeen : most * shaping.factor;
}

// Weights of one row, rounded to T; returns their sum.
template <typename T>
VLLM_INLINE float weigh_row(const float* scores, T* weights, uint64_t mask, int64_t count,
                            float factor, float top) {
  Vec sum = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec p = exp2_for<T>(fma(load(scores + i), set1(factor), set1(-top)));
    if (mask != ~uint64_t{0}) p = select_bits(mask >> i, p, zero());
    p = round_to<T>(p);
    store(weights + i, p);
    sum = add(sum, p);
  }
  return reduce_add(sum);
}

// Query rows times the first `count` keys of a block.
template <typename T>
VLLM_INLINE void score_block(const AttentionArgs& args, const TileMemory<T>& memory, int64_t rows,
                             const char* const* key_rows, int64_t count, RowPrefetcher& prefetch) {
  const int64_t head_size = args.head_size;
  pack_keys(memory.keys, key_rows, count, head_size, prefetch);
  for (int64_t key = 0; key < count; key += kBlockCols) {
    const T* keys = memory.keys + key / kBlockCols * block_elements<T>(head_size);
    float* scores = memory.scores + key;
    multiply_block(
        memory.query, head_size, rows, keys, head_size, prefetch, FromZero{},
        [=](int64_t r, int v, Vec x) { store(scores + r * kBlockKeys + v * kLanes, x); });
  }
}

// Scores to weights, and the step of the running softmax: new maxima, decay of what was, sums.
template <typename T>
VLLM_INLINE void weigh_block(const AttentionArgs& args, const TileTask& task,
                             const TileMemory<T>& memory, int64_t base, int64_t count) {
  const int64_t rows = task.tokens * task.group;
  const Shaping shaping(args);
  const SoftmaxState& state = memory.part;
  uint64_t masks[kTileQueryRows];
  for (int64_t token = 0, r = 0; token < task.tokens; ++token) {
    const int64_t position = task.first + token;
    masks[token] = visible_keys(args.visibility, position, position, base);
    for (int64_t g = 0; g < task.group; ++g, ++r) {
      const float top = top_of_row(memory.scores + r * kBlockKeys, masks[token], count, shaping);
      memory.new_top[r] = top > state.top[r] ? top : state.top[r];
    }
  }
  for (int64_t r = 0; r < rows; r += kLanes) {
    const Vec new_top = load(memory.new_top + r);
    store(memory.decay + r, exp2_for<float>(sub(load(state.top + r), new_top)));
    store(state.top + r, new_top);
  }
  for (int64_t token = 0, r = 0; token < task.tokens; ++token) {
    for (int64_t g = 0; g < task.group; ++g, ++r) {
      const float sum = weigh_row(memory.scores + r * kBlockKeys, memory.weights + r * kBlockKeys,
                                  masks[token], count, shaping.factor, state.top[r]);
      state.sum[r] = state.sum[r] * memory.decay[r] + sum;
    }
  }
}

// One block of keys, those in `live` (never none), for all rows of a tile. `next` is read next.
template <typename T>
void attend_block(const AttentionArgs& args, const TileTask& task, const TileMemory<T>& memory,
                  int64_t base, uint64_t live, const KeyRange& next) {
  const int64_t rows = task.tokens * task.group;
  const int64_t count = (64 - __builtin_clzll(live) + 15) / 16 * 16;
  const char* key_rows[kBlockKeys];
  const char* value_rows[kBlockKeys];
  find_rows(args, task, base, count, live, key_rows, value_rows);
  RowPrefetcher prefetch(args, next);
  score_block(args, memory, rows, key_rows, count, prefetch);
  weigh_block(args, task, memory, base, count);
  const ValueSum<T> sum{memory.weights, memory.values, memory.part.acc, memory.decay,
                        rows,           count,         args.head_size};
  add_values(sum, value_rows, prefetch);
}

VLLM_INLINE void clear_state(const SoftmaxState& state, int64_t rows, int64_t value_cols) {
  std::memset(state.acc, 0, static_cast<size_t>(rows * value_cols) * 4);
  std::memset(state.sum, 0, static_cast<size_t>(rows) * 4);
  for (int64_t r = 0; r < rows; ++r) state.top[r] = kNothingSeen;
}

VLLM_INLINE float exp2_of(float x) {
  float lanes[kLanes];
  store(lanes, exp2_for<float>(set1(x)));
  return lanes[0];
}

// total := total followed by part.
VLLM_INLINE void fold_state(const SoftmaxState& total, const SoftmaxState& part, int64_t rows,
                            int64_t value_cols) {
  for (int64_t r = 0; r < rows; ++r) {
    const float top = part.top[r] > total.top[r] ? part.top[r] : total.top[r];
    const float a = exp2_of(total.top[r] - top), b = exp2_of(part.top[r] - top);
    total.top[r] = top;
    total.sum[r] = total.sum[r] * a + part.sum[r] * b;
    for (int64_t c = 0; c < value_cols; c += kLanes) {
      float* acc = total.acc + r * value_cols + c;
      const Vec x = mul(load(acc), set1(a));
      store(acc, fma(load(part.acc + r * value_cols + c), set1(b), x));
    }
  }
}

// Rows of a tile up to which memory is slower than arithmetic.
inline constexpr int64_t kFewRows = 24;

// All blocks of one part, into memory.part; returns whether the tile sees any of its keys.
template <typename T>
VLLM_INLINE bool attend_part(const AttentionArgs& args, const TileTask& task,
                             const TileMemory<T>& memory, int64_t part) {
  const int64_t value_cols = num_blocks(args.head_size) * kBlockCols;
  const bool has_few_rows = task.tokens * task.group <= kFewRows;
  bool seen = false;
  const int64_t begin = part * kPartKeys;
  for (int64_t base = begin; base < begin + kPartKeys && base <= task.last; base += kBlockKeys) {
    const uint64_t live = visible_keys(args.visibility, task.first, task.last, base);
    if (live == 0) continue;
    KeyRange next{0, 0, 0, 0};
    if (has_few_rows) {
      const int64_t next_base = base + kBlockKeys;
      next = next_base <= task.last ? block_range(args, task, next_base) : task.upcoming;
    }
    if (!seen) clear_state(memory.part, task.tokens * task.group, value_cols);
    seen = true;
    attend_block(args, task, memory, base, live, next);
  }
  return seen;
}

template <typename T>
VLLM_INLINE void load_query(const AttentionArgs& args, const TileTask& task, T* query) {
  const int64_t token0 = args.batch.cu_query_lens[task.row] + task.first_token;
  for (int64_t token = 0; token < task.tokens; ++token) {
    for (int64_t g = 0; g < task.group; ++g, query += args.head_size) {
      const char* source = args.query + (token0 + token) * args.query_token_stride +
                           (task.kv_head * task.group + g) * args.query_head_stride;
      std::memcpy(query, source, static_cast<size_t>(args.head_size) * sizeof(T));
    }
  }
}

template <typename T>
VLLM_INLINE void store_tile(const AttentionArgs& args, const TileTask& task,
                            const SoftmaxState& state) {
  const int64_t value_cols = num_blocks(args.head_size) * kBlockCols;
  const int64_t token0 = args.batch.cu_query_lens[task.row] + task.first_token;
  for (int64_t token = 0, r = 0; token < task.tokens; ++token) {
    for (int64_t g = 0; g < task.group; ++g, ++r) {
      const int64_t head = task.kv_head * task.group + g;
      float factor = 1.0f, sum = state.sum[r];
      if (args.sinks != nullptr) {
        const float sink = args.sinks[head] * kLog2e;
        const float top = sink > state.top[r] ? sink : state.top[r];
        factor = exp2_of(state.top[r] - top);
        sum = sum * factor + exp2_of(sink - top);
      }
      const Vec scale = set1(sum > 0.0f ? factor / sum : 0.0f);
      T* out = reinterpret_cast<T*>(args.out + (token0 + token) * args.out_token_stride +
                                    head * args.out_head_stride);
      for (int64_t c = 0; c < args.head_size; c += kLanes) {
        const Vec x = mul(load(state.acc + r * value_cols + c), scale);
        const int64_t rest = args.head_size - c;
        rest >= kLanes ? store(out + c, x) : store_n(out + c, x, rest);
      }
    }
  }
}

}  // namespace VLLM_KERNEL_NAMESPACE
