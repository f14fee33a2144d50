// Ops: _C::{silu,gelu,gelu_tanh}_and_mul, _C::gelu_{new,fast,quick}, _C::soft_cap on CUDA. A thread
// computes one pack of 16 bytes of the result.
#include "core/registration.h"
#include "cuda/rows.cuh"

namespace vllm::cuda {

namespace {

constexpr int kThreads = 256;

struct Silu {
  __device__ __forceinline__ float operator()(float x) const { return x / (1.0f + expf(-x)); }
};

struct Gelu {
  __device__ __forceinline__ float operator()(float x) const {
    return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  }
};

// 0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3)))
struct GeluTanh {
  __device__ __forceinline__ float operator()(float x) const {
    const float inner = 0.7978845608f * x * fmaf(0.044715f * x, x, 1.0f);
    return 0.5f * x * (1.0f + tanhf(inner));
  }
};

struct GeluQuick {
  __device__ __forceinline__ float operator()(float x) const {
    return x / (1.0f + expf(-1.702f * x));
  }
};

struct SoftCap {
  float scale, cap;
  __device__ __forceinline__ float operator()(float x) const {
    return tanhf(x * scale / cap) * cap;
  }
};

struct ActivationArgs {
  void* out;
  const void* x;
  Rows out_rows, x_rows;
  int64_t n;  // of a row of out
  uint32_t row_packs;
  bool is_packed;
};

// out[i] = act(x[i]), or act(x[i]) * x[n + i] with the activation rounded to T before the product.
template <typename T, typename Act, bool kGated>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(const ActivationArgs args, const Act act) {
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t row = index / args.row_packs;
  if (row >= args.out_rows.count()) return;
  const int64_t begin = static_cast<int64_t>(index % args.row_packs) * Pack<T>::kSize;
  const T* x = static_cast<const T*>(args.x) + args.x_rows.offset(row);
  const Pack<T> gate = load_pack(x, begin, args.n, args.is_packed);
  Pack<T> up{}, result;
  if constexpr (kGated) up = load_pack(x + args.n, begin, args.n, args.is_packed);
#pragma unroll
  for (int e = 0; e < Pack<T>::kSize; ++e) {
    float y = act(to_float(gate.item[e]));
    if constexpr (kGated) y = round_to<T>(y) * to_float(up.item[e]);
    result.item[e] = from_float<T>(y);
  }
  T* out = static_cast<T*>(args.out) + args.out_rows.offset(row);
  store_pack(out, begin, args.n, args.is_packed, result);
}

template <bool kGated, typename Act>
void run_activation(const char* op, const Act& act, const Tensor& out, const Tensor& input) {
  const int64_t item = static_cast<int64_t>(input.element_size());
  ActivationArgs args{.out = out.data_ptr(),
                      .x = input.data_ptr(),
                      .out_rows = rows_of(op, "out", out),
                      .x_rows = rows_of(op, "input", input),
                      .n = out.size(out.dim() - 1),
                      .row_packs = 0,
                      .is_packed = false};
  args.row_packs = static_cast<uint32_t>(ceil_div(args.n * item, kPackBytes));
  args.is_packed = is_packed(args.out, args.out_rows, args.n, item) &&
                   is_packed(args.x, args.x_rows, args.n, item);
  const int64_t packs = static_cast<int64_t>(args.out_rows.count()) * args.row_packs;
  CHECK_ARG(packs < 2 * kMaxRows - kThreads, op, ": out has shape ", shape_text(out),
            ", which is more than 64 GiB");
  const int64_t blocks = ceil_div(packs, kThreads);
  if (blocks == 0) return;
  const LaunchScope scope(input);
  dispatch_float(input.scalar_type(), [&]<typename T>(TypeTag<T>) {
    activation_kernel<T, Act, kGated>
        <<<static_cast<unsigned>(blocks), kThreads, 0, scope.stream()>>>(args, act);
  });
  scope.check(op);
}

template <typename Act>
void run_gated(const char* op, const Tensor& out, const Tensor& input) {
  check_float_dtype(op, "input", input);
  check_tensor(op, "input", input, input.dim());
  check_dtype(op, "out", out, input.scalar_type());
  check_same_device(op, "out", out, input);
  const int64_t last = input.dim() - 1;
  CHECK_ARG(last >= 0 && out.dim() == input.dim() && input.size(last) == 2 * out.size(last), op,
            ": out has shape ", shape_text(out), ", expected that of input ", shape_text(input),
            " with half the last size");
  for (int64_t i = 0; i < last; ++i) check_size(op, "out", out, i, input.size(i));
  run_activation<true>(op, Act{}, out, input);
}

template <typename Act>
void run_elementwise(const char* op, const Tensor& out, const Tensor& input) {
  check_float_dtype(op, "input", input);
  check_tensor(op, "input", input, input.dim());
  check_like(op, "out", out, input);
  run_activation<false>(op, Act{}, out, input);
}

void silu_and_mul(const Tensor& out, const Tensor& input) {
  run_gated<Silu>("silu_and_mul", out, input);
}
void gelu_and_mul(const Tensor& out, const Tensor& input) {
  run_gated<Gelu>("gelu_and_mul", out, input);
}
void gelu_tanh_and_mul(const Tensor& out, const Tensor& input) {
  run_gated<GeluTanh>("gelu_tanh_and_mul", out, input);
}
void gelu_new(const Tensor& out, const Tensor& input) {
  run_elementwise<GeluTanh>("gelu_new", out, input);
}
void gelu_fast(const Tensor& out, const Tensor& input) {
  run_elementwise<GeluTanh>("gelu_fast", out, input);
}
void gelu_quick(const Tensor& out, const Tensor& input) {
  run_elementwise<GeluQuick>("gelu_quick", out, input);
}

void soft_cap(const Tensor& x, double scale, double cap) {
  const char* op = "soft_cap";
  check_tensor(op, "x", x, 2);
  check_float_dtype(op, "x", x);
  CHECK_ARG(cap > 0, op, ": cap is ", cap, ", must be positive");
  run_activation<false>(
      op, SoftCap{.scale = static_cast<float>(scale), .cap = static_cast<float>(cap)}, x, x);
}

}  // namespace

VLLM_OPS_IMPL(_C, CUDA, m) {
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul));
  m.impl("gelu_tanh_and_mul", TORCH_BOX(&gelu_tanh_and_mul));
  m.impl("gelu_new", TORCH_BOX(&gelu_new));
  m.impl("gelu_fast", TORCH_BOX(&gelu_fast));
  m.impl("gelu_quick", TORCH_BOX(&gelu_quick));
  m.impl("soft_cap", TORCH_BOX(&soft_cap));
}

}  // namespace vllm::cuda
