// Ops: _C::rms_norm, _C::fused_add_rms_norm.
#include "cpu/kernels/norm.h"

#include "cpu/op_rows.h"

namespace vllm::cpu {

namespace {

RmsNormArgs norm_args(const char* op, const Tensor& out, const Tensor& x, const Tensor& weight,
                      double epsilon) {
  check_float_dtype(op, "input", x);
  check_like(op, "out", out, x);
  RmsNormArgs args{.out = out.data_ptr(),
                   .x = x.data_ptr(),
                   .residual = nullptr,
                   .weight = weight.data_ptr(),
                   .element = element_of(x),
                   .weight_element = element_of(weight),
                   .out_rows = rows_of(op, "out", out),
                   .x_rows = rows_of(op, "input", x),
                   .residual_rows = {},
                   .n = x.size(x.dim() - 1),
                   .epsilon = static_cast<float>(epsilon)};
  check_tensor(op, "weight", weight, 1);
  if (weight.scalar_type() != ScalarType::Float) check_dtype(op, "weight", weight, x.scalar_type());
  check_size(op, "weight", weight, 0, args.n);
  return args;
}

void rms_norm_op(const Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  const RmsNormArgs args = norm_args("rms_norm", out, input, weight, epsilon);
  VLLM_CALL_KERNEL(rms_norm, args);
}

void fused_add_rms_norm_op(const Tensor& input, const Tensor& residual, const Tensor& weight,
                           double epsilon) {
  const char* op = "fused_add_rms_norm";
  RmsNormArgs args = norm_args(op, input, input, weight, epsilon);
  check_like(op, "residual", residual, input);
  args.residual = residual.data_ptr();
  args.residual_rows = rows_of(op, "residual", residual);
  VLLM_CALL_KERNEL(rms_norm, args);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def("rms_norm(Tensor! out, Tensor input, Tensor weight, float epsilon) -> ()");
  m.def("fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()");
}

VLLM_OPS_IMPL(_C, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm_op));
  m.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm_op));
}

}  // namespace vllm::cpu
