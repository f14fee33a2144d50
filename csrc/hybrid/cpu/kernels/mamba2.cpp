// The Mamba-2 recurrence, token by token over a part of the state that stays in the first-level
// cache (arXiv 2405.21060).
//
// As with the delta rule, the walk costs no more operations than the paper's chunked form and gives
// the same bits wherever a prompt is cut.
#include <cmath>

#include "cpu/parallel.h"
#include "hybrid/cpu/kernels/state_space.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

constexpr int64_t kPartRows = 16;  // rows of the state that are walked together
constexpr int kTileRows = 4;       // rows that share the loads of B and C

struct Steps {
  int64_t size;
  float dt[kChunkTokens];
  float decay[kChunkTokens];
};

template <typename T>
void prepare_steps(Steps& steps, const Mamba2Args& args, int64_t first, int64_t head) {
  const T* dt = static_cast<const T*>(args.dt) + first * args.dt_stride + head;
  const float bias = args.dt_bias == nullptr ? 0.0f : args.dt_bias[head];
  for (int64_t t = 0; t < steps.size; ++t) {
    const float x = to_float(dt[t * args.dt_stride]) + bias;
    float step = x > 20.0f ? x : std::log1p(std::exp(x));
    step = step < args.dt_min ? args.dt_min : step;
    step = step > args.dt_max ? args.dt_max : step;
    steps.dt[t] = step;
    steps.decay[t] = std::exp(step * args.a[head]);
  }
}

// kRows rows of the state: S := decay S + scaled B', sums = S C.
template <int kRows, typename T>
VLLM_INLINE void step_rows(float* s, int64_t size, float decay, const float* scaled, const T* b,
                           const T* c, float* sums) {
  const Vec d = set1(decay);
  Vec x[kRows], sum[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    x[r] = set1(scaled[r]);
    sum[r] = zero();
  }
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec bv = load(b + i), cv = load(c + i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec row = fma(x[r], bv, mul(d, load(s + r * size + i)));
      store(s + r * size + i, row);
      sum[r] = fma(row, cv, sum[r]);
    }
  }
  if (i < size) {
    const int64_t n = size - i;
    const Vec bv = load_n(b + i, n), cv = load_n(c + i, n);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec row = fma(x[r], bv, mul(d, load_n(s + r * size + i, n)));
      store_n(s + r * size + i, row, n);
      sum[r] = fma(row, cv, sum[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) sums[r] = reduce_add(sum[r]);
}

// All tokens of a chunk over `rows` rows of the state, the first of which is `first_row`.
template <typename T>
VLLM_INLINE void walk_part(const Steps& steps, const Mamba2Args& args, float* s, int64_t first,
                           int64_t head, int64_t first_row, int64_t rows) {
  const int64_t group = head / (args.heads / args.groups), size = args.state_size;
  const float skip = args.d == nullptr ? 0.0f : args.d[head];
  for (int64_t t = 0; t < steps.size; ++t) {
    const T* x = args.x.at<const T>(first + t, head) + first_row;
    T* out = args.out.at<T>(first + t, head) + first_row;
    const T* b = args.b.at<const T>(first + t, group);
    const T* c = args.c.at<const T>(first + t, group);
    float given[kPartRows], scaled[kPartRows], sums[kPartRows];
    for (int64_t r = 0; r < rows; ++r) {
      given[r] = to_float(x[r]);
      scaled[r] = steps.dt[t] * given[r];
    }
    int64_t r = 0;
    for (; r + kTileRows <= rows; r += kTileRows) {
      step_rows<kTileRows>(s + r * size, size, steps.decay[t], scaled + r, b, c, sums + r);
    }
    for (; r < rows; ++r) {
      step_rows<1>(s + r * size, size, steps.decay[t], scaled + r, b, c, sums + r);
    }
    for (r = 0; r < rows; ++r) out[r] = from_float<T>(std::fma(skip, given[r], sums[r]));
  }
}

template <typename T>
void walk_head(const Mamba2Args& args, int64_t row, int64_t head) {
  Steps steps;
  const int64_t size = args.state_size, part_rows = kPartRows;
  float* state = args.state + args.rows.place(row) + head * args.head_size * size;
  bool is_new = args.rows.is_new(row);
  for (int64_t first = args.rows.begin(row); first < args.rows.end(row); first += kChunkTokens) {
    const int64_t rest = args.rows.end(row) - first;
    steps.size = rest < kChunkTokens ? rest : kChunkTokens;
    prepare_steps<T>(steps, args, first, head);
    for (int64_t p = 0; p < args.head_size; p += part_rows) {
      const int64_t rows = args.head_size - p < part_rows ? args.head_size - p : part_rows;
      float* s = state + p * size;
      if (is_new) {
        for (int64_t i = 0; i < rows * size; ++i) s[i] = 0.0f;
      }
      walk_part<T>(steps, args, s, first, head, p, rows);
    }
    is_new = false;
  }
}

template <typename T>
void walk_rows(const Mamba2Args& args) {
  const int64_t count = args.rows.count;
  const int64_t cost = args.rows.tokens * args.heads * args.head_size * args.state_size;
  // Heads outside, rows inside: a long row is shared by all threads.
  parallel_for(args.heads * count, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) walk_head<T>(args, i % count, i / count);
  });
}

}  // namespace

void mamba2_scan(const Mamba2Args& args) {
  if (args.element == Element::kFloat) return walk_rows<float>(args);
  walk_rows<bf16>(args);
}

}  // namespace VLLM_KERNEL_NAMESPACE
