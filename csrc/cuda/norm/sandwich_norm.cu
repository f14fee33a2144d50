// Op: _C::norm_add_rms_norm, which exists on CUDA only: norm of what a part of a layer gives,
// addition to the residual stream and norm for the next part, in one pass over memory. A block
// takes a row, as for long rows in norm.cu, and rounds where the separate ops round.
#include "core/registration.h"
#include "cuda/launch.cuh"
#include "cuda/norm/row_norm.cuh"
#include "cuda/rows.cuh"

namespace vllm::cuda {

namespace {

constexpr char kOp[] = "norm_add_rms_norm";

struct SandwichArgs {
  void *x, *residual;
  const void *x_weight, *weight;
  Rows x_rows, residual_rows;
  int64_t n;
  float epsilon;
  bool is_packed;  // rows of x and residual, and the weights
};

// x := norm(x); residual += x; x := norm(residual).
template <typename T, typename W, int kPacks, bool kIsPacked>
__global__ void __launch_bounds__(max_row_threads(kPacks))
    sandwich_norm_kernel(const __grid_constant__ SandwichArgs args) {
  constexpr bool kIsWeightEarly = kPacks == 1;
  __shared__ float of_runs[2][kMaxRuns];
  WeightPack<T, W> x_weights[kPacks], weights[kPacks];
  if constexpr (kIsWeightEarly) {
    load_row_weight(x_weights, args.x_weight, args.n, kIsPacked);
    load_row_weight(weights, args.weight, args.n, kIsPacked);
  }
  await_inputs();
  let_next_start();
  T* x = static_cast<T*>(args.x) + args.x_rows.offset(blockIdx.x);
  T* residual = static_cast<T*>(args.residual) + args.residual_rows.offset(blockIdx.x);
  Pack<T> packs[kPacks], old[kPacks];
  load_row(packs, x, args.n, kIsPacked);
  load_row(old, residual, args.n, kIsPacked);
  float scale = row_scale(packs, args.n, args.epsilon, of_runs[0]);
  if constexpr (!kIsWeightEarly) {
    load_row_weight(x_weights, args.x_weight, args.n, kIsPacked);
  }
  scale_row(packs, x_weights, scale);
  add_row(packs, old);
  store_row(packs, residual, args.n, kIsPacked);
  scale = row_scale(packs, args.n, args.epsilon, of_runs[1]);
  if constexpr (!kIsWeightEarly) load_row_weight(weights, args.weight, args.n, kIsPacked);
  scale_row(packs, weights, scale);
  store_row(packs, x, args.n, kIsPacked);
}

SandwichArgs sandwich_args(const Tensor& x, const Tensor& residual, const Tensor& x_weight,
                           const Tensor& weight, double epsilon) {
  check_float_dtype(kOp, "input", x);
  const Rows x_rows = rows_of(kOp, "input", x);
  check_like(kOp, "residual", residual, x);
  const int64_t n = x.size(x.dim() - 1), item = static_cast<int64_t>(x.element_size());
  check_norm_weight(kOp, "input_weight", x_weight, x, n);
  check_norm_weight(kOp, "weight", weight, x, n);
  check_dtype(kOp, "weight", weight, x_weight.scalar_type());
  check_row_size(kOp, n, item);
  SandwichArgs args{.x = x.data_ptr(),
                    .residual = residual.data_ptr(),
                    .x_weight = x_weight.data_ptr(),
                    .weight = weight.data_ptr(),
                    .x_rows = x_rows,
                    .residual_rows = rows_of(kOp, "residual", residual),
                    .n = n,
                    .epsilon = static_cast<float>(epsilon),
                    .is_packed = false};
  args.is_packed = is_pack_aligned(args.x_weight) && is_pack_aligned(args.weight) &&
                   is_packed(args.x, args.x_rows, n, item) &&
                   is_packed(args.residual, args.residual_rows, n, item);
  return args;
}

void norm_add_rms_norm_op(const Tensor& input, const Tensor& residual, const Tensor& input_weight,
                          const Tensor& weight, double epsilon) {
  const SandwichArgs args = sandwich_args(input, residual, input_weight, weight, epsilon);
  const uint32_t count = args.x_rows.count();
  if (count == 0 || args.n == 0) return;
  const LaunchScope scope(input);
  dispatch_float(input.scalar_type(), [&]<typename T>(TypeTag<T>) {
    dispatch_weight<T>(weight.scalar_type(), [&]<typename W>(TypeTag<W>) {
      dispatch_row_packs(ceil_div(args.n, Pack<T>::kSize), count,
                         [&]<int kPacks>(RowPacks<kPacks>, unsigned threads) {
                           launch_overlapping(scope,
                                              args.is_packed
                                                  ? sandwich_norm_kernel<T, W, kPacks, true>
                                                  : sandwich_norm_kernel<T, W, kPacks, false>,
                                              count, threads, args);
                         });
    });
  });
  scope.check(kOp);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def(
      "norm_add_rms_norm(Tensor! input, Tensor! residual, Tensor input_weight, Tensor weight, "
      "float epsilon) -> ()");
}

VLLM_OPS_IMPL(_C, CUDA, m) { m.impl("norm_add_rms_norm", TORCH_BOX(&norm_add_rms_norm_op)); }

}  // namespace vllm::cuda
