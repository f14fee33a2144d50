// Ops: _C::{silu,gelu,gelu_tanh}_and_mul, _C::gelu_{new,fast,quick}.
#include "cpu/kernels/activation.h"

#include "cpu/op_rows.h"

namespace vllm::cpu {

namespace {

void run_gated(const char* op, Activation activation, const Tensor& out, const Tensor& input) {
  check_float_dtype(op, "input", input);
  check_dtype(op, "out", out, input.scalar_type());
  const ActivationArgs args{.out = out.data_ptr(),
                            .x = input.data_ptr(),
                            .element = element_of(input),
                            .activation = activation,
                            .out_rows = rows_of(op, "out", out),
                            .x_rows = rows_of(op, "input", input),
                            .n = out.size(out.dim() - 1)};
  const int64_t last = input.dim() - 1;
  CHECK_ARG(out.dim() == input.dim() && input.size(last) == 2 * args.n, op, ": out has shape ",
            shape_text(out), ", expected that of input ", shape_text(input),
            " with half the last size");
  for (int64_t i = 0; i < last; ++i) check_size(op, "out", out, i, input.size(i));
  VLLM_CALL_KERNEL(act_and_mul, args);
}

void run_elementwise(const char* op, Activation activation, const Tensor& out,
                     const Tensor& input) {
  check_float_dtype(op, "input", input);
  check_like(op, "out", out, input);
  const ActivationArgs args{.out = out.data_ptr(),
                            .x = input.data_ptr(),
                            .element = element_of(input),
                            .activation = activation,
                            .out_rows = rows_of(op, "out", out),
                            .x_rows = rows_of(op, "input", input),
                            .n = input.size(input.dim() - 1)};
  VLLM_CALL_KERNEL(act, args);
}

void silu_and_mul(const Tensor& out, const Tensor& input) {
  run_gated("silu_and_mul", Activation::kSilu, out, input);
}
void gelu_and_mul(const Tensor& out, const Tensor& input) {
  run_gated("gelu_and_mul", Activation::kGelu, out, input);
}
void gelu_tanh_and_mul(const Tensor& out, const Tensor& input) {
  run_gated("gelu_tanh_and_mul", Activation::kGeluTanh, out, input);
}
void gelu_new(const Tensor& out, const Tensor& input) {
  run_elementwise("gelu_new", Activation::kGeluTanh, out, input);
}
void gelu_fast(const Tensor& out, const Tensor& input) {
  run_elementwise("gelu_fast", Activation::kGeluTanh, out, input);
}
void gelu_quick(const Tensor& out, const Tensor& input) {
  run_elementwise("gelu_quick", Activation::kGeluQuick, out, input);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def("silu_and_mul(Tensor! out, Tensor input) -> ()");
  m.def("gelu_and_mul(Tensor! out, Tensor input) -> ()");
  m.def("gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()");
  m.def("gelu_new(Tensor! out, Tensor input) -> ()");
  m.def("gelu_fast(Tensor! out, Tensor input) -> ()");
  m.def("gelu_quick(Tensor! out, Tensor input) -> ()");
}

VLLM_OPS_IMPL(_C, CPU, m) {
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul));
  m.impl("gelu_tanh_and_mul", TORCH_BOX(&gelu_tanh_and_mul));
  m.impl("gelu_new", TORCH_BOX(&gelu_new));
  m.impl("gelu_fast", TORCH_BOX(&gelu_fast));
  m.impl("gelu_quick", TORCH_BOX(&gelu_quick));
}

}  // namespace vllm::cpu
