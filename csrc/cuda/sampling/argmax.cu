// Ops: _C::argmax, and _C::keep_possible, which exists on CUDA only. Both also take logits that
// nobody has widened to float32. Blocks find the first token of their slice of a row, one warp a
// row merges; a row with one block is done at once.
#include "core/registration.h"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/rows.cuh"
#include "cuda/sampling/launch.cuh"

namespace vllm::cuda {

namespace {

constexpr int kBlocksOfProcessor = 4;
constexpr int kRowsOfBlock = 128;

struct AnyLogits {
  const void* data;
  int64_t rows, stride;
  int n;
  bool is_packed;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    argmax_kernel(int64_t* out_ids, Order* of_parts, AnyLogits logits) {
  constexpr int kSize = Pack<T>::kSize, kLoads = 4, kStep = kThreads * kSize;
  __shared__ Word of_warps[kWarps];
  await_inputs();
  let_next_start();
  const T* row = static_cast<const T*>(logits.data) + blockIdx.x * logits.stride;
  const int part = blockIdx.y, parts = gridDim.y;
  const int tiles = (logits.n + kStep - 1) / kStep;
  const int first = static_cast<int>(int64_t{tiles} * part / parts) * kStep;
  const int last = min(logits.n, static_cast<int>(int64_t{tiles} * (part + 1) / parts) * kStep);
  Order best = 0;
  for (int start = first + threadIdx.x * kSize; start < last; start += kLoads * kStep) {
    Pack<T> packs[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      packs[i] = load_pack(row, start + i * kStep, last, logits.is_packed);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        const int id = start + i * kStep + e;
        if (id < last) best = max(best, order_of(clean(to_float(packs[i].item[e])), id));
      }
    }
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) best = max(best, __shfl_xor_sync(~0u, best, mask));
  if (lane_id() == 0) of_warps[warp_id()] = best;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const Word other : of_warps) best = max(best, other);
  if (parts == 1) {
    out_ids[blockIdx.x] = id_of(best);
  } else {
    of_parts[blockIdx.x * parts + part] = best;
  }
}

__global__ void __launch_bounds__(32)
    merge_argmax_kernel(int64_t* out_ids, const Order* of_parts, int parts) {
  await_inputs();
  let_next_start();
  Order best = 0;
  for (int part = lane_id(); part < parts; part += 32) {
    best = max(best, of_parts[blockIdx.x * parts + part]);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) best = max(best, __shfl_xor_sync(~0u, best, mask));
  if (lane_id() == 0) out_ids[blockIdx.x] = id_of(best);
}

// What no token can follow has -inf, or NaN.
template <typename T>
__global__ void __launch_bounds__(kRowsOfBlock)
    keep_possible_kernel(int64_t* out_ids, const int64_t* ids, AnyLogits logits) {
  await_inputs();
  let_next_start();
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x;
  if (row >= logits.rows) return;
  const int64_t id = ids[row];
  DEVICE_CHECK(id >= 0 && id < logits.n);
  const T logit = static_cast<const T*>(logits.data)[row * logits.stride + id];
  out_ids[row] = to_float(logit) > kMinusInf ? id : -1;
}

AnyLogits any_logits_of(const char* op, const Tensor& t) {
  check_tensor(op, "logits", t, 2);
  check_float_dtype(op, "logits", t);
  check_vocab(op, t);
  const int64_t item = static_cast<int64_t>(t.element_size());
  return AnyLogits{.data = t.data_ptr(),
                   .rows = t.size(0),
                   .stride = t.stride(0),
                   .n = static_cast<int>(t.size(1)),
                   .is_packed = is_packed(t.data_ptr(), rows_of(op, "logits", t), t.size(1), item)};
}

void argmax(const Tensor& out_ids, const Tensor& logits) {
  const char* op = "argmax";
  const AnyLogits view = any_logits_of(op, logits);
  int64_t* ids = vector_of<int64_t>(op, "out_ids", out_ids, view.rows, logits);
  if (view.rows == 0) return;
  const LaunchScope scope(logits);
  const int blocks = kBlocksOfProcessor * count_multiprocessors(logits.get_device_index());
  const int parts = count_parts(view.rows, view.n, blocks);
  const dim3 grid(static_cast<unsigned>(view.rows), static_cast<unsigned>(parts));
  const Tensor memory =
      torch::stable::new_empty(logits, {parts == 1 ? 0 : view.rows * parts}, ScalarType::Long);
  auto* of_parts = static_cast<Order*>(memory.data_ptr());
  dispatch_float(logits.scalar_type(), [&]<typename T>(TypeTag<T>) {
    launch_overlapping(scope, argmax_kernel<T>, grid, kThreads, ids, of_parts, view);
  });
  scope.check(op);
  if (parts == 1) return;
  launch_overlapping(scope, merge_argmax_kernel, grid.x, 32, ids, of_parts, parts);
  scope.check(op);
}

void keep_possible(const Tensor& out_ids, const Tensor& ids, const Tensor& logits) {
  const char* op = "keep_possible";
  const AnyLogits view = any_logits_of(op, logits);
  int64_t* out = vector_of<int64_t>(op, "out_ids", out_ids, view.rows, logits);
  const int64_t* chosen = vector_of<int64_t>(op, "ids", ids, view.rows, logits);
  if (view.rows == 0) return;
  const LaunchScope scope(logits);
  const auto blocks = static_cast<unsigned>(ceil_div(view.rows, kRowsOfBlock));
  dispatch_float(logits.scalar_type(), [&]<typename T>(TypeTag<T>) {
    launch_overlapping(scope, keep_possible_kernel<T>, blocks, kRowsOfBlock, out, chosen, view);
  });
  scope.check(op);
}

}  // namespace

VLLM_OPS(_C, m) { m.def("keep_possible(Tensor! out_ids, Tensor ids, Tensor logits) -> ()"); }

VLLM_OPS_IMPL(_C, CUDA, m) {
  m.impl("argmax", TORCH_BOX(&argmax));
  m.impl("keep_possible", TORCH_BOX(&keep_possible));
}

}  // namespace vllm::cuda
