// out = x · W^T + bias over a packed weight.
#include "cpu/kernels/linear.h"

#include "cpu/gemm_share.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

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
void linear_all(const LinearArgs& args) {
#pragma omp parallel
  {
    const T* x = static_cast<const T*>(args.x);
    int64_t x_stride = args.x_stride;
    const Share share =
        share_of(args.m, num_blocks(args.n), omp_get_thread_num(), omp_get_num_threads());
    const int64_t rows = share.row_end - share.row_begin;
    if (rows_collide<T>(x_stride, rows)) {
      x_stride = args.k + 64 / static_cast<int64_t>(sizeof(T));
      x = spread_rows(x + share.row_begin * args.x_stride, args.x_stride, rows, args.k, x_stride) -
          share.row_begin * x_stride;
    }
    multiply_share(share, x, x_stride, static_cast<const T*>(args.packed), args.k,
                   static_cast<const T*>(args.bias), static_cast<Out*>(args.out), args.out_stride,
                   args.n, Ahead{});
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
