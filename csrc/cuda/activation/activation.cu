// Ops: _C::{silu,gelu,gelu_tanh}_and_mul, _C::gelu_{new,fast,quick}, _C::soft_cap on CUDA, and
// _C::mul_sigmoid, which exists on CUDA only. A thread computes one pack of 16 bytes of the result.
#include "core/registration.h"
#include "cuda/rows.cuh"

namespace vllm::cuda {

namespace {

constexpr int kThreads = 256;

// exp(x) and x / y for results of type T. The exact forms cost more than the memory of a 16-bit
// tensor allows; the hardware's are off by a few units in the last place of a float, of which a
// 16-bit result keeps none.
template <typename T>
__device__ __forceinline__ float exp_for(float x) {
  return sizeof(T) == 2 ? __expf(x) : expf(x);
}

template <typename T>
__device__ __forceinline__ float divide_for(float x, float y) {
  return sizeof(T) == 2 ? __fdividef(x, y) : x / y;
}

struct Silu {
  template <typename T>
  __device__ __forceinline__ float run(float x) const {
    return divide_for<T>(x, 1.0f + exp_for<T>(-x));
  }
};

struct Gelu {
  template <typename T>
  __device__ __forceinline__ float run(float x) const {
    return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  }
};

// 0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3)))
struct GeluTanh {
  template <typename T>
  __device__ __forceinline__ float run(float x) const {
    const float inner = 0.7978845608f * x * fmaf(0.044715f * x, x, 1.0f);
    if constexpr (sizeof(T) == 2) {  // 1 + tanh(u) = 2 - 2 / (1 + exp(2 u))
      return x - __fdividef(x, 1.0f + __expf(2.0f * inner));
    } else {
      return 0.5f * x * (1.0f + tanhf(inner));
    }
  }
};

struct GeluQuick {
  template <typename T>
  __device__ __forceinline__ float run(float x) const {
    return divide_for<T>(x, 1.0f + exp_for<T>(-1.702f * x));
  }
};

struct Sigmoid {
  template <typename T>
  __device__ __forceinline__ float run(float x) const {
    return divide_for<T>(1.0f, 1.0f + exp_for<T>(-x));
  }
};

struct SoftCap {
  float scale, cap;
  template <typename T>
  __device__ __forceinline__ float run(float x) const {
    return tanhf(x * scale / cap) * cap;
  }
};

struct ActivationArgs {
  void* out;
  const void* x;
  const void* factor;  // what act(x) is multiplied by; null: nothing
  Rows out_rows, x_rows, factor_rows;
  int64_t n;  // of a row of out
  uint32_t row_packs;
  bool is_packed;
};

// out[i] = act(x[i]), or act(x[i]) * factor[i] with the activation rounded to T before the product.
template <typename T, typename Act, bool kGated>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(const ActivationArgs args, const Act act) {
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t row = index / args.row_packs;
  if (row >= args.out_rows.count()) return;
  const int64_t begin = static_cast<int64_t>(index % args.row_packs) * Pack<T>::kSize;
  const T* x = static_cast<const T*>(args.x) + args.x_rows.offset(row);
  const Pack<T> gate = load_pack(x, begin, args.n, args.is_packed);
  Pack<T> factor{}, result;
  if constexpr (kGated) {
    const T* row_of_factor = static_cast<const T*>(args.factor) + args.factor_rows.offset(row);
    factor = load_pack(row_of_factor, begin, args.n, args.is_packed);
  }
#pragma unroll
  for (int e = 0; e < Pack<T>::kSize; ++e) {
    float y = act.template run<T>(to_float(gate.item[e]));
    if constexpr (kGated) y = round_to<T>(y) * to_float(factor.item[e]);
    result.item[e] = from_float<T>(y);
  }
  T* out = static_cast<T*>(args.out) + args.out_rows.offset(row);
  store_pack(out, begin, args.n, args.is_packed, result);
}

ActivationArgs activation_args(const char* op, const Tensor& out, const Tensor& input) {
  return ActivationArgs{.out = out.data_ptr(),
                        .x = input.data_ptr(),
                        .factor = nullptr,
                        .out_rows = rows_of(op, "out", out),
                        .x_rows = rows_of(op, "input", input),
                        .factor_rows = {},
                        .n = out.size(out.dim() - 1),
                        .row_packs = 0,
                        .is_packed = false};
}

template <bool kGated, typename Act>
void run_activation(const char* op, const Act& act, const Tensor& input, ActivationArgs args) {
  const int64_t item = static_cast<int64_t>(input.element_size());
  args.row_packs = static_cast<uint32_t>(ceil_div(args.n * item, kPackBytes));
  args.is_packed = is_packed(args.out, args.out_rows, args.n, item) &&
                   is_packed(args.x, args.x_rows, args.n, item) &&
                   (!kGated || is_packed(args.factor, args.factor_rows, args.n, item));
  const int64_t packs = static_cast<int64_t>(args.out_rows.count()) * args.row_packs;
  CHECK_ARG(packs < 2 * kMaxRows - kThreads, op, ": input has shape ", shape_text(input),
            ", of which the result would be more than 64 GiB");
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
  ActivationArgs args = activation_args(op, out, input);
  args.factor =
      static_cast<const char*>(args.x) + args.n * static_cast<int64_t>(input.element_size());
  args.factor_rows = args.x_rows;
  run_activation<true>(op, Act{}, input, args);
}

template <typename Act>
void run_elementwise(const char* op, const Tensor& out, const Tensor& input) {
  check_float_dtype(op, "input", input);
  check_tensor(op, "input", input, input.dim());
  check_like(op, "out", out, input);
  run_activation<false>(op, Act{}, input, activation_args(op, out, input));
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
  const SoftCap act{.scale = static_cast<float>(scale), .cap = static_cast<float>(cap)};
  run_activation<false>(op, act, x, activation_args(op, x, x));
}

void mul_sigmoid(const Tensor& x, const Tensor& gate) {
  const char* op = "mul_sigmoid";
  check_float_dtype(op, "x", x);
  check_tensor(op, "x", x, x.dim());
  check_like(op, "gate", gate, x);
  ActivationArgs args = activation_args(op, x, gate);
  args.factor = x.data_ptr();
  args.factor_rows = args.out_rows;
  run_activation<true>(op, Sigmoid{}, x, args);
}

}  // namespace

VLLM_OPS(_C, m) { m.def("mul_sigmoid(Tensor! x, Tensor gate) -> ()"); }

VLLM_OPS_IMPL(_C, CUDA, m) {
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul));
  m.impl("gelu_tanh_and_mul", TORCH_BOX(&gelu_tanh_and_mul));
  m.impl("gelu_new", TORCH_BOX(&gelu_new));
  m.impl("gelu_fast", TORCH_BOX(&gelu_fast));
  m.impl("gelu_quick", TORCH_BOX(&gelu_quick));
  m.impl("soft_cap", TORCH_BOX(&soft_cap));
  m.impl("mul_sigmoid", TORCH_BOX(&mul_sigmoid));
}

}  // namespace vllm::cuda
