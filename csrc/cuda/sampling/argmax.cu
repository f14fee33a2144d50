// Op: _C::argmax on CUDA. Blocks find the first token of their slice of a row, one warp a row
// merges; a row with one block is done at once.
#include "core/registration.h"
#include "cuda/launch.cuh"
#include "cuda/sampling/launch.cuh"

namespace vllm::cuda {

namespace {

constexpr int kBlocksOfProcessor = 4;

__global__ void __launch_bounds__(kThreads)
    argmax_kernel(int64_t* out_ids, Order* of_parts, Logits logits) {
  __shared__ Word of_warps[kWarps];
  let_next_start();
  await_inputs();
  const Team team(logits.data + blockIdx.x * logits.stride, logits.n, nullptr);
  Order best = 0;
  for_tokens(team, [&](float x, int id) { best = max(best, order_of(x, id)); });
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) best = max(best, __shfl_xor_sync(~0u, best, mask));
  if (lane_id() == 0) of_warps[warp_id()] = best;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const Word other : of_warps) best = max(best, other);
  if (team.parts == 1) {
    out_ids[blockIdx.x] = id_of(best);
  } else {
    of_parts[blockIdx.x * team.parts + team.part] = best;
  }
}

__global__ void __launch_bounds__(32)
    merge_argmax_kernel(int64_t* out_ids, const Order* of_parts, int parts) {
  let_next_start();
  await_inputs();
  Order best = 0;
  for (int part = lane_id(); part < parts; part += 32) {
    best = max(best, of_parts[blockIdx.x * parts + part]);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) best = max(best, __shfl_xor_sync(~0u, best, mask));
  if (lane_id() == 0) out_ids[blockIdx.x] = id_of(best);
}

void argmax(const Tensor& out_ids, const Tensor& logits) {
  const char* op = "argmax";
  const Logits view = logits_of(op, logits);
  int64_t* ids = vector_of<int64_t>(op, "out_ids", out_ids, view.rows, logits);
  if (view.rows == 0) return;
  const LaunchScope scope(logits);
  const int blocks = kBlocksOfProcessor * count_multiprocessors(logits.get_device_index());
  const int parts = count_parts(view.rows, view.n, blocks);
  const dim3 grid(static_cast<unsigned>(view.rows), static_cast<unsigned>(parts));
  if (parts == 1) {
    launch_overlapping(scope, argmax_kernel, grid, kThreads, ids, nullptr, view);
    scope.check(op);
    return;
  }
  const Tensor memory = torch::stable::new_empty(logits, {view.rows * parts}, ScalarType::Long);
  auto* of_parts = static_cast<Order*>(memory.data_ptr());
  launch_overlapping(scope, argmax_kernel, grid, kThreads, ids, of_parts, view);
  launch_overlapping(scope, merge_argmax_kernel, grid.x, 32, ids, of_parts, parts);
  scope.check(op);
}

}  // namespace

VLLM_OPS_IMPL(_C, CUDA, m) { m.impl("argmax", TORCH_BOX(&argmax)); }

}  // namespace vllm::cuda
