// Ops: _C_cache_ops::reshape_and_cache, _C_cache_ops::copy_blocks. Plain memory moves: no kernel
// file.
#include <cstring>

#include "cpu/attention_args.h"

namespace vllm::cpu {

namespace {

constexpr int64_t kUnitBytes = 256;

// Bytes of one token's rows: heads one after the other, or head by head where they lie apart.
struct TokenRows {
  int64_t heads, head_bytes;

  void copy(char* target, int64_t target_stride, const char* source, int64_t source_stride) const {
    if (target_stride == head_bytes && source_stride == head_bytes) {
      std::memcpy(target, source, static_cast<size_t>(heads * head_bytes));
      return;
    }
    for (int64_t h = 0; h < heads; ++h) {
      std::memcpy(target + h * target_stride, source + h * source_stride,
                  static_cast<size_t>(head_bytes));
    }
  }
};

void store_rows(const Tensor& fresh, const KeyValueRows& cache, const TokenRows& rows,
                const int32_t* slots) {
  const int64_t item = static_cast<int64_t>(fresh.element_size());
  const char* source = static_cast<const char*>(fresh.data_ptr());
  for (int64_t t = 0; t < fresh.size(0); ++t) {
    if (slots[2 * t] < 0) continue;
    rows.copy(cache.cached(slots[2 * t], slots[2 * t + 1], 0), cache.head_stride,
              source + t * fresh.stride(0) * item, fresh.stride(1) * item);
  }
}

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& slots) {
  const char* op = "reshape_and_cache";
  check_tensor(op, "key", key, 3);
  check_float_dtype(op, "key", key);
  check_tensor(op, "value", value, 3);
  check_dtype(op, "value", value, key.scalar_type());
  check_size(op, "value", value, 0, key.size(0));
  check_size(op, "value", value, 1, key.size(1));
  const KeyValueRows keys =
      cache_rows(op, "key_cache", key_cache, key.scalar_type(), key.size(1), key.size(2));
  const KeyValueRows values =
      cache_rows(op, "value_cache", value_cache, key.scalar_type(), value.size(1), value.size(2));
  check_size(op, "value_cache", value_cache, 0, key_cache.size(0));
  check_size(op, "value_cache", value_cache, 1, key_cache.size(1));
  check_tensor(op, "slots", slots, 2);
  check_dtype(op, "slots", slots, ScalarType::Int);
  check_size(op, "slots", slots, 0, key.size(0));
  check_size(op, "slots", slots, 1, 2);
  check_contiguous(op, "slots", slots);
  const int32_t* slot = static_cast<const int32_t*>(slots.data_ptr());
  for (int64_t t = 0; t < key.size(0); ++t) {
    CHECK_ARG(slot[2 * t] < key_cache.size(0), op, ": slots[", t, "] names unit ", slot[2 * t],
              ", the cache has ", key_cache.size(0));
    CHECK_ARG(slot[2 * t] < 0 || (slot[2 * t + 1] >= 0 && slot[2 * t + 1] < key_cache.size(1)), op,
              ": slots[", t, "] names row ", slot[2 * t + 1], ", a block has ", key_cache.size(1));
  }
  const int64_t item = static_cast<int64_t>(key.element_size());
  store_rows(key, keys, TokenRows{key.size(1), key.size(2) * item}, slot);
  store_rows(value, values, TokenRows{value.size(1), value.size(2) * item}, slot);
}

void copy_blocks(const Tensor& arena, const Tensor& copies, int64_t block_bytes) {
  const char* op = "copy_blocks";
  check_tensor(op, "arena", arena, 1);
  check_dtype(op, "arena", arena, ScalarType::Byte);
  check_tensor(op, "copies", copies, 2);
  check_dtype(op, "copies", copies, ScalarType::Long);
  check_size(op, "copies", copies, 1, 2);
  check_contiguous(op, "copies", copies);
  CHECK_ARG(block_bytes > 0, op, ": block_bytes is ", block_bytes, ", must be positive");
  const int64_t* pair = static_cast<const int64_t*>(copies.data_ptr());
  const int64_t count = 2 * copies.size(0);
  for (int64_t i = 0; i < count; ++i) {
    CHECK_ARG(pair[i] >= 0 && pair[i] <= (arena.size(0) - block_bytes) / kUnitBytes, op,
              ": copies[", i / 2, "] names unit ", pair[i], ", outside an arena of ", arena.size(0),
              " bytes");
  }
  char* data = static_cast<char*>(arena.data_ptr());
  for (int64_t i = 0; i < count; i += 2) {
    std::memmove(data + pair[i + 1] * kUnitBytes, data + pair[i] * kUnitBytes,
                 static_cast<size_t>(block_bytes));
  }
}

}  // namespace

VLLM_OPS(_C_cache_ops, m) {
  m.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, "
      "Tensor slots) -> ()");
  m.def("copy_blocks(Tensor! arena, Tensor copies, int block_bytes) -> ()");
}

VLLM_OPS_IMPL(_C_cache_ops, CPU, m) {
  m.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache));
  m.impl("copy_blocks", TORCH_BOX(&copy_blocks));
}

}  // namespace vllm::cpu
