// Op: _C::rotary_embedding.
#include "cpu/kernels/rope.h"

#include "cpu/op.h"

namespace vllm::cpu {

namespace {

constexpr char kOp[] = "rotary_embedding";

// [T, heads * head_size] or [T, heads, head_size], tokens and heads at any stride.
RopeHeads heads_of(const char* name, const Tensor& t, int64_t tokens, int64_t head_size) {
  check_float_dtype(kOp, name, t);
  check_tensor(kOp, name, t, t.dim() == 3 ? 3 : 2);
  check_size(kOp, name, t, 0, tokens);
  RopeHeads heads{
      .data = t.data_ptr(), .num_heads = 0, .token_stride = t.stride(0), .head_stride = head_size};
  if (t.dim() == 3) {
    check_size(kOp, name, t, 2, head_size);
    heads.num_heads = t.size(1);
    heads.head_stride = t.stride(1);
  } else {
    CHECK_ARG(t.size(1) % head_size == 0, kOp, ": ", name, " has shape ", shape_text(t),
              ", expected [T, heads * ", head_size, "]");
    heads.num_heads = t.size(1) / head_size;
  }
  return heads;
}

void rotary_embedding_op(const Tensor& positions, const Tensor& query, const Tensor& key,
                         int64_t head_size, const Tensor& cos_sin_cache, bool is_neox) {
  check_tensor(kOp, "positions", positions, 1);
  check_dtype(kOp, "positions", positions, ScalarType::Long);
  check_tensor(kOp, "cos_sin_cache", cos_sin_cache, 2);
  check_dtype(kOp, "cos_sin_cache", cos_sin_cache, ScalarType::Float);
  check_contiguous(kOp, "cos_sin_cache", cos_sin_cache);
  CHECK_ARG(head_size > 0, kOp, ": head_size must be positive, got ", head_size);
  const int64_t max_pos = cos_sin_cache.size(0), rot_dim = cos_sin_cache.size(1);
  CHECK_ARG(rot_dim > 0 && rot_dim % 2 == 0 && rot_dim <= head_size, kOp,
            ": the rows of cos_sin_cache must have an even size of 2 to ", head_size, ", got ",
            rot_dim);
  check_dtype(kOp, "key", key, query.scalar_type());
  const RopeArgs args{.query = heads_of("query", query, positions.size(0), head_size),
                      .key = heads_of("key", key, positions.size(0), head_size),
                      .element = element_of(query),
                      .positions = static_cast<const int64_t*>(positions.data_ptr()),
                      .cos_sin = static_cast<const float*>(cos_sin_cache.data_ptr()),
                      .tokens = positions.size(0),
                      .rot_dim = rot_dim,
                      .is_neox = is_neox};
  for (int64_t i = 0; i < args.tokens; ++i) {
    CHECK_ARG(args.positions[i] >= 0 && args.positions[i] < max_pos, kOp, ": position ",
              args.positions[i], " of token ", i, " lies outside the table of ", max_pos,
              " positions");
  }
  VLLM_CALL_KERNEL(rotary_embedding, args);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def(
      "rotary_embedding(Tensor positions, Tensor! query, Tensor! key, int head_size, "
      "Tensor cos_sin_cache, bool is_neox) -> ()");
}

VLLM_OPS_IMPL(_C, CPU, m) { m.impl("rotary_embedding", TORCH_BOX(&rotary_embedding_op)); }

}  // namespace vllm::cpu
