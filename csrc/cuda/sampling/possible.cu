// Op: _C::keep_possible, which exists on CUDA only: one thread a row.
#include "core/registration.h"
#include "cuda/launch.cuh"
#include "cuda/sampling/launch.cuh"

namespace vllm::cuda {

namespace {

constexpr int kRowsOfBlock = 128;

// What no token can follow has -inf, or NaN.
__global__ void __launch_bounds__(kRowsOfBlock)
    keep_possible_kernel(int64_t* out_ids, const int64_t* ids, Logits logits) {
  let_next_start();
  await_inputs();
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x;
  if (row >= logits.rows) return;
  const int64_t id = ids[row];
  DEVICE_CHECK(id >= 0 && id < logits.n);
  out_ids[row] = logits.data[row * logits.stride + id] > kMinusInf ? id : -1;
}

void keep_possible(const Tensor& out_ids, const Tensor& ids, const Tensor& logits) {
  const char* op = "keep_possible";
  const Logits view = logits_of(op, logits);
  int64_t* out = vector_of<int64_t>(op, "out_ids", out_ids, view.rows, logits);
  const int64_t* chosen = vector_of<int64_t>(op, "ids", ids, view.rows, logits);
  if (view.rows == 0) return;
  const LaunchScope scope(logits);
  const auto blocks = static_cast<unsigned>(ceil_div(view.rows, kRowsOfBlock));
  launch_overlapping(scope, keep_possible_kernel, blocks, kRowsOfBlock, out, chosen, view);
  scope.check(op);
}

}  // namespace

VLLM_OPS(_C, m) { m.def("keep_possible(Tensor! out_ids, Tensor ids, Tensor logits) -> ()"); }

VLLM_OPS_IMPL(_C, CUDA, m) { m.impl("keep_possible", TORCH_BOX(&keep_possible)); }

}  // namespace vllm::cuda
