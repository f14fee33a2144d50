// Ops: _C::rms_norm, _C::fused_add_rms_norm.
#include "cpu/kernels/norm.h"

#include "cpu/op.h"

namespace vllm::cpu {

namespace {

RmsNormArgs norm_args(const char* op, const Tensor& out, const Tensor& x, const Tensor& weight,
                      double epsilon) {
  check_tensor(op, "input", x, 2);
  check_tensor(op, "out", out, 2);
  check_tensor(op, "weight", weight, 1);
  check_float_dtype(op, "input", x);
  check_dtype(op, "out", out, x.scalar_type());
  if (weight.scalar_type() != ScalarType::Float) check_dtype(op, "weight", weight, x.scalar_type());
  check_size(op, "out", out, 0, x.size(0));
  check_size(op, "out", out, 1, x.size(1));
  check_size(op, "weight", weight, 0, x.size(1));
  return RmsNormArgs{.out = out.data_ptr(),
                     .x = x.data_ptr(),
                     .residual = nullptr,
                     .weight = weight.data_ptr(),
                     .element = element_of(x),
                     .weight_element = element_of(weight),
                     .rows = x.size(0),
                     .n = x.size(1),
                     .out_stride = out.stride(0),
                     .x_stride = x.stride(0),
                     .residual_stride = 0,
                     .epsilon = static_cast<float>(epsilon)};
}

void rms_norm_op(const Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  const RmsNormArgs args = norm_args("rms_norm", out, input, weight, epsilon);
  VLLM_CALL_KERNEL(rms_norm, args);
}

void fused_add_rms_norm_op(const Tensor& input, const Tensor& residual, const Tensor& weight,
                           double epsilon) {
  RmsNormArgs args = norm_args("fused_add_rms_norm", input, input, weight, epsilon);
  check_tensor("fused_add_rms_norm", "residual", residual, 2);
  check_dtype("fused_add_rms_norm", "residual", residual, input.scalar_type());
  check_size("fused_add_rms_norm", "residual", residual, 0, args.rows);
  check_size("fused_add_rms_norm", "residual", residual, 1, args.n);
  args.residual = residual.data_ptr();
  args.residual_stride = residual.stride(0);
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
