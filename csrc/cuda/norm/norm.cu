// Ops: _C::rms_norm, _C::fused_add_rms_norm and, on CUDA only, _C::add_parts_rms_norm.
//
// A row is read once and kept in registers. Short rows (heads) take a group of lanes each, several
// groups a warp; long rows (hidden states) take a block each. Which of the two, and the order of
// the sum, depend on the row's length alone, so that a row's bits do not depend on the batch.
#include "core/registration.h"
#include "cuda/launch.cuh"
#include "cuda/norm/parts_norm.cuh"
#include "cuda/norm/row_norm.cuh"
#include "cuda/rows.cuh"

namespace vllm::cuda {

namespace {

struct NormArgs {
  void* out;
  const void* x;
  void* residual;  // null: no addition
  const void* weight;
  Rows out_rows, x_rows, residual_rows;
  int64_t n;
  float epsilon;
  bool is_packed;  // rows of out, x and residual, and the weight
};

template <typename T, typename W, int kPacks, bool kIsPacked>
__global__ void __launch_bounds__(kGroupThreads)
    norm_short_rows_kernel(const __grid_constant__ NormArgs args, const int lanes) {
  const LaneGroup group(lanes);
  WeightPack<T, W> weights[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    weights[p].load(static_cast<const W*>(args.weight), group.begin_of<T>(p), args.n, kIsPacked);
  }
  await_inputs();
  let_next_start();
  const bool is_live = group.index < args.x_rows.count();
  Pack<T> packs[kPacks] = {};
  if (is_live) {
    const T* x = static_cast<const T*>(args.x) + args.x_rows.offset(group.index);
    load_lanes(packs, x, args.n, kIsPacked, group);
  }
  if (is_live && args.residual != nullptr) {
    T* residual = static_cast<T*>(args.residual) + args.residual_rows.offset(group.index);
    Pack<T> old[kPacks];
    load_lanes(old, residual, args.n, kIsPacked, group);
    add_row(packs, old);
    store_lanes(packs, residual, args.n, kIsPacked, group);
  }
  norm_lanes(packs, weights, lanes, is_live, args.n, args.epsilon);
  if (!is_live) return;
  T* out = static_cast<T*>(args.out) + args.out_rows.offset(group.index);
  store_lanes(packs, out, args.n, kIsPacked, group);
}

// Weights are loaded before the row where rows are few; where they are many, other blocks hide it.
template <typename T, typename W, int kPacks, bool kIsPacked>
__global__ void __launch_bounds__(max_row_threads(kPacks))
    norm_long_row_kernel(const __grid_constant__ NormArgs args) {
  constexpr bool kIsWeightEarly = kPacks == 1;
  __shared__ float of_runs[kMaxRuns];
  const uint32_t row = blockIdx.x;
  Pack<T> packs[kPacks];
  WeightPack<T, W> weights[kPacks];
  if constexpr (kIsWeightEarly) load_row_weight(weights, args.weight, args.n, kIsPacked);
  await_inputs();
  let_next_start();
  const T* x = static_cast<const T*>(args.x) + args.x_rows.offset(row);
  load_row(packs, x, args.n, kIsPacked);
  if (args.residual != nullptr) {
    T* residual = static_cast<T*>(args.residual) + args.residual_rows.offset(row);
    Pack<T> old[kPacks];
    load_row(old, residual, args.n, kIsPacked);
    add_row(packs, old);
    store_row(packs, residual, args.n, kIsPacked);
  }
  const float scale = row_scale(packs, args.n, args.epsilon, of_runs);
  if constexpr (!kIsWeightEarly) load_row_weight(weights, args.weight, args.n, kIsPacked);
  scale_row(packs, weights, scale);
  store_row(packs, static_cast<T*>(args.out) + args.out_rows.offset(row), args.n, kIsPacked);
}

template <typename T, typename W>
void launch_norm(const char* op, const NormArgs& args, const LaunchScope& scope) {
  const uint32_t count = args.x_rows.count();
  if (args.n <= max_lane_row<T>(kMaxLanePacks)) {
    return dispatch_lane_packs<T>(op, args.n, [&]<int kPacks>(LanePacks<T, kPacks>) {
      const int lanes = lanes_of<T>(args.n);
      launch_overlapping(scope,
                         args.is_packed ? norm_short_rows_kernel<T, W, kPacks, true>
                                        : norm_short_rows_kernel<T, W, kPacks, false>,
                         group_blocks(op, count, lanes), kGroupThreads, args, lanes);
    });
  }
  dispatch_row_packs(
      ceil_div(args.n, Pack<T>::kSize), count, [&]<int kPacks>(RowPacks<kPacks>, unsigned threads) {
        launch_overlapping(scope,
                           args.is_packed ? norm_long_row_kernel<T, W, kPacks, true>
                                          : norm_long_row_kernel<T, W, kPacks, false>,
                           count, threads, args);
      });
}

void run_norm(const char* op, const Tensor& out, const Tensor& x, const Tensor* residual,
              const Tensor& weight, double epsilon) {
  check_float_dtype(op, "input", x);
  const Rows x_rows = rows_of(op, "input", x);
  check_like(op, "out", out, x);
  const int64_t n = x.size(x.dim() - 1), item = static_cast<int64_t>(x.element_size());
  check_norm_weight(op, "weight", weight, x, n);
  check_row_size(op, n, item);
  NormArgs args{.out = out.data_ptr(),
                .x = x.data_ptr(),
                .residual = nullptr,
                .weight = weight.data_ptr(),
                .out_rows = rows_of(op, "out", out),
                .x_rows = x_rows,
                .residual_rows = {},
                .n = n,
                .epsilon = static_cast<float>(epsilon),
                .is_packed = is_pack_aligned(weight.data_ptr())};
  args.is_packed = args.is_packed && is_packed(args.x, x_rows, n, item) &&
                   is_packed(args.out, args.out_rows, n, item);
  if (residual != nullptr) {
    check_like(op, "residual", *residual, x);
    args.residual = residual->data_ptr();
    args.residual_rows = rows_of(op, "residual", *residual);
    args.is_packed = args.is_packed && is_packed(args.residual, args.residual_rows, n, item);
  }
  if (x_rows.count() == 0 || n == 0) return;
  const LaunchScope scope(x);
  dispatch_float(x.scalar_type(), [&]<typename T>(TypeTag<T>) {
    dispatch_weight<T>(weight.scalar_type(),
                       [&]<typename W>(TypeTag<W>) { launch_norm<T, W>(op, args, scope); });
  });
  scope.check(op);
}

void rms_norm_op(const Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  run_norm("rms_norm", out, input, nullptr, weight, epsilon);
}

void fused_add_rms_norm_op(const Tensor& input, const Tensor& residual, const Tensor& weight,
                           double epsilon) {
  run_norm("fused_add_rms_norm", input, input, &residual, weight, epsilon);
}

// The rows of `residual`, [T, N], are those that the parts make.
void add_parts_rms_norm_op(const Tensor& out, const Tensor& parts, const Tensor& residual,
                           const Tensor& weight, double epsilon) {
  constexpr char kOp[] = "add_parts_rms_norm";
  check_tensor(kOp, "residual", residual, 2);
  check_float_dtype(kOp, "residual", residual);
  check_tensor(kOp, "out", out, 2);
  check_like(kOp, "out", out, residual);
  const Parts summands = parts_of(kOp, parts, residual);
  check_norm_weight(kOp, "weight", weight, residual, residual.size(1));
  if (residual.size(0) == 0 || residual.size(1) == 0) return;
  const LaunchScope scope(residual);
  if (launch_parts_norm(scope, out, summands, residual, weight, epsilon)) return scope.check(kOp);
  write_sum(scope, out, summands, nullptr);
  scope.check(kOp);
  run_norm(kOp, out, out, &residual, weight, epsilon);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def(
      "add_parts_rms_norm(Tensor! out, Tensor parts, Tensor! residual, Tensor weight, "
      "float epsilon) -> ()");
}

VLLM_OPS_IMPL(_C, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm_op));
  m.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm_op));
  m.impl("add_parts_rms_norm", TORCH_BOX(&add_parts_rms_norm_op));
}

}  // namespace vllm::cuda
