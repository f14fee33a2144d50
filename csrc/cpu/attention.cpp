// Op: _C::paged_attention.
#include "cpu/kernels/attention.h"

#include "cpu/attention_args.h"
#include "cpu/attention_plan.h"
#include "cpu/memory.h"

extern "C" int omp_get_max_threads();

namespace vllm::cpu {

namespace {

constexpr char kOp[] = "paged_attention";

KeyValueRows fresh_rows(const char* name, const Tensor& fresh, const Tensor& query,
                        const Tensor& cache) {
  check_tensor(kOp, name, fresh, 3);
  check_dtype(kOp, name, fresh, query.scalar_type());
  check_size(kOp, name, fresh, 0, query.size(0));
  check_size(kOp, name, fresh, 1, cache.size(2));
  check_size(kOp, name, fresh, 2, query.size(2));
  const int64_t item = static_cast<int64_t>(fresh.element_size());
  return KeyValueRows{.data = static_cast<char*>(fresh.data_ptr()),
                      .unit_stride = 0,
                      .token_stride = fresh.stride(0) * item,
                      .head_stride = fresh.stride(1) * item};
}

void paged_attention(const Tensor& out, const Tensor& query, const Tensor& key_cache,
                     const Tensor& value_cache, const Tensor& block_offsets,
                     const Tensor& cu_query_lens, const Tensor& seq_lens, double scale,
                     int64_t window, double soft_cap, const std::optional<Tensor>& sinks,
                     int64_t sink_tokens, int64_t chunk_tokens,
                     const std::optional<Tensor>& fresh_key,
                     const std::optional<Tensor>& fresh_value) {
  check_tensor(kOp, "query", query, 3);
  check_float_dtype(kOp, "query", query);
  check_tensor(kOp, "out", out, 3);
  check_dtype(kOp, "out", out, query.scalar_type());
  for (int64_t dim = 0; dim < 3; ++dim) check_size(kOp, "out", out, dim, query.size(dim));
  check_tensor(kOp, "key_cache", key_cache, 4);
  const int64_t num_heads = query.size(1), num_kv_heads = key_cache.size(2);
  const int64_t head_size = query.size(2);
  check_heads(kOp, num_heads, num_kv_heads, head_size);
  CHECK_ARG(window >= 0 && sink_tokens >= 0 && chunk_tokens >= 0 && soft_cap >= 0, kOp,
            ": window, soft_cap, sink_tokens and chunk_tokens must not be negative");
  CHECK_ARG(fresh_key.has_value() == fresh_value.has_value(), kOp,
            ": fresh_key and fresh_value come together");
  check_size(kOp, "value_cache", value_cache, 0, key_cache.size(0));
  check_size(kOp, "value_cache", value_cache, 1, key_cache.size(1));
  const int64_t item = static_cast<int64_t>(query.element_size());
  AttentionArgs args{
      .out = static_cast<char*>(out.data_ptr()),
      .query = static_cast<const char*>(query.data_ptr()),
      .out_token_stride = out.stride(0) * item,
      .out_head_stride = out.stride(1) * item,
      .query_token_stride = query.stride(0) * item,
      .query_head_stride = query.stride(1) * item,
      .key = cache_rows(kOp, "key_cache", key_cache, query.scalar_type(), num_kv_heads, head_size),
      .value =
          cache_rows(kOp, "value_cache", value_cache, query.scalar_type(), num_kv_heads, head_size),
      .fresh_key = {},
      .fresh_value = {},
      .batch = attention_batch(kOp, block_offsets, cu_query_lens, seq_lens, query.size(0),
                               key_cache.size(0), key_cache.size(1), fresh_key.has_value()),
      .visibility = {.window = window, .chunk = chunk_tokens, .sink_tokens = sink_tokens},
      .sinks = nullptr,
      .element = element_of(query),
      .num_heads = num_heads,
      .num_kv_heads = num_kv_heads,
      .head_size = head_size,
      .scale = static_cast<float>(scale),
      .soft_cap = static_cast<float>(soft_cap)};
  if (fresh_key.has_value()) {
    args.fresh_key = fresh_rows("fresh_key", *fresh_key, query, key_cache);
    args.fresh_value = fresh_rows("fresh_value", *fresh_value, query, key_cache);
  }
  if (sinks.has_value()) {
    check_tensor(kOp, "sinks", *sinks, 1);
    check_dtype(kOp, "sinks", *sinks, ScalarType::Float);
    check_size(kOp, "sinks", *sinks, 0, num_heads);
    args.sinks = static_cast<const float*>(sinks->data_ptr());
  }
  if (query.size(0) == 0) return;
  thread_local AttentionPlanMemory memory;
  AttentionPlan plan =
      plan_attention(memory, args.batch, num_heads, num_kv_heads, head_size, omp_get_max_threads());
  plan.partials = static_cast<float*>(
      thread_scratch(Scratch::kPartials, static_cast<size_t>(plan.partial_floats) * sizeof(float)));
  VLLM_CALL_KERNEL(attention, args, plan);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def(
      "paged_attention(Tensor! out, Tensor query, Tensor key_cache, Tensor value_cache, "
      "Tensor block_offsets, Tensor cu_query_lens, Tensor seq_lens, float scale, int window, "
      "float soft_cap, Tensor? sinks, int sink_tokens, int chunk_tokens, Tensor? fresh_key, "
      "Tensor? fresh_value) -> ()");
}

VLLM_OPS_IMPL(_C, CPU, m) { m.impl("paged_attention", TORCH_BOX(&paged_attention)); }

}  // namespace vllm::cpu
