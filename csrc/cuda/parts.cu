// The sum of parts by itself, for shapes that the ops behind a product do not add up on their way.
#include "cuda/parts.cuh"

#include "cuda/launch.cuh"

namespace vllm::cuda {

namespace {

constexpr int kThreads = 256;

struct SumArgs {
  Parts parts;
  const void* bias;  // null: none
  void* out;
  int64_t out_stride;
  uint32_t n;
};

// A thread has one element; blocks y have the rows.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ SumArgs args) {
  const uint32_t column = blockIdx.x * kThreads + threadIdx.x;
  const bool is_live = column < args.n;
  float bias = 0.0f;
  if (is_live && args.bias != nullptr) bias = to_float(static_cast<const T*>(args.bias)[column]);
  await_inputs();
  let_next_start();
  if (!is_live) return;
  const float* part = args.parts.data + int64_t{blockIdx.y} * args.n + column;
  float sum = *part;
  for (int64_t p = 1; p < args.parts.count; ++p) sum += part[p * args.parts.stride];
  if (args.bias != nullptr) sum += bias;
  static_cast<T*>(args.out)[blockIdx.y * args.out_stride + column] = from_float<T>(sum);
}

}  // namespace

void write_sum(const LaunchScope& scope, const Tensor& out, const Parts& parts, const void* bias) {
  constexpr int64_t kMaxGridRows = 65535;
  const int64_t rows = out.size(0), n = out.size(1);
  CHECK_ARG(rows <= kMaxGridRows && n < kMaxRows, "parts: a product has shape ", shape_text(out),
            ", allowed: up to ", kMaxGridRows, " rows");
  const SumArgs args{.parts = parts,
                     .bias = bias,
                     .out = out.data_ptr(),
                     .out_stride = out.stride(0),
                     .n = static_cast<uint32_t>(n)};
  const dim3 grid(static_cast<unsigned>(ceil_div(n, kThreads)), static_cast<unsigned>(rows));
  dispatch_float(out.scalar_type(), [&]<typename T>(TypeTag<T>) {
    launch_overlapping(scope, sum_kernel<T>, grid, kThreads, args);
  });
}

}  // namespace vllm::cuda
