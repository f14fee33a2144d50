// Where rows lie in a paged cache on the device; used by the cache ops and the fused query, key and
// value op.
#pragma once

#include "cuda/rows.cuh"

namespace vllm::cuda {

// A cache [units, block_tokens, heads, size] whose units may overlap (stride(0) = 256 bytes);
// strides in elements.
struct CacheRows {
  void* data;
  int64_t unit_stride, token_stride, head_stride;
  int32_t num_units, block_tokens;

  // First element of a token's row of `head`; `slot` is the block's offset and the row inside it.
  template <typename T>
  __device__ __forceinline__ T* row(int2 slot, uint32_t head) const {
    DEVICE_CHECK(slot.x < num_units && slot.y >= 0 && slot.y < block_tokens);
    return static_cast<T*>(data) + slot.x * unit_stride + slot.y * token_stride +
           head * head_stride;
  }
};

inline CacheRows cache_rows(const char* op, const char* name, const Tensor& cache,
                            const Tensor& like, int64_t num_kv_heads, int64_t head_size) {
  check_tensor(op, name, cache, 4);
  check_dtype(op, name, cache, like.scalar_type());
  check_same_device(op, name, cache, like);
  check_size(op, name, cache, 2, num_kv_heads);
  check_size(op, name, cache, 3, head_size);
  CHECK_ARG(cache.size(1) > 0 && cache.size(0) < kMaxRows && cache.size(1) < kMaxRows, op, ": ",
            name, " has shape ", shape_text(cache), ", a block must hold tokens");
  return CacheRows{.data = cache.data_ptr(),
                   .unit_stride = cache.stride(0),
                   .token_stride = cache.stride(1),
                   .head_stride = cache.stride(2),
                   .num_units = static_cast<int32_t>(cache.size(0)),
                   .block_tokens = static_cast<int32_t>(cache.size(1))};
}

// Whether every head's row of `size` elements of `item` bytes is whole packs on 16 bytes.
inline bool is_packed(const CacheRows& cache, int64_t size, int64_t item) {
  return is_pack_aligned(cache.data) && size * item % kPackBytes == 0 &&
         cache.unit_stride * item % kPackBytes == 0 &&
         cache.token_stride * item % kPackBytes == 0 && cache.head_stride * item % kPackBytes == 0;
}

// int32 [T, 2] on the device of `like`.
inline const int2* slots_of(const char* op, const Tensor& slots, const Tensor& like,
                            int64_t tokens) {
  check_tensor(op, "slots", slots, 2);
  check_dtype(op, "slots", slots, ScalarType::Int);
  check_same_device(op, "slots", slots, like);
  check_size(op, "slots", slots, 0, tokens);
  check_size(op, "slots", slots, 1, 2);
  check_contiguous(op, "slots", slots);
  CHECK_ARG(reinterpret_cast<uintptr_t>(slots.data_ptr()) % sizeof(int2) == 0, op,
            ": slots must lie on 8 bytes");
  return static_cast<const int2*>(slots.data_ptr());
}

}  // namespace vllm::cuda
