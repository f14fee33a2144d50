// Ops: _C::causal_conv1d, _C::gated_rms_norm.
#include "hybrid/cpu/state_args.h"

namespace vllm::cpu {

namespace {

void causal_conv1d_op(const Tensor& out, const Tensor& x, const Tensor& weight,
                      const std::optional<Tensor>& bias, const Tensor& state, const Tensor& offsets,
                      const Tensor& bounds, const Tensor& computed, bool silu) {
  const char* op = "causal_conv1d";
  check_tensor(op, "x", x, 2);
  check_float_dtype(op, "x", x);
  const ScalarType type = x.scalar_type();
  const int64_t tokens = x.size(0), channels = x.size(1);
  check_matrix(op, "out", out, type, tokens, channels);
  CHECK_ARG(weight.is_cpu() && weight.dim() == 2, op, ": weight has shape ", shape_text(weight),
            ", expected rank 2 on the CPU");
  check_dtype(op, "weight", weight, type);
  check_size(op, "weight", weight, 0, channels);
  const int64_t taps = weight.size(1);
  CHECK_ARG(taps >= 2 && taps <= kMaxTaps, op, ": weight has ", taps, " taps, allowed: 2 to ",
            kMaxTaps);
  CHECK_ARG(channels == 1 || weight.stride(0) == 1, op,
            ": weight must be contiguous over channels, its stride there is ", weight.stride(0));
  if (bias.has_value()) {
    check_tensor(op, "bias", *bias, 1);
    check_dtype(op, "bias", *bias, type);
    check_size(op, "bias", *bias, 0, channels);
  }
  CHECK_ARG(state.is_cpu() && state.dim() == 3, op, ": state has shape ", shape_text(state),
            ", expected rank 3 on the CPU");
  check_dtype(op, "state", state, type);
  check_size(op, "state", state, 1, channels);
  check_size(op, "state", state, 2, taps - 1);
  CHECK_ARG(channels == 1 || state.stride(1) == 1, op,
            ": state must be contiguous over channels, its stride there is ", state.stride(1));
  const CausalConvArgs args{
      .out = out.data_ptr(),
      .x = x.data_ptr(),
      .weight = weight.data_ptr(),
      .bias = bias.has_value() ? bias->data_ptr() : nullptr,
      .state = state.data_ptr(),
      .rows = state_rows(op, state, offsets, bounds, computed, tokens),
      .element = element_of(x),
      .channels = channels,
      .taps = taps,
      .out_stride = out.stride(0),
      .x_stride = x.stride(0),
      .weight_stride = weight.stride(1),
      .state_stride = state.stride(2),
      .silu = silu,
  };
  VLLM_CALL_KERNEL(causal_conv, args);
}

void gated_rms_norm_op(const Tensor& out, const Tensor& x, const Tensor& gate, const Tensor& weight,
                       double epsilon, int64_t group_size, bool gate_first) {
  const char* op = "gated_rms_norm";
  check_tensor(op, "x", x, 2);
  check_float_dtype(op, "x", x);
  const ScalarType type = x.scalar_type();
  const int64_t tokens = x.size(0), channels = x.size(1);
  check_matrix(op, "out", out, type, tokens, channels);
  check_matrix(op, "gate", gate, type, tokens, channels);
  CHECK_ARG(group_size > 0 && channels % group_size == 0, op, ": group_size is ", group_size,
            ", must divide the ", channels, " channels of x");
  check_tensor(op, "weight", weight, 1);
  check_dtype(op, "weight", weight, type);
  CHECK_ARG(weight.size(0) == channels || weight.size(0) == group_size, op, ": weight has ",
            weight.size(0), " elements, must be ", channels, " or ", group_size);
  const GatedNormArgs args{
      .out = out.data_ptr(),
      .x = x.data_ptr(),
      .gate = gate.data_ptr(),
      .weight = weight.data_ptr(),
      .element = element_of(x),
      .tokens = tokens,
      .groups = channels / group_size,
      .group_size = group_size,
      .out_stride = out.stride(0),
      .x_stride = x.stride(0),
      .gate_stride = gate.stride(0),
      .weight_stride = weight.size(0) == channels ? group_size : 0,
      .epsilon = static_cast<float>(epsilon),
      .gate_first = gate_first,
  };
  VLLM_CALL_KERNEL(gated_rms_norm, args);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def(
      "causal_conv1d(Tensor! out, Tensor x, Tensor weight, Tensor? bias, Tensor! state, "
      "Tensor state_offsets, Tensor cu_query_lens, Tensor num_computed, bool silu) -> ()");
  m.def(
      "gated_rms_norm(Tensor! out, Tensor x, Tensor gate, Tensor weight, float epsilon, "
      "int group_size, bool gate_first) -> ()");
}

VLLM_OPS_IMPL(_C, CPU, m) {
  m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d_op));
  m.impl("gated_rms_norm", TORCH_BOX(&gated_rms_norm_op));
}

}  // namespace vllm::cpu
