// out = x · W^T + bias over a packed weight.
#include "cpu/kernels/linear.h"

#include "cpu/gemm.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

template <typename T, typename Out>
struct LinearStore {
  Out* out;
  int64_t stride, n;
  const T* bias;
  int64_t column;  // first column of the block

  VLLM_INLINE void operator()(int64_t row, int v, Vec value) const {
    const int64_t c = column + v * kLanes;
    Out* p = out + row * stride + c;
    if (c + kLanes <= n) {
      if (bias != nullptr) value = add(value, load(bias + c));
      if constexpr (sizeof(Out) != sizeof(T)) value = round_to<T>(value);
      store(p, value);
    } else if (c < n) {
      const int64_t rest = n - c;
      if (bias != nullptr) value = add(value, load_n(bias + c, rest));
      if constexpr (sizeof(Out) != sizeof(T)) value = round_to<T>(value);
      store_n(p, value, rest);
    }
  }
};

// A copy of x whose rows do not collide in the cache.
template <typename T>
const T* spread_rows(const T* x, int64_t stride, int64_t rows, int64_t k, int64_t new_stride) {
  T* copy = static_cast<T*>(
      thread_scratch(Scratch::kActivations, static_cast<size_t>(rows * new_stride) * sizeof(T)));
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(copy + row * new_stride, x + row * stride, static_cast<size_t>(k) * sizeof(T));
  }
  return copy;
}

template <typename T, typename Out>
void linear_share(const LinearArgs& args, int64_t row_begin, int64_t row_end, int64_t block_begin,
                  int64_t block_end) {
  const T* packed = static_cast<const T*>(args.packed);
  const int64_t block_size = block_elements<T>(args.k);
  for (int64_t row = row_begin; row < row_end; row += kRowsOfCache) {
    const int64_t rows = row_end - row < kRowsOfCache ? row_end - row : kRowsOfCache;
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    int64_t x_stride = args.x_stride;
    if (rows_collide<T>(x_stride, rows)) {
      x_stride = args.k + 64 / static_cast<int64_t>(sizeof(T));
      x = spread_rows(x, args.x_stride, rows, args.k, x_stride);
    }
    Out* out = static_cast<Out*>(args.out) + row * args.out_stride;
    for (int64_t block = block_begin; block < block_end; ++block) {
      const T* w = packed + block * block_size;
      const T* next = block + 1 < block_end ? w + block_size : nullptr;
      const LinearStore<T, Out> finish{out, args.out_stride, args.n,
                                       static_cast<const T*>(args.bias), block * kBlockCols};
      multiply_block(x, x_stride, rows, w, args.k, next, finish);
    }
  }
}

template <typename T, typename Out>
void linear_all(const LinearArgs& args) {
  const int64_t blocks = num_blocks(args.n);
#pragma omp parallel
  {
    const Grid grid = choose_grid(args.m, blocks, omp_get_num_threads());
    const int64_t i = omp_get_thread_num() / grid.block_parts;
    const int64_t j = omp_get_thread_num() % grid.block_parts;
    linear_share<T, Out>(args, args.m * i / grid.row_parts, args.m * (i + 1) / grid.row_parts,
                         blocks * j / grid.block_parts, blocks * (j + 1) / grid.block_parts);
  }
}

VLLM_INLINE int64_t packed_index(const float*, int64_t n, int64_t k, int64_t num_k) {
  return (n / kBlockCols * num_k + k) * kBlockCols + n % kBlockCols;
}
VLLM_INLINE int64_t packed_index(const bf16*, int64_t n, int64_t k, int64_t num_k) {
  const int64_t pairs = (num_k + 1) / 2;
  return ((n / kBlockCols * pairs + k / 2) * kBlockCols + n % kBlockCols) * 2 + k % 2;
}

template <typename T>
void pack_all(const PackArgs& args) {
  T* packed = static_cast<T*>(args.packed);
  const T* plain = static_cast<const T*>(args.plain);
  const int64_t padded_n = num_blocks(args.n) * kBlockCols;
  const int64_t padded_k = block_elements<T>(args.k) / kBlockCols;
  parallel_for(padded_n / kBlockCols, padded_n * padded_k, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * kBlockCols; n < end * kBlockCols; ++n) {
      const T* row = plain + n * args.stride;
      for (int64_t k = 0; k < padded_k; ++k) {
        packed[packed_index(packed, n, k, args.k)] = n < args.n && k < args.k ? row[k] : T{};
      }
    }
  });
}

template <typename T>
VLLM_INLINE void copy_packed_row(T* out, const T* packed, int64_t n, int64_t num_k) {
  for (int64_t k = 0; k < num_k; ++k) out[k] = packed[packed_index(packed, n, k, num_k)];
}

template <typename T>
void unpack_all(const PackArgs& args) {
  T* plain = static_cast<T*>(args.plain);
  parallel_for(args.n, args.n * args.k, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      copy_packed_row(plain + n * args.stride, static_cast<const T*>(args.packed), n, args.k);
    }
  });
}

template <typename T>
void embedding_all(const EmbeddingArgs& args) {
  T* out = static_cast<T*>(args.out);
  parallel_for(args.m, args.m * args.k * 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      copy_packed_row(out + i * args.out_stride, static_cast<const T*>(args.packed), args.ids[i],
                      args.k);
    }
  });
}

}  // namespace

void linear(const LinearArgs& args) {
  if (args.element == Element::kFloat) return linear_all<float, float>(args);
  if (args.out_element == Element::kFloat) return linear_all<bf16, float>(args);
  linear_all<bf16, bf16>(args);
}

void pack_weight(const PackArgs& args) {
  args.element == Element::kFloat ? pack_all<float>(args) : pack_all<bf16>(args);
}

void unpack_weight(const PackArgs& args) {
  args.element == Element::kFloat ? unpack_all<float>(args) : unpack_all<bf16>(args);
}

void embedding(const EmbeddingArgs& args) {
  args.element == Element::kFloat ? embedding_all<float>(args) : embedding_all<bf16>(args);
}

}  // namespace VLLM_KERNEL_NAMESPACE
