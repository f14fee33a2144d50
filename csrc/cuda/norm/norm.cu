// Ops: _C::rms_norm, _C::fused_add_rms_norm on CUDA.
//
// A row is read once and kept in registers. Short rows (heads) take a group of lanes each, several
// groups a warp; long rows (hidden states) take a block each. Which of the two, and the order of
// the sum, depend on the row's length alone, so that a row's bits do not depend on the batch.
#include "core/registration.h"
#include "cuda/norm/head_norm.cuh"
#include "cuda/rows.cuh"

namespace vllm::cuda {

namespace {

constexpr int kMaxThreads = 1024;

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

// First element of pack p of thread `first` of `step`.
template <typename T>
__device__ __forceinline__ int64_t begin_of(int p, int first, int step) {
  return static_cast<int64_t>(p * step + first) * Pack<T>::kSize;
}

// residual[...] += x[...], rounded to T; returns the sum.
template <typename T>
__device__ __forceinline__ Pack<T> add_pack(T* residual, int64_t begin, const Pack<T>& x,
                                            const NormArgs& args) {
  Pack<T> sum = load_pack(residual, begin, args.n, args.is_packed);
#pragma unroll
  for (int e = 0; e < Pack<T>::kSize; ++e) {
    sum.item[e] = from_float<T>(to_float(x.item[e]) + to_float(sum.item[e]));
  }
  store_pack(residual, begin, args.n, args.is_packed, sum);
  return sum;
}

// Loads the row, and adds it to the residual row where there is one.
template <typename T, int kPacks>
__device__ __forceinline__ void load_row(Pack<T> (&packs)[kPacks], uint32_t row, int first,
                                         int step, const NormArgs& args) {
  const T* x = static_cast<const T*>(args.x) + args.x_rows.offset(row);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    packs[p] = load_pack(x, begin_of<T>(p, first, step), args.n, args.is_packed);
  }
  if (args.residual == nullptr) return;
  T* residual = static_cast<T*>(args.residual) + args.residual_rows.offset(row);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    packs[p] = add_pack(residual, begin_of<T>(p, first, step), packs[p], args);
  }
}

template <typename T, typename W>
__device__ __forceinline__ void load_weight(WeightPack<T, W>& weight, int64_t begin,
                                            const NormArgs& args) {
  weight.load(static_cast<const W*>(args.weight), begin, args.n, args.is_packed);
}

template <typename T, int kPacks>
__device__ __forceinline__ void store_row(const Pack<T> (&packs)[kPacks], uint32_t row, int first,
                                          int step, const NormArgs& args) {
  T* out = static_cast<T*>(args.out) + args.out_rows.offset(row);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    store_pack(out, begin_of<T>(p, first, step), args.n, args.is_packed, packs[p]);
  }
}

template <typename T, typename W, int kPacks>
__global__ void __launch_bounds__(kGroupThreads)
    norm_short_rows_kernel(const NormArgs args, const int lanes) {
  const LaneGroup group(lanes);
  const bool is_live = group.index < args.x_rows.count();
  Pack<T> packs[kPacks] = {};
  WeightPack<T, W> weights[kPacks] = {};
  if (is_live) {
    load_row(packs, group.index, group.lane, lanes, args);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) load_weight(weights[p], group.begin_of<T>(p), args);
  }
  norm_lanes(packs, weights, lanes, is_live, args.n, args.epsilon);
  if (is_live) store_row(packs, group.index, group.lane, lanes, args);
}

__device__ __forceinline__ float sum_block(float x) {
  __shared__ float of_warp[kMaxThreads / 32];
  const int lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  x = sum_lanes(x, 32);
  if (num_warps == 1) return x;
  if (lane == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  return sum_lanes(lane < num_warps ? of_warp[lane] : 0.0f, 32);
}

// Weights are loaded while the row is on its way, unless registers are too few for both.
template <typename T, typename W, int kPacks>
__global__ void __launch_bounds__(kMaxThreads) norm_long_row_kernel(const NormArgs args) {
  constexpr bool kIsWeightEarly = kPacks <= 2;
  const uint32_t row = blockIdx.x;
  const int first = threadIdx.x, step = blockDim.x;
  Pack<T> packs[kPacks];
  WeightPack<T, W> weights[kIsWeightEarly ? kPacks : 1];
  load_row(packs, row, first, step, args);
  if constexpr (kIsWeightEarly) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) load_weight(weights[p], begin_of<T>(p, first, step), args);
  }
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) sum = sum_of_squares(packs[p], sum);
  const float scale = inverse_rms(sum_block(sum), args.n, args.epsilon);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    WeightPack<T, W>& weight = weights[kIsWeightEarly ? p : 0];
    if constexpr (!kIsWeightEarly) load_weight(weight, begin_of<T>(p, first, step), args);
    scale_pack(packs[p], weight, scale);
  }
  store_row(packs, row, first, step, args);
}

template <typename T, typename W, int kPacks>
void launch_short(const char* op, const NormArgs& args, cudaStream_t stream) {
  const int lanes = lanes_of<T>(args.n);
  norm_short_rows_kernel<T, W, kPacks>
      <<<group_blocks(op, args.x_rows.count(), lanes), kGroupThreads, 0, stream>>>(args, lanes);
}

template <typename T, typename W, int kPacks>
void launch_long(const NormArgs& args, cudaStream_t stream) {
  const int64_t packs = ceil_div(args.n, Pack<T>::kSize);
  const int64_t threads = ceil_div(ceil_div(packs, kPacks), 32) * 32;
  norm_long_row_kernel<T, W, kPacks>
      <<<args.x_rows.count(), static_cast<unsigned>(threads), 0, stream>>>(args);
}

template <typename T, typename W>
void launch_norm(const char* op, const NormArgs& args, cudaStream_t stream) {
  constexpr int64_t kPackSize = Pack<T>::kSize;
  if (args.n <= max_lane_row<T>(kMaxLanePacks)) {
    return dispatch_lane_packs<T>(op, args.n, [&]<int kPacks>(LanePacks<T, kPacks>) {
      launch_short<T, W, kPacks>(op, args, stream);
    });
  }
  if (args.n <= 512 * kPackSize) return launch_long<T, W, 1>(args, stream);
  if (args.n <= 2 * kMaxThreads * kPackSize) return launch_long<T, W, 2>(args, stream);
  launch_long<T, W, 4>(args, stream);
}

void run_norm(const char* op, const Tensor& out, const Tensor& x, const Tensor* residual,
              const Tensor& weight, double epsilon) {
  check_float_dtype(op, "input", x);
  const Rows x_rows = rows_of(op, "input", x);
  check_like(op, "out", out, x);
  const int64_t n = x.size(x.dim() - 1), item = static_cast<int64_t>(x.element_size());
  check_norm_weight(op, "weight", weight, x, n);
  const int64_t max_n = 4 * kMaxThreads * kPackBytes / item;
  CHECK_ARG(n <= max_n, op, ": rows have ", n, " elements, allowed: up to ", max_n);
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
    dispatch_weight<T>(weight.scalar_type(), [&]<typename W>(TypeTag<W>) {
      launch_norm<T, W>(op, args, scope.stream());
    });
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

}  // namespace

VLLM_OPS_IMPL(_C, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm_op));
  m.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm_op));
}

}  // namespace vllm::cuda
