// Rotary embedding of queries and keys.
#include "cpu/kernels/rope.h"

#include "cpu/parallel.h"
#include "cpu/rows/rope.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

template <typename T>
void turn_heads(const RopeHeads& heads, int64_t token, const float* cos_sin, const RopeArgs& args) {
  T* first = static_cast<T*>(heads.data) + token * heads.token_stride;
  for (int64_t head = 0; head < heads.num_heads; ++head) {
    rope_head(first + head * heads.head_stride, cos_sin, args.rot_dim, args.is_neox);
  }
}

template <typename T>
void turn_tokens(const RopeArgs& args) {
  const int64_t num_heads = args.query.num_heads + args.key.num_heads;
  parallel_for(args.tokens, args.tokens * num_heads * args.rot_dim,
               [&](int64_t begin, int64_t end) {
                 for (int64_t token = begin; token < end; ++token) {
                   const float* cos_sin = args.cos_sin + args.positions[token] * args.rot_dim;
                   turn_heads<T>(args.query, token, cos_sin, args);
                   turn_heads<T>(args.key, token, cos_sin, args);
                 }
               });
}

}  // namespace

void rotary_embedding(const RopeArgs& args) {
  if (args.element == Element::kFloat) return turn_tokens<float>(args);
  turn_tokens<bf16>(args);
}

}  // namespace VLLM_KERNEL_NAMESPACE
