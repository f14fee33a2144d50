// Ops: _C::topk_softmax, _C::fused_experts.
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

Activation activation_of(const char* op, const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
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

void fused_experts_op(const Tensor& out, const Tensor& x, const Tensor& w13, const Tensor& w2,
                      const Tensor& weights, const Tensor& ids, int64_t inner,
                      const std::string& activation) {
  const char* op = "fused_experts";
  check_tensor(op, "x", x, 2);
  check_float_dtype(op, "x", x);
  check_tensor(op, "out", out, 2);
  check_dtype(op, "out", out, x.scalar_type());
  const int64_t tokens = x.size(0), hidden = x.size(1);
  check_size(op, "out", out, 0, tokens);
  check_size(op, "out", out, 1, hidden);
  CHECK_ARG(inner > 0, op, ": intermediate_size must be positive, got ", inner);
  const int64_t experts = w13.dim() > 0 ? w13.size(0) : 0;
  check_stack(op, "w13_packed", w13, x.scalar_type(), experts, 2 * inner, hidden);
  check_stack(op, "w2_packed", w2, x.scalar_type(), experts, hidden, inner);
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
  const int64_t tokens_of_part = std::max<int64_t>(1, kPairsOfPart / std::max<int64_t>(1, k));
  const int64_t item = x.scalar_type() == ScalarType::Float ? 4 : 2;
  for (int64_t first = 0; first < tokens; first += tokens_of_part) {
    const int64_t count = std::min(tokens_of_part, tokens - first);
    const Pairs pairs(id_data + first * k, count, k, experts);
    const ExpertsArgs args{.out = static_cast<char*>(out.data_ptr()) + first * out.stride(0) * item,
                           .x = static_cast<const char*>(x.data_ptr()) + first * x.stride(0) * item,
                           .w13 = w13.data_ptr(),
                           .w2 = w2.data_ptr(),
                           .weights = static_cast<const float*>(weights.data_ptr()) + first * k,
                           .pair_of = pairs.pair_of.data(),
                           .token_of = pairs.token_of.data(),
                           .pair_ends = pairs.ends.data(),
                           .element = element_of(x),
                           .activation = activation_of(op, activation),
                           .tokens = count,
                           .k = k,
                           .experts = experts,
                           .hidden = hidden,
                           .inner = inner,
                           .out_stride = out.stride(0),
                           .x_stride = x.stride(0)};
    VLLM_CALL_KERNEL(fused_experts, args);
  }
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def("topk_softmax(Tensor! weights, Tensor! indices, Tensor gating, bool renormalize) -> ()");
  m.def(
      "fused_experts(Tensor! out, Tensor x, Tensor w13_packed, Tensor w2_packed, "
      "Tensor topk_weights, Tensor topk_ids, int intermediate_size, str activation) -> ()");
}

VLLM_OPS_IMPL(_C, CPU, m) {
  m.impl("topk_softmax", TORCH_BOX(&topk_softmax_op));
  m.impl("fused_experts", TORCH_BOX(&fused_experts_op));
}

}  // namespace vllm::cpu
