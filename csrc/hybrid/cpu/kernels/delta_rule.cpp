// The gated delta rule, token by token over a slice of the state that stays in the first-level
// cache (arXiv 2412.06464).
//
// The chunked form of the paper trades the walk over the state for products of matrices: about 80 K
// operations a token for a state of 128 x 128, where the walk takes 64 K. A processor without
// matrix units gains nothing from it, and the walk gives the same bits wherever a prompt is cut.
#include <cmath>

#include "cpu/parallel.h"
#include "hybrid/cpu/kernels/state_space.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

constexpr int kSliceCols = 32;
constexpr int kSliceVecs = kSliceCols / kLanes;
constexpr int kSums = kLanes == 16 ? 2 : 1;  // enough chains to hide the latency of fma
constexpr float kL2Epsilon = 1e-6f;

// What the tokens of a chunk bring, the same for all slices of a head.
struct Chunk {
  int64_t size;
  float q[kChunkTokens * kMaxKeySize];
  float k[kChunkTokens * kMaxKeySize];
  float decay[kChunkTokens];
  float beta[kChunkTokens];
  float qk[kChunkTokens];  // q · k
};

VLLM_INLINE float dot(const float* a, const float* b, int64_t n) {
  Vec sum = zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sum = fma(load(a + i), load(b + i), sum);
  if (i < n) sum = fma(load_n(a + i, n - i), load_n(b + i, n - i), sum);
  return reduce_add(sum);
}

// to = from * scale, divided by its length where `l2norm` says so.
template <typename T>
VLLM_INLINE void prepare_vector(float* to, const T* from, int64_t n, float scale, bool l2norm) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  if (i < n) store_n(to + i, load_n(from + i, n - i), n - i);
  if (l2norm) scale /= std::sqrt(dot(to, to, n) + kL2Epsilon);
  const Vec factor = set1(scale);
  for (i = 0; i + kLanes <= n; i += kLanes) store(to + i, mul(load(to + i), factor));
  if (i < n) store_n(to + i, mul(load_n(to + i, n - i), factor), n - i);
}

template <typename T>
void prepare_chunk(Chunk& chunk, const DeltaRuleArgs& args, int64_t first, int64_t head) {
  const int64_t size = args.key_size;
  const int64_t key_head = head / (args.heads / args.key_heads);
  for (int64_t t = 0; t < chunk.size; ++t) {
    float* q = chunk.q + t * size;
    float* k = chunk.k + t * size;
    prepare_vector(q, args.q.at<const T>(first + t, key_head), size, args.scale, args.l2norm);
    prepare_vector(k, args.k.at<const T>(first + t, key_head), size, 1.0f, args.l2norm);
    chunk.qk[t] = dot(q, k, size);
    const int64_t at = (first + t) * args.heads + head;
    chunk.decay[t] = std::exp(args.g[at]);
    chunk.beta[t] = args.beta[at];
  }
}

// What one token reads from the state: S'k and S'q. Rows of the state are taken in rising order by
// kSums alternating sums, however the loops around are arranged.
struct Reads {
  Vec sk[kSums][kSliceVecs], sq[kSums][kSliceVecs];

  VLLM_INLINE void clear() {
#pragma GCC unroll 2
    for (int s = 0; s < kSums; ++s) {
#pragma GCC unroll 4
      for (int v = 0; v < kSliceVecs; ++v) sk[s][v] = sq[s][v] = zero();
    }
  }
  template <int kSum>
  VLLM_INLINE void take(const Vec (&row)[kSliceVecs], float k, float q) {
    const Vec kv = set1(k), qv = set1(q);
#pragma GCC unroll 4
    for (int v = 0; v < kSliceVecs; ++v) {
      sk[kSum][v] = fma(row[v], kv, sk[kSum][v]);
      sq[kSum][v] = fma(row[v], qv, sq[kSum][v]);
    }
  }
  VLLM_INLINE Vec of_k(int v) const { return kSums == 2 ? add(sk[0][v], sk[1][v]) : sk[0][v]; }
  VLLM_INLINE Vec of_q(int v) const { return kSums == 2 ? add(sq[0][v], sq[1][v]) : sq[0][v]; }
};

template <int kSum>
VLLM_INLINE void read_row(Reads& reads, const float* s, float k, float q) {
  Vec row[kSliceVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kSliceVecs; ++v) row[v] = load(s + v * kLanes);
  reads.take<kSum>(row, k, q);
}

VLLM_INLINE void read_slice(Reads& reads, const float* s, const float* k, const float* q,
                            int64_t size) {
  reads.clear();
  int64_t i = 0;
  for (; i + 2 <= size; i += 2) {
    read_row<0>(reads, s + i * kSliceCols, k[i], q[i]);
    read_row<kSums - 1>(reads, s + (i + 1) * kSliceCols, k[i + 1], q[i + 1]);
  }
  if (i < size) read_row<0>(reads, s + i * kSliceCols, k[i], q[i]);
}

// S := decay S + k change', row by row.
template <int kSum, bool kIsLast>
VLLM_INLINE void update_row(Reads& reads, float* s, Vec decay, float k,
                            const Vec (&change)[kSliceVecs], float next_k, float next_q) {
  const Vec kv = set1(k);
  Vec row[kSliceVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kSliceVecs; ++v) {
    row[v] = fma(kv, change[v], mul(decay, load(s + v * kLanes)));
    store(s + v * kLanes, row[v]);
  }
  if constexpr (!kIsLast) reads.take<kSum>(row, next_k, next_q);
}

// The same for the whole slice, and what the next token reads from the result unless there is none.
template <bool kIsLast>
VLLM_INLINE void update_slice(Reads& reads, float* s, float decay, const float* k,
                              const Vec (&change)[kSliceVecs], const float* next_k,
                              const float* next_q, int64_t size) {
  const Vec d = set1(decay);
  reads.clear();
  int64_t i = 0;
  for (; i + 2 <= size; i += 2) {
    update_row<0, kIsLast>(reads, s + i * kSliceCols, d, k[i], change, kIsLast ? 0 : next_k[i],
                           kIsLast ? 0 : next_q[i]);
    update_row<kSums - 1, kIsLast>(reads, s + (i + 1) * kSliceCols, d, k[i + 1], change,
                                   kIsLast ? 0 : next_k[i + 1], kIsLast ? 0 : next_q[i + 1]);
  }
  if (i < size) {
    update_row<0, kIsLast>(reads, s + i * kSliceCols, d, k[i], change, kIsLast ? 0 : next_k[i],
                           kIsLast ? 0 : next_q[i]);
  }
}

VLLM_INLINE int64_t lanes_of(int64_t cols, int v) {
  const int64_t rest = cols - v * kLanes;
  return rest < 0 ? 0 : rest < kLanes ? rest : kLanes;
}

// All tokens of a chunk over kSliceCols columns of the state, of which `cols` are real.
template <typename T>
VLLM_INLINE void walk_slice(const Chunk& chunk, const DeltaRuleArgs& args, float* s, int64_t first,
                            int64_t head, int64_t column, int64_t cols) {
  const int64_t size = args.key_size;
  Reads reads;
  read_slice(reads, s, chunk.k, chunk.q, size);
  for (int64_t t = 0; t < chunk.size; ++t) {
    const T* value = args.v.at<const T>(first + t, head) + column;
    T* out = args.out.at<T>(first + t, head) + column;
    const Vec decay = set1(chunk.decay[t]), beta = set1(chunk.beta[t]), qk = set1(chunk.qk[t]);
    Vec change[kSliceVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kSliceVecs; ++v) {
      const int64_t n = lanes_of(cols, v);
      const Vec given = load_n(value + v * kLanes, n);
      change[v] = mul(fnma(decay, reads.of_k(v), given), beta);
      store_n(out + v * kLanes, fma(qk, change[v], mul(decay, reads.of_q(v))), n);
    }
    const float* k = chunk.k + t * size;
    const float* q = chunk.q + t * size;
    if (t + 1 < chunk.size) {
      update_slice<false>(reads, s, chunk.decay[t], k, change, k + size, q + size, size);
    } else {
      update_slice<true>(reads, s, chunk.decay[t], k, change, nullptr, nullptr, size);
    }
  }
}

// Copies a slice out of the state (or zeroes it), and back.
VLLM_INLINE void fetch_slice(float* s, const float* state, int64_t rows, int64_t stride,
                             int64_t cols) {
  for (int64_t i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kSliceVecs; ++v) {
      const int64_t n = lanes_of(cols, v);
      const float* from = state + i * stride + v * kLanes;
      store(s + i * kSliceCols + v * kLanes, n == kLanes ? load(from) : load_n(from, n));
    }
  }
}

VLLM_INLINE void put_slice(float* state, const float* s, int64_t rows, int64_t stride,
                           int64_t cols) {
  for (int64_t i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kSliceVecs; ++v) {
      const int64_t n = lanes_of(cols, v);
      const Vec row = load(s + i * kSliceCols + v * kLanes);
      float* to = state + i * stride + v * kLanes;
      if (n == kLanes) {
        store(to, row);
      } else {
        store_n(to, row, n);
      }
    }
  }
}

template <typename T>
void walk_head(const DeltaRuleArgs& args, int64_t row, int64_t head) {
  alignas(64) float slice[kMaxKeySize * kSliceCols];
  alignas(64) Chunk chunk;
  const int64_t rows = args.key_size, stride = args.value_size;
  float* state = args.state + args.rows.place(row) + head * rows * stride;
  bool is_new = args.rows.is_new(row);
  for (int64_t first = args.rows.begin(row); first < args.rows.end(row); first += kChunkTokens) {
    const int64_t rest = args.rows.end(row) - first;
    chunk.size = rest < kChunkTokens ? rest : kChunkTokens;
    prepare_chunk<T>(chunk, args, first, head);
    for (int64_t column = 0; column < stride; column += kSliceCols) {
      const int64_t cols = stride - column < kSliceCols ? stride - column : kSliceCols;
      if (is_new) {
        for (int64_t i = 0; i < rows * kSliceCols; i += kLanes) store(slice + i, zero());
      } else {
        fetch_slice(slice, state + column, rows, stride, cols);
      }
      walk_slice<T>(chunk, args, slice, first, head, column, cols);
      put_slice(state + column, slice, rows, stride, cols);
    }
    is_new = false;
  }
}

template <typename T>
void walk_rows(const DeltaRuleArgs& args) {
  const int64_t count = args.rows.count;
  const int64_t cost = args.rows.tokens * args.heads * args.key_size * args.value_size;
  // Heads outside, rows inside: a long row is shared by all threads.
  parallel_for(args.heads * count, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) walk_head<T>(args, i % count, i / count);
  });
}

template <typename T>
void compute_gates(const DeltaGatesArgs& args) {
  parallel_for(args.tokens, args.tokens * args.heads * 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* a = static_cast<const T*>(args.a) + t * args.a_stride;
      const T* b = static_cast<const T*>(args.b) + t * args.b_stride;
      for (int64_t h = 0; h < args.heads; ++h) {
        const float x = to_float(a[h]) + args.dt_bias[h];
        const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
        args.g[t * args.heads + h] = -std::exp(args.a_log[h]) * softplus;
        args.beta[t * args.heads + h] = 1.0f / (1.0f + std::exp(-to_float(b[h])));
      }
    }
  });
}

}  // namespace

void gated_delta_rule(const DeltaRuleArgs& args) {
  if (args.element == Element::kFloat) return walk_rows<float>(args);
  walk_rows<bf16>(args);
}

void delta_rule_gates(const DeltaGatesArgs& args) {
  if (args.element == Element::kFloat) return compute_gates<float>(args);
  compute_gates<bf16>(args);
}

}  // namespace VLLM_KERNEL_NAMESPACE
