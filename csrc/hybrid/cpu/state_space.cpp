// Ops: _C::gated_delta_rule, _C::delta_rule_gates, _C::mamba2_scan.
#include "hybrid/cpu/state_args.h"

namespace vllm::cpu {

namespace {

void gated_delta_rule_op(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v,
                         const Tensor& g, const Tensor& beta, const Tensor& state,
                         const Tensor& offsets, const Tensor& bounds, const Tensor& computed,
                         double scale, bool l2norm) {
  const char* op = "gated_delta_rule";
  check_tensor(op, "q", q, 3);
  check_tensor(op, "v", v, 3);
  check_float_dtype(op, "q", q);
  const ScalarType type = q.scalar_type();
  const int64_t tokens = q.size(0), key_heads = q.size(1), key_size = q.size(2);
  const int64_t heads = v.size(1), value_size = v.size(2);
  CHECK_ARG(key_heads > 0 && heads % key_heads == 0, op, ": v has ", heads,
            " heads, must be a multiple of the ", key_heads, " heads of q");
  CHECK_ARG(key_size <= kMaxKeySize, op, ": heads of q have ", key_size, " elements, at most ",
            kMaxKeySize, " are allowed");
  for (const Tensor* gate : {&g, &beta}) {
    const char* name = gate == &g ? "g" : "beta";
    check_matrix(op, name, *gate, ScalarType::Float, tokens, heads);
    check_contiguous(op, name, *gate);
  }
  const DeltaRuleArgs args{
      .out = heads_of(op, "out", out, type, tokens, heads, value_size),
      .q = heads_of(op, "q", q, type, tokens, key_heads, key_size),
      .k = heads_of(op, "k", k, type, tokens, key_heads, key_size),
      .v = heads_of(op, "v", v, type, tokens, heads, value_size),
      .g = static_cast<const float*>(g.data_ptr()),
      .beta = static_cast<const float*>(beta.data_ptr()),
      .state = state_data(op, state, heads, key_size, value_size),
      .rows = state_rows(op, state, offsets, bounds, computed, tokens),
      .element = element_of(q),
      .heads = heads,
      .key_heads = key_heads,
      .key_size = key_size,
      .value_size = value_size,
      .scale = static_cast<float>(scale),
      .l2norm = l2norm,
  };
  VLLM_CALL_KERNEL(gated_delta_rule, args);
}

void delta_rule_gates_op(const Tensor& g, const Tensor& beta, const Tensor& a, const Tensor& b,
                         const Tensor& a_log, const Tensor& dt_bias) {
  const char* op = "delta_rule_gates";
  check_tensor(op, "a", a, 2);
  check_float_dtype(op, "a", a);
  const int64_t tokens = a.size(0), heads = a.size(1);
  check_matrix(op, "b", b, a.scalar_type(), tokens, heads);
  check_matrix(op, "g", g, ScalarType::Float, tokens, heads);
  check_contiguous(op, "g", g);
  check_matrix(op, "beta", beta, ScalarType::Float, tokens, heads);
  check_contiguous(op, "beta", beta);
  const DeltaGatesArgs args{
      .g = static_cast<float*>(g.data_ptr()),
      .beta = static_cast<float*>(beta.data_ptr()),
      .a = a.data_ptr(),
      .b = b.data_ptr(),
      .a_log = float_data(op, "a_log", a_log, heads),
      .dt_bias = float_data(op, "dt_bias", dt_bias, heads),
      .element = element_of(a),
      .tokens = tokens,
      .heads = heads,
      .a_stride = a.stride(0),
      .b_stride = b.stride(0),
  };
  VLLM_CALL_KERNEL(delta_rule_gates, args);
}

void mamba2_scan_op(const Tensor& out, const Tensor& x, const Tensor& dt, const Tensor& a,
                    const Tensor& b, const Tensor& c, const std::optional<Tensor>& d,
                    const std::optional<Tensor>& dt_bias, const Tensor& state,
                    const Tensor& offsets, const Tensor& bounds, const Tensor& computed,
                    double dt_min, double dt_max) {
  const char* op = "mamba2_scan";
  check_tensor(op, "x", x, 3);
  check_tensor(op, "B", b, 3);
  check_float_dtype(op, "x", x);
  const ScalarType type = x.scalar_type();
  const int64_t tokens = x.size(0), heads = x.size(1), head_size = x.size(2);
  const int64_t groups = b.size(1), state_size = b.size(2);
  CHECK_ARG(groups > 0 && heads % groups == 0, op, ": x has ", heads,
            " heads, must be a multiple of the ", groups, " groups of B");
  CHECK_ARG(dt_min <= dt_max, op, ": dt_min is ", dt_min, ", dt_max ", dt_max);
  check_matrix(op, "dt", dt, type, tokens, heads);
  const Mamba2Args args{
      .out = heads_of(op, "out", out, type, tokens, heads, head_size),
      .x = heads_of(op, "x", x, type, tokens, heads, head_size),
      .b = heads_of(op, "B", b, type, tokens, groups, state_size),
      .c = heads_of(op, "C", c, type, tokens, groups, state_size),
      .dt = dt.data_ptr(),
      .dt_stride = dt.stride(0),
      .a = float_data(op, "A", a, heads),
      .d = float_data(op, "D", d, heads),
      .dt_bias = float_data(op, "dt_bias", dt_bias, heads),
      .state = state_data(op, state, heads, head_size, state_size),
      .rows = state_rows(op, state, offsets, bounds, computed, tokens),
      .element = element_of(x),
      .heads = heads,
      .groups = groups,
      .head_size = head_size,
      .state_size = state_size,
      .dt_min = static_cast<float>(dt_min),
      .dt_max = static_cast<float>(dt_max),
  };
  VLLM_CALL_KERNEL(mamba2_scan, args);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def(
      "gated_delta_rule(Tensor! out, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
      "Tensor! state, Tensor state_offsets, Tensor cu_query_lens, Tensor num_computed, "
      "float scale, bool l2norm) -> ()");
  m.def(
      "delta_rule_gates(Tensor! g, Tensor! beta, Tensor a, Tensor b, Tensor a_log, "
      "Tensor dt_bias) -> ()");
  m.def(
      "mamba2_scan(Tensor! out, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
      "Tensor? dt_bias, Tensor! state, Tensor state_offsets, Tensor cu_query_lens, "
      "Tensor num_computed, float dt_min, float dt_max) -> ()");
}

VLLM_OPS_IMPL(_C, CPU, m) {
  m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule_op));
  m.impl("delta_rule_gates", TORCH_BOX(&delta_rule_gates_op));
  m.impl("mamba2_scan", TORCH_BOX(&mamba2_scan_op));
}

}  // namespace vllm::cpu
