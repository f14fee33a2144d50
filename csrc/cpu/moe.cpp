// Ops: _C::topk_softmax, _C::fused_experts, _C::fused_biased_experts, _C::fused_relu2_experts.
#include "cpu/kernels/moe.h"

#include <algorithm>
#include <string>
#include <vector>

#include "cpu/op.h"

namespace vllm::cpu {

namespace {

constexpr int64_t kBlockCols = 32;
// Bounds the memory of the rows between input and output; the weights are read once for each part.
constexpr int64_t kPairsOfPart = 8192;

void topk_softmax_op(const Tensor& weights, const Tensor& indices, const Tensor& gating,
                     bool renormalize) {
  const char* op = "topk_softmax";
  check_tensor(op, "gating", gating, 2);
  check_float_dtype(op, "gating", gating);
  check_tensor(op, "weights", weights, 2);
  check_contiguous(op, "weights", weights);
  check_dtype(op, "weights", weights, ScalarType::Float);
  check_size(op, "weights", weights, 0, gating.size(0));
  const int64_t experts = gating.size(1), k = weights.size(1);
  CHECK_ARG(k >= 1 && k <= experts, op, ": weights has shape ", shape_text(weights),
            ", its last size must be 1 to the number of experts, ", experts);
  check_tensor(op, "indices", indices, 2);
  check_contiguous(op, "indices", indices);
  check_dtype(op, "indices", indices, ScalarType::Int);
  check_size(op, "indices", indices, 0, gating.size(0));
  check_size(op, "indices", indices, 1, k);
  const TopkSoftmaxArgs args{.weights = static_cast<float*>(weights.data_ptr()),
                             .indices = static_cast<int32_t*>(indices.data_ptr()),
                             .gating = gating.data_ptr(),
                             .element = element_of(gating),
                             .tokens = gating.size(0),
                             .experts = experts,
                             .k = k,
                             .stride = gating.stride(0),
                             .renormalize = renormalize};
  VLLM_CALL_KERNEL(topk_softmax, args);
}

// A stack of packed [n, k] weights, one for each expert.
void check_stack(const char* op, const char* name, const Tensor& t, ScalarType type,
                 int64_t experts, int64_t n, int64_t k) {
  check_dtype(op, name, t, type);
  const bool is_float = type == ScalarType::Float;
  check_tensor(op, name, t, is_float ? 4 : 5);
  check_contiguous(op, name, t);
  check_size(op, name, t, 0, experts);
  check_size(op, name, t, 1, (n + kBlockCols - 1) / kBlockCols);
  check_size(op, name, t, 2, is_float ? k : (k + 1) / 2);
  check_size(op, name, t, 3, kBlockCols);
  if (!is_float) check_size(op, name, t, 4, 2);
}

// One row of biases for each expert.
void check_biases(const char* op, const char* name, const Tensor& t, ScalarType type,
                  int64_t experts, int64_t n) {
  check_dtype(op, name, t, type);
  check_tensor(op, name, t, 2);
  check_contiguous(op, name, t);
  check_size(op, name, t, 0, experts);
  check_size(op, name, t, 1, n);
}

void check_rows(const char* op, const Tensor& out, const Tensor& x) {
  check_tensor(op, "x", x, 2);
  check_float_dtype(op, "x", x);
  check_tensor(op, "out", out, 2);
  check_dtype(op, "out", out, x.scalar_type());
  check_size(op, "out", out, 0, x.size(0));
  check_size(op, "out", out, 1, x.size(1));
}

int64_t experts_of(const Tensor& stack) { return stack.dim() > 0 ? stack.size(0) : 0; }

ExpertActivation gated_activation_of(const char* op, const std::string& name) {
  if (name == "silu") return ExpertActivation::kSilu;
  if (name == "gelu") return ExpertActivation::kGelu;
  if (name == "gelu_tanh") return ExpertActivation::kGeluTanh;
  throw_shape_error(op, ": activation is '", name, "', allowed: silu, gelu, gelu_tanh");
}

// Numbers the pairs of a part by expert, then by token.
struct Pairs {
  std::vector<int32_t> pair_of, token_of, ends;

  Pairs(const int32_t* ids, int64_t tokens, int64_t k, int64_t experts)
      : pair_of(tokens * k), token_of(tokens * k), ends(experts, 0) {
    for (int64_t i = 0; i < tokens * k; ++i) ++ends[ids[i]];
    std::vector<int32_t> next(experts, 0);
    for (int64_t e = 1; e < experts; ++e) next[e] = next[e - 1] + ends[e - 1];
    for (int64_t i = 0; i < tokens * k; ++i) {
      const int32_t pair = next[ids[i]]++;
      pair_of[i] = pair;
      token_of[pair] = static_cast<int32_t>(i / k);
    }
    ends = next;
  }
};

void check_routing(const char* op, const Tensor& weights, const Tensor& ids, int64_t tokens,
                   int64_t experts) {
  check_tensor(op, "topk_weights", weights, 2);
  check_contiguous(op, "topk_weights", weights);
  check_dtype(op, "topk_weights", weights, ScalarType::Float);
  check_size(op, "topk_weights", weights, 0, tokens);
  const int64_t k = weights.size(1);
  check_tensor(op, "topk_ids", ids, 2);
  check_contiguous(op, "topk_ids", ids);
  check_dtype(op, "topk_ids", ids, ScalarType::Int);
  check_size(op, "topk_ids", ids, 0, tokens);
  check_size(op, "topk_ids", ids, 1, k);
  const int32_t* id_data = static_cast<const int32_t*>(ids.data_ptr());
  for (int64_t i = 0; i < tokens * k; ++i) {
    CHECK_ARG(id_data[i] >= 0 && id_data[i] < experts, op, ": topk_ids has ", id_data[i],
              " for token ", i / k, ", allowed: 0 to ", experts - 1);
  }
}

// Runs checked experts over checked rows, a part after the other.
void run_parts(const char* op, const Tensor& out, const Tensor& x, const Experts& experts,
               const Tensor& weights, const Tensor& ids) {
  const int64_t tokens = x.size(0);
  check_routing(op, weights, ids, tokens, experts.count);
  const int64_t k = ids.size(1);
  const int32_t* id_data = static_cast<const int32_t*>(ids.data_ptr());
  const int64_t tokens_of_part = std::max<int64_t>(1, kPairsOfPart / std::max<int64_t>(1, k));
  const int64_t item = x.scalar_type() == ScalarType::Float ? 4 : 2;
  for (int64_t first = 0; first < tokens; first += tokens_of_part) {
    const int64_t count = std::min(tokens_of_part, tokens - first);
    const Pairs pairs(id_data + first * k, count, k, experts.count);
    const ExpertsArgs args{.out = static_cast<char*>(out.data_ptr()) + first * out.stride(0) * item,
                           .x = static_cast<const char*>(x.data_ptr()) + first * x.stride(0) * item,
                           .experts = experts,
                           .weights = static_cast<const float*>(weights.data_ptr()) + first * k,
                           .pair_of = pairs.pair_of.data(),
                           .token_of = pairs.token_of.data(),
                           .pair_ends = pairs.ends.data(),
                           .element = element_of(x),
                           .tokens = count,
                           .k = k,
                           .hidden = x.size(1),
                           .out_stride = out.stride(0),
                           .x_stride = x.stride(0)};
    VLLM_CALL_KERNEL(fused_experts, args);
  }
}

void fused_experts_op(const Tensor& out, const Tensor& x, const Tensor& w13, const Tensor& w2,
                      const Tensor& weights, const Tensor& ids, int64_t inner,
                      const std::string& activation) {
  const char* op = "fused_experts";
  check_rows(op, out, x);
  const int64_t hidden = x.size(1), experts = experts_of(w13);
  CHECK_ARG(inner > 0, op, ": intermediate_size must be positive, got ", inner);
  check_stack(op, "w13_packed", w13, x.scalar_type(), experts, 2 * inner, hidden);
  check_stack(op, "w2_packed", w2, x.scalar_type(), experts, hidden, inner);
  const Experts stacks{.first = w13.data_ptr(),
                       .second = w2.data_ptr(),
                       .activation = gated_activation_of(op, activation),
                       .count = experts,
                       .inner = inner,
                       .first_size = 2 * inner};
  run_parts(op, out, x, stacks, weights, ids);
}

void fused_biased_experts_op(const Tensor& out, const Tensor& x, const Tensor& gate_up,
                             const Tensor& gate_up_bias, const Tensor& down,
                             const std::optional<Tensor>& down_bias, const Tensor& weights,
                             const Tensor& ids, double alpha, double limit) {
  const char* op = "fused_biased_experts";
  check_rows(op, out, x);
  const int64_t hidden = x.size(1), experts = experts_of(gate_up);
  const ScalarType type = x.scalar_type();
  check_tensor(op, "gate_up_bias", gate_up_bias, 2);
  const int64_t first_size = gate_up_bias.size(1);
  CHECK_ARG(first_size > 0 && first_size % 2 == 0, op, ": gate_up_bias has shape ",
            shape_text(gate_up_bias), ", its last size must be even, a gate and an up in turn");
  check_biases(op, "gate_up_bias", gate_up_bias, type, experts, first_size);
  check_stack(op, "gate_up", gate_up, type, experts, first_size, hidden);
  check_stack(op, "down", down, type, experts, hidden, first_size / 2);
  if (down_bias.has_value()) check_biases(op, "down_bias", *down_bias, type, experts, hidden);
  const Experts stacks{.first = gate_up.data_ptr(),
                       .first_bias = gate_up_bias.data_ptr(),
                       .second = down.data_ptr(),
                       .second_bias = down_bias.has_value() ? down_bias->data_ptr() : nullptr,
                       .activation = ExpertActivation::kClamped,
                       .alpha = static_cast<float>(alpha),
                       .limit = static_cast<float>(limit),
                       .count = experts,
                       .inner = first_size / 2,
                       .first_size = first_size};
  run_parts(op, out, x, stacks, weights, ids);
}

void fused_relu2_experts_op(const Tensor& out, const Tensor& x, const Tensor& up,
                            const Tensor& down, const Tensor& weights, const Tensor& ids) {
  const char* op = "fused_relu2_experts";
  check_rows(op, out, x);
  const int64_t hidden = x.size(1), experts = experts_of(up);
  const ScalarType type = x.scalar_type();
  // A stack of bf16 does not say whether the last of its pairs is whole; what pads it is zero.
  const int64_t inner = down.dim() < 3 ? 0 : down.size(2) * (type == ScalarType::Float ? 1 : 2);
  check_stack(op, "down", down, type, experts, hidden, inner);
  check_stack(op, "up", up, type, experts, inner, hidden);
  CHECK_ARG(inner > 0, op, ": down has shape ", shape_text(down), ", experts must not be empty");
  const Experts stacks{.first = up.data_ptr(),
                       .second = down.data_ptr(),
                       .activation = ExpertActivation::kRelu2,
                       .count = experts,
                       .inner = inner,
                       .first_size = inner};
  run_parts(op, out, x, stacks, weights, ids);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def("topk_softmax(Tensor! weights, Tensor! indices, Tensor gating, bool renormalize) -> ()");
  m.def(
      "fused_experts(Tensor! out, Tensor x, Tensor w13_packed, Tensor w2_packed, "
      "Tensor topk_weights, Tensor topk_ids, int intermediate_size, str activation) -> ()");
  m.def(
      "fused_biased_experts(Tensor! out, Tensor x, Tensor gate_up, Tensor gate_up_bias, "
      "Tensor down, Tensor? down_bias, Tensor topk_weights, Tensor topk_ids, float alpha, "
      "float limit) -> ()");
  m.def(
      "fused_relu2_experts(Tensor! out, Tensor x, Tensor up, Tensor down, Tensor topk_weights, "
      "Tensor topk_ids) -> ()");
}

VLLM_OPS_IMPL(_C, CPU, m) {
  m.impl("topk_softmax", TORCH_BOX(&topk_softmax_op));
  m.impl("fused_experts", TORCH_BOX(&fused_experts_op));
  m.impl("fused_biased_experts", TORCH_BOX(&fused_biased_experts_op));
  m.impl("fused_relu2_experts", TORCH_BOX(&fused_relu2_experts_op));
}

}  // namespace vllm::cpu
