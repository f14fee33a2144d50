// Ops: _C_cache_ops::reshape_and_cache, _C_cache_ops::copy_blocks on CUDA. Plain memory moves:
// types matter only by their size.
#include "core/registration.h"
#include "cuda/cache/cache_rows.cuh"
#include "cuda/lanes.cuh"
#include "cuda/launch.cuh"

namespace vllm::cuda {

namespace {

constexpr int64_t kUnitBytes = 256;

// New rows [T, heads, size] and where they go; strides and sizes in the kernel's element type.
struct StoreRows {
  const void* fresh;
  int64_t token_stride, head_stride, size;
  CacheRows cache;
};

struct StoreArgs {
  StoreRows key, value;
  const int2* slots;
  uint32_t tokens, heads;
};

template <typename U>
__global__ void __launch_bounds__(kGroupThreads)
    reshape_and_cache_kernel(const __grid_constant__ StoreArgs args, const int lanes) {
  await_inputs();
  let_next_start();
  const LaneGroup group(lanes);
  const uint32_t token = group.index / (2 * args.heads), number = group.index % (2 * args.heads);
  if (token >= args.tokens) return;
  const int2 slot = args.slots[token];
  if (slot.x < 0) return;
  const bool is_value = number >= args.heads;
  const StoreRows& rows = is_value ? args.value : args.key;
  const uint32_t head = is_value ? number - args.heads : number;
  const U* source =
      static_cast<const U*>(rows.fresh) + token * rows.token_stride + head * rows.head_stride;
  U* target = rows.cache.row<U>(slot, head);
  for (int64_t i = group.lane; i < rows.size; i += lanes) target[i] = source[i];
}

StoreRows store_rows(const char* op, const char* name, const Tensor& fresh, const Tensor& cache,
                     const Tensor& key) {
  return StoreRows{.fresh = fresh.data_ptr(),
                   .token_stride = fresh.stride(0),
                   .head_stride = fresh.stride(1),
                   .size = fresh.size(2),
                   .cache = cache_rows(op, name, cache, key, fresh.size(1), fresh.size(2))};
}

bool is_packed(const StoreRows& rows, int64_t item) {
  return is_pack_aligned(rows.fresh) && rows.token_stride * item % kPackBytes == 0 &&
         rows.head_stride * item % kPackBytes == 0 && is_packed(rows.cache, rows.size, item);
}

// Counts in packs of `kPackBytes` instead of elements.
void count_packs(StoreRows& rows, int64_t item) {
  const int64_t pack = kPackBytes / item;
  for (int64_t* count : {&rows.token_stride, &rows.head_stride, &rows.size, &rows.cache.unit_stride,
                         &rows.cache.token_stride, &rows.cache.head_stride}) {
    *count /= pack;
  }
}

template <typename U>
void launch_store(const char* op, const StoreArgs& args, const LaunchScope& scope) {
  const int64_t size = args.key.size > args.value.size ? args.key.size : args.value.size;
  int lanes = 1;
  while (lanes < 32 && lanes < size) lanes *= 2;
  const unsigned blocks = group_blocks(op, int64_t{2} * args.tokens * args.heads, lanes);
  launch_overlapping(scope, reshape_and_cache_kernel<U>, blocks, kGroupThreads, args, lanes);
}

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& slots) {
  const char* op = "reshape_and_cache";
  check_tensor(op, "key", key, 3);
  check_float_dtype(op, "key", key);
  check_tensor(op, "value", value, 3);
  check_dtype(op, "value", value, key.scalar_type());
  check_same_device(op, "value", value, key);
  check_size(op, "value", value, 0, key.size(0));
  check_size(op, "value", value, 1, key.size(1));
  StoreArgs args{.key = store_rows(op, "key_cache", key, key_cache, key),
                 .value = store_rows(op, "value_cache", value, value_cache, key),
                 .slots = slots_of(op, slots, key, key.size(0)),
                 .tokens = static_cast<uint32_t>(key.size(0)),
                 .heads = static_cast<uint32_t>(key.size(1))};
  check_size(op, "value_cache", value_cache, 0, key_cache.size(0));
  check_size(op, "value_cache", value_cache, 1, key_cache.size(1));
  if (args.tokens == 0 || args.heads == 0) return;
  const int64_t item = static_cast<int64_t>(key.element_size());
  const LaunchScope scope(key);
  if (is_packed(args.key, item) && is_packed(args.value, item)) {
    count_packs(args.key, item);
    count_packs(args.value, item);
    launch_store<uint4>(op, args, scope);
  } else if (item == 4) {
    launch_store<uint32_t>(op, args, scope);
  } else {
    launch_store<uint16_t>(op, args, scope);
  }
  scope.check(op);
}

constexpr int kCopyThreads = 256;
constexpr int kMaxCopies = 128;  // of one launch: they travel as its parameter

struct CopyList {
  int64_t source[kMaxCopies], target[kMaxCopies];  // in bytes
  int count;
};

// A thread moves the same bytes of every block, one block after the other, so that a block which is
// first a target and then a source is read after it was written. Blocks are equal or disjoint.
template <typename U>
__global__ void __launch_bounds__(kCopyThreads)
    copy_blocks_kernel(char* arena, const __grid_constant__ CopyList copies, int64_t block_bytes) {
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * kCopyThreads + threadIdx.x) * sizeof(U);
  if (begin >= block_bytes) return;
  for (int i = 0; i < copies.count; ++i) {
    *reinterpret_cast<U*>(arena + copies.target[i] + begin) =
        *reinterpret_cast<const U*>(arena + copies.source[i] + begin);
  }
}

CopyList list_copies(const int64_t* pairs, int64_t count) {
  CopyList list{};
  list.count = static_cast<int>(count < kMaxCopies ? count : kMaxCopies);
  for (int i = 0; i < list.count; ++i) {
    list.source[i] = pairs[2 * i] * kUnitBytes;
    list.target[i] = pairs[2 * i + 1] * kUnitBytes;
  }
  return list;
}

void copy_blocks(const Tensor& arena, const Tensor& copies, int64_t block_bytes) {
  const char* op = "copy_blocks";
  check_tensor(op, "arena", arena, 1);
  check_dtype(op, "arena", arena, ScalarType::Byte);
  vllm::check_tensor(op, "copies", copies, 2);  // on the CPU: who plans them knows them there
  check_dtype(op, "copies", copies, ScalarType::Long);
  check_size(op, "copies", copies, 1, 2);
  check_contiguous(op, "copies", copies);
  CHECK_ARG(block_bytes > 0, op, ": block_bytes is ", block_bytes, ", must be positive");
  const int64_t* pairs = static_cast<const int64_t*>(copies.data_ptr());
  const int64_t count = copies.size(0);
  for (int64_t i = 0; i < 2 * count; ++i) {
    CHECK_ARG(pairs[i] >= 0 && pairs[i] <= (arena.size(0) - block_bytes) / kUnitBytes, op,
              ": copies[", i / 2, "] names unit ", pairs[i], ", outside an arena of ",
              arena.size(0), " bytes");
  }
  char* data = static_cast<char*>(arena.data_ptr());
  const bool is_whole = block_bytes % kPackBytes == 0 && is_pack_aligned(data);
  const int64_t threads = is_whole ? block_bytes / kPackBytes : block_bytes;
  const unsigned blocks = static_cast<unsigned>(ceil_div(threads, kCopyThreads));
  const LaunchScope scope(arena);
  for (int64_t i = 0; i < count; i += kMaxCopies) {
    const CopyList list = list_copies(pairs + 2 * i, count - i);
    if (is_whole) {
      copy_blocks_kernel<uint4>
          <<<blocks, kCopyThreads, 0, scope.stream()>>>(data, list, block_bytes);
    } else {
      copy_blocks_kernel<char>
          <<<blocks, kCopyThreads, 0, scope.stream()>>>(data, list, block_bytes);
    }
    scope.check(op);
  }
}

}  // namespace

VLLM_OPS_IMPL(_C_cache_ops, CUDA, m) {
  m.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache));
  m.impl("copy_blocks", TORCH_BOX(&copy_blocks));
}

}  // namespace vllm::cuda
