// Ops: _C::{silu,gelu,gelu_tanh}_and_mul, _C::gelu_{new,fast,quick}, _C::soft_cap on CUDA, and
// _C::mul_sigmoid and _C::relu2, which exist on CUDA only.
#include "core/registration.h"
#include "cuda/activation/row_grid.cuh"

namespace vllm::cuda {

namespace {

// 1 / (1 + exp(-x)) and x times that, for results of type T. The exact forms cost more than the
// memory of a 16-bit tensor allows; the hardware's are off by a few units in the last place of a
// float, of which a 16-bit result keeps none.
__device__ __forceinline__ float fast_logistic(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950409f * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return inverse;
}

template <typename T>
__device__ __forceinline__ float logistic(float x) {
  return sizeof(T) == 2 ? fast_logistic(x) : 1.0f / (1.0f + expf(-x));
}

template <typename T>
__device__ __forceinline__ float times_logistic(float x, float y) {
  return sizeof(T) == 2 ? x * fast_logistic(y) : x / (1.0f + expf(-y));
}

struct Silu {
  template <typename T>
  __device__ __forceinline__ float run(float x) const {
    return times_logistic<T>(x, x);
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
    if constexpr (sizeof(T) == 2) {  // 1 + tanh(u) = 2 / (1 + exp(-2 u))
      return times_logistic<T>(x, 2.0f * inner);
    } else {
      return 0.5f * x * (1.0f + tanhf(inner));
    }
  }
};

struct GeluQuick {
  template <typename T>
  __device__ __forceinline__ float run(float x) const {
    return times_logistic<T>(x, 1.702f * x);
  }
};

struct Sigmoid {
  template <typename T>
  __device__ __forceinline__ float run(float x) const {
    return logistic<T>(x);
  }
};

struct SoftCap {
  float scale, cap;
  template <typename T>
  __device__ __forceinline__ float run(float x) const {
    return tanhf(x * scale / cap) * cap;
  }
};

// relu(x)^2; NaN stays NaN.
struct Relu2 {
  template <typename T>
  __device__ __forceinline__ float run(float x) const {
    return x <= 0.0f ? 0.0f : x * x;
  }
};

struct ActivationArgs {
  void* out;
  const void* x;
  const void* factor;  // what act(x) is multiplied by; null: nothing
  Rows out_rows, x_rows, factor_rows;
  int64_t n;  // of a row of out
  bool is_packed;
};

// act(x), or act(x) * factor with the activation rounded to T before the product.
template <typename T, bool kGated, typename Act>
__device__ __forceinline__ Pack<T> activate(const Pack<T>& x, const Pack<T>& factor,
                                            const Act& act) {
  const Pack<T> active = map_pairs<T>([&](int e) {
    return make_float2(act.template run<T>(to_float(x.item[e])),
                       act.template run<T>(to_float(x.item[e + 1])));
  });
  if constexpr (kGated) return multiply_packs(active, factor);
  return active;
}

template <typename T, typename Act, bool kGated, int kPacks, bool kIsPacked>
__global__ void activation_kernel(const __grid_constant__ ActivationArgs args, const RowGrid grid,
                                  const Act act) {
  await_inputs();
  let_next_start();
  const uint32_t row = grid.row();
  if (row >= grid.rows) return;
  const T* x = static_cast<const T*>(args.x) + args.x_rows.offset(row);
  const T* row_of_factor = static_cast<const T*>(args.factor);
  if constexpr (kGated) row_of_factor += args.factor_rows.offset(row);
  Pack<T> packs[kPacks], factors[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t begin = grid.begin_of<T>(p, kPacks);
    packs[p] = load_pack(x, begin, args.n, kIsPacked);
    if constexpr (kGated) factors[p] = load_pack(row_of_factor, begin, args.n, kIsPacked);
  }
  T* out = static_cast<T*>(args.out) + args.out_rows.offset(row);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Pack<T> result = activate<T, kGated>(packs[p], factors[p], act);
    store_pack(out, grid.begin_of<T>(p, kPacks), args.n, kIsPacked, result);
  }
}

ActivationArgs activation_args(const char* op, const Tensor& out, const Tensor& input) {
  return ActivationArgs{.out = out.data_ptr(),
                        .x = input.data_ptr(),
                        .factor = nullptr,
                        .out_rows = rows_of(op, "out", out),
                        .x_rows = rows_of(op, "input", input),
                        .factor_rows = {},
                        .n = out.size(out.dim() - 1),
                        .is_packed = false};
}

template <bool kGated, typename Act>
void run_activation(const char* op, const Act& act, const Tensor& input, ActivationArgs args) {
  const int64_t item = static_cast<int64_t>(input.element_size());
  args.is_packed = is_packed(args.out, args.out_rows, args.n, item) &&
                   is_packed(args.x, args.x_rows, args.n, item) &&
                   (!kGated || is_packed(args.factor, args.factor_rows, args.n, item));
  const LaunchScope scope(input);
  dispatch_float(input.scalar_type(), [&]<typename T>(TypeTag<T>) {
    dispatch_row_grid(
        op, args.n, Pack<T>::kSize, args.out_rows.count(), args.is_packed,
        [&]<int kPacks, bool kIsPacked>(ThreadPacks<kPacks, kIsPacked>, const RowGrid& grid) {
          launch_overlapping(scope, activation_kernel<T, Act, kGated, kPacks, kIsPacked>,
                             grid.blocks, grid.threads, args, grid, act);
        });
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

void relu2(const Tensor& out, const Tensor& input) { run_elementwise<Relu2>("relu2", out, input); }

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

VLLM_OPS(_C, m) {
  m.def("mul_sigmoid(Tensor! x, Tensor gate) -> ()");
  m.def("relu2(Tensor! out, Tensor input) -> ()");
}

VLLM_OPS_IMPL(_C, CUDA, m) {
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul));
  m.impl("gelu_tanh_and_mul", TORCH_BOX(&gelu_tanh_and_mul));
  m.impl("gelu_new", TORCH_BOX(&gelu_new));
  m.impl("gelu_fast", TORCH_BOX(&gelu_fast));
  m.impl("gelu_quick", TORCH_BOX(&gelu_quick));
  m.impl("soft_cap", TORCH_BOX(&soft_cap));
  m.impl("relu2", TORCH_BOX(&relu2));
  m.impl("mul_sigmoid", TORCH_BOX(&mul_sigmoid));
}

}  // namespace vllm::cuda
