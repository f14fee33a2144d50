// Tiles of out = x · W^T over a packed weight; included by kernels only (linear, fused decoder
// layers, experts).
//
// A packed weight is a sequence of blocks of kBlockCols rows of W (columns of out). A float block
// is [K][32], a bf16 block [ceil(K/2)][32][2], zero padded, so that a block is one contiguous
// stream and a pair of k lies in one 32-bit lane. Every output element is one accumulator lane that
// runs over k in rising order: its value does not depend on the tile, the number of rows or the
// thread.
#pragma once

#include "cpu/vec.h"

namespace VLLM_KERNEL_NAMESPACE {

inline constexpr int kBlockCols = 32;
inline constexpr int kVecs = kBlockCols / kLanes;  // vectors across a block

// Elements of one packed block.
template <typename T>
VLLM_INLINE int64_t block_elements(int64_t k) {
  return sizeof(T) == 4 ? k * kBlockCols : (k + 1) / 2 * 2 * kBlockCols;
}

VLLM_INLINE int64_t num_blocks(int64_t n) { return (n + kBlockCols - 1) / kBlockCols; }

// Brings memory that is needed next into the second-level cache, a few lines at each step of a
// tile.
struct Prefetcher {
  const char* next;
  const char* end;
  int lines;  // a step

  VLLM_INLINE void step() {
    for (int i = 0; i < lines; ++i) {
      if (next < end) _mm_prefetch(next, _MM_HINT_T1);
      next += 64;
    }
  }
};

#if VLLM_ISA_AVX2
inline constexpr int kMaxTileRows = 3;
#else
inline constexpr int kMaxTileRows = 12;
#endif
template <typename T>
inline constexpr int kTileRows = kMaxTileRows;
#if VLLM_ISA_AVX2
template <>
inline constexpr int kTileRows<bf16> = 2;
#endif

VLLM_INLINE int load_pair(const bf16* p) {
  int pair;
  std::memcpy(&pair, p, sizeof pair);
  return pair;
}

// acc[r] += x[r][k] * w[k] for one k.
template <int R>
VLLM_INLINE void multiply_step(Vec (&acc)[R][kVecs], const float* x, int64_t stride,
                               const float* w) {
  Vec b[kVecs];
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) b[v] = load(w + v * kLanes);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Vec a = set1(x[r * stride]);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) acc[r][v] = fma(a, b[v], acc[r][v]);
  }
}

#if VLLM_ISA_AVX2

VLLM_INLINE Vec low_halves(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
VLLM_INLINE Vec high_halves(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}
// acc + pair.lo * w.lo + pair.hi * w.hi, lane by lane.
VLLM_INLINE Vec add_pairs(Vec acc, int pair, __m256i w) {
  const __m256i a = _mm256_set1_epi32(pair);
  return fma(high_halves(a), high_halves(w), fma(low_halves(a), low_halves(w), acc));
}
VLLM_INLINE __m256i load_pairs(const bf16* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

#else

// acc + pair.lo * w.lo + pair.hi * w.hi, lane by lane.
VLLM_INLINE Vec add_pairs(Vec acc, int pair, __m512i w) {
  const __m512i a = _mm512_set1_epi32(pair);
#if VLLM_ISA_AVX512_BF16
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)w);
#else
  const __m512i high = _mm512_set1_epi32(-65536);
  acc = fma(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
            _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), acc);
  return fma(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
             _mm512_castsi512_ps(_mm512_and_si512(w, high)), acc);
#endif
}
VLLM_INLINE __m512i load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }

#endif

// acc[r] += a[r].lo * w.lo + a[r].hi * w.hi, where a[r] is a pair of bf16 and w a row of pairs.
// What add_pairs computes of one argument alone is shared by the compiler.
template <int R, typename Pair>
VLLM_INLINE void multiply_pairs(Vec (&acc)[R][kVecs], const Pair& pair, const bf16* w) {
#if VLLM_ISA_AVX2
  // Too few registers for all columns at once.
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) {
    const auto b = load_pairs(w + v * kLanes * 2);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r][v] = add_pairs(acc[r][v], pair(r), b);
  }
#else
  __m512i b[kVecs];
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) b[v] = load_pairs(w + v * kLanes * 2);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const int a = pair(r);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) acc[r][v] = add_pairs(acc[r][v], a, b[v]);
  }
#endif
}

// acc = R rows of x times one block.
template <int R, typename Fetch>
VLLM_INLINE void multiply_tile(Vec (&acc)[R][kVecs], const float* x, int64_t stride, const float* w,
                               int64_t k, Fetch& prefetch) {
  int64_t i = 0;
  for (; i + 4 <= k; i += 4) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      multiply_step<R>(acc, x + i + j, stride, w + (i + j) * kBlockCols);
    }
    prefetch.step();
  }
  for (; i < k; ++i) multiply_step<R>(acc, x + i, stride, w + i * kBlockCols);
}

template <int R, typename Fetch>
VLLM_INLINE void multiply_tile(Vec (&acc)[R][kVecs], const bf16* x, int64_t stride, const bf16* w,
                               int64_t k, Fetch& prefetch) {
  int64_t i = 0;
  for (; i + 8 <= k; i += 8) {
#pragma GCC unroll 4
    for (int j = 0; j < 8; j += 2) {
      const bf16* a = x + i + j;
      multiply_pairs<R>(
          acc, [=](int r) { return load_pair(a + r * stride); }, w + (i + j) * kBlockCols);
    }
    prefetch.step();
  }
  for (; i + 2 <= k; i += 2) {
    const bf16* a = x + i;
    multiply_pairs<R>(acc, [=](int r) { return load_pair(a + r * stride); }, w + i * kBlockCols);
  }
  if (i < k) {
    const bf16* a = x + i;
    multiply_pairs<R>(
        acc, [=](int r) { return static_cast<int>(a[r * stride].bits); }, w + i * kBlockCols);
  }
}

// Where the sums of a product begin.
struct FromZero {
  VLLM_INLINE Vec operator()(int64_t, int) const { return zero(); }
};

// Rows of x times one block. `start(row, v)` gives the first value of the sum of column vector v of
// a row, `finish(row, v, value)` takes the last.
template <int R, typename T, typename Fetch, typename Start, typename Finish>
VLLM_INLINE void run_tile(const T* x, int64_t stride, const T* w, int64_t k, Fetch& prefetch,
                          int64_t row, const Start& start, const Finish& finish) {
  Vec acc[R][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) acc[r][v] = start(row + r, v);
  }
  multiply_tile<R>(acc, x + row * stride, stride, w, k, prefetch);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) finish(row + r, v, acc[r][v]);
  }
}

// Heights that tiles come in; others would only add code.
template <typename T>
VLLM_INLINE int tile_height(int64_t rows) {
  constexpr int kHeights[] = {12, 8, 6, 5, 4, 3, 2};
  for (const int height : kHeights) {
    // A rest of 1 or 2 rows would wait for its own sums instead of computing.
    const bool is_good_rest = rows - height == 0 || rows - height > 2 || kTileRows<T> < 4;
    if (height <= kTileRows<T> && height <= rows && is_good_rest) return height;
  }
  return 1;
}

// Rows [0, rows) of x times one block; `prefetch` steps along.
template <typename T, typename Fetch, typename Start, typename Finish>
VLLM_INLINE void multiply_block(const T* x, int64_t stride, int64_t rows, const T* w, int64_t k,
                                Fetch& prefetch, const Start& start, const Finish& finish) {
#define VLLM_TILE(R)                                              \
  case R:                                                         \
    if constexpr (R <= kTileRows<T>) {                            \
      run_tile<R>(x, stride, w, k, prefetch, row, start, finish); \
    }                                                             \
    break
  for (int64_t row = 0; row < rows;) {
    const int height = tile_height<T>(rows - row);
    switch (height) {
      VLLM_TILE(1);
      VLLM_TILE(2);
      VLLM_TILE(3);
      VLLM_TILE(4);
      VLLM_TILE(5);
      VLLM_TILE(6);
      VLLM_TILE(8);
      VLLM_TILE(12);
      default:
        break;
    }
    row += height;
  }
#undef VLLM_TILE
}

// Memory to bring closer while a block is multiplied, as a rule the next block.
struct Ahead {
  const void* data = nullptr;
  int64_t bytes = 0;
};

// Up to this many rows memory alone sets the pace, and the processor's own prefetchers, which see
// one long stream, are a third faster without help.
inline constexpr int64_t kStreamedRows = 5;

// A prefetcher that is done when all tiles of a block are.
template <typename T>
VLLM_INLINE Prefetcher spread_over(Ahead ahead, int64_t rows, int64_t k) {
  if (rows <= kStreamedRows) return Prefetcher{nullptr, nullptr, 0};
  constexpr int64_t kStepBytes = 16;  // of a row of x
  const int64_t tiles = (rows + kTileRows<T> - 1) / kTileRows<T>;
  const int64_t steps = tiles * k * static_cast<int64_t>(sizeof(T)) / kStepBytes;
  const int64_t lines = steps > 0 ? (ahead.bytes / 64 + steps - 1) / steps : 0;
  const char* first = static_cast<const char*>(ahead.data);
  return Prefetcher{first, first + ahead.bytes, static_cast<int>(lines)};
}

// The same, from zero; `next` is the next block or null.
template <typename T, typename Finish>
VLLM_INLINE void multiply_block(const T* x, int64_t stride, int64_t rows, const T* w, int64_t k,
                                const T* next, const Finish& finish) {
  const int64_t bytes = block_elements<T>(k) * static_cast<int64_t>(sizeof(T));
  Prefetcher prefetch = spread_over<T>(Ahead{next, next == nullptr ? 0 : bytes}, rows, k);
  multiply_block(x, stride, rows, w, k, prefetch, FromZero{}, finish);
}

// How `threads` threads share rows x blocks: a grid of row_parts * block_parts = threads.
struct Grid {
  int64_t row_parts, block_parts;
};

// The grid with the smallest largest share. Reading a block costs about as much as multiplying a
// tile of rows by it, so rows are split only where blocks alone leave threads idle.
VLLM_INLINE Grid choose_grid(int64_t rows, int64_t blocks, int64_t threads) {
  Grid best{1, threads};
  int64_t best_cost = INT64_MAX;
  for (int64_t parts = 1; parts <= threads; ++parts) {
    if (threads % parts != 0) continue;
    const int64_t block_parts = threads / parts;
    const int64_t share = (rows + parts - 1) / parts + kMaxTileRows;
    const int64_t cost = share * ((blocks + block_parts - 1) / block_parts);
    if (cost < best_cost) {
      best_cost = cost;
      best = Grid{parts, block_parts};
    }
  }
  return best;
}

// Rows whose activations stay in the second-level cache while weights stream by.
inline constexpr int64_t kRowsOfCache = 192;

// Rows that lie a multiple of 4 KiB apart fall into one set of the first-level cache.
template <typename T>
VLLM_INLINE bool rows_collide(int64_t stride, int64_t rows) {
  return rows > 4 && stride * static_cast<int64_t>(sizeof(T)) % 4096 == 0;
}

}  // namespace VLLM_KERNEL_NAMESPACE
