// Ops: _C::argmax, sample, filter_logits, apply_penalties, apply_token_bitmask, topk_logprobs.
#include "cpu/kernels/sampling.h"

#include <type_traits>

#include "cpu/op.h"

namespace vllm::cpu {

namespace {

Logits logits_of(const char* op, const Tensor& t) {
  check_tensor(op, "logits", t, 2);
  check_dtype(op, "logits", t, ScalarType::Float);
  CHECK_ARG(t.size(1) > 0 && t.size(1) < (int64_t{1} << 31), op, ": logits has shape ",
            shape_text(t), ", the vocabulary must have 1 to 2^31 - 1 tokens");
  return Logits{.data = static_cast<float*>(t.data_ptr()),
                .rows = t.size(0),
                .n = t.size(1),
                .stride = t.stride(0)};
}

template <typename T>
T* vector_of(const char* op, const char* name, const Tensor& t, int64_t size) {
  check_tensor(op, name, t, 1);
  if constexpr (sizeof(T) == 8) {
    check_dtype(op, name, t, ScalarType::Long);
  } else if constexpr (std::is_integral_v<T>) {
    check_dtype(op, name, t, ScalarType::Int);
  } else {
    check_dtype(op, name, t, ScalarType::Float);
  }
  check_size(op, name, t, 0, size);
  return static_cast<T*>(t.data_ptr());
}

template <typename T>
T* matrix_of(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t columns) {
  check_tensor(op, name, t, 2);
  check_contiguous(op, name, t);
  check_dtype(op, name, t,
              sizeof(T) == 8          ? ScalarType::Long
              : std::is_integral_v<T> ? ScalarType::Int
                                      : ScalarType::Float);
  check_size(op, name, t, 0, rows);
  check_size(op, name, t, 1, columns);
  return static_cast<T*>(t.data_ptr());
}

void check_ids(const char* op, const char* name, const int64_t* ids, int64_t count, int64_t size) {
  for (int64_t i = 0; i < count; ++i) {
    CHECK_ARG(ids[i] >= 0 && ids[i] < size, op, ": ", name, "[", i, "] is ", ids[i],
              ", allowed: 0 to ", size - 1);
  }
}

FilterArgs filters_of(const char* op, int64_t rows, const Tensor& temperature, const Tensor& top_p,
                      const Tensor& top_k, const Tensor& min_p) {
  return FilterArgs{.temperature = vector_of<float>(op, "temperature", temperature, rows),
                    .top_p = vector_of<float>(op, "top_p", top_p, rows),
                    .top_k = vector_of<int32_t>(op, "top_k", top_k, rows),
                    .min_p = vector_of<float>(op, "min_p", min_p, rows)};
}

void argmax_op(const Tensor& out_ids, const Tensor& logits) {
  const Logits view = logits_of("argmax", logits);
  int64_t* ids = vector_of<int64_t>("argmax", "out_ids", out_ids, view.rows);
  VLLM_CALL_KERNEL(argmax, ids, view);
}

void sample_op(const Tensor& out_ids, const Tensor& logits, const Tensor& temperature,
               const Tensor& top_p, const Tensor& top_k, const Tensor& min_p, const Tensor& seeds,
               const Tensor& offsets) {
  const char* op = "sample";
  const Logits view = logits_of(op, logits);
  const SampleArgs args{.out_ids = vector_of<int64_t>(op, "out_ids", out_ids, view.rows),
                        .logits = view,
                        .filters = filters_of(op, view.rows, temperature, top_p, top_k, min_p),
                        .seeds = vector_of<int64_t>(op, "seeds", seeds, view.rows),
                        .offsets = vector_of<int64_t>(op, "offsets", offsets, view.rows)};
  VLLM_CALL_KERNEL(sample, args);
}

void filter_logits_op(const Tensor& logits, const Tensor& temperature, const Tensor& top_p,
                      const Tensor& top_k, const Tensor& min_p) {
  const Logits view = logits_of("filter_logits", logits);
  const FilterArgs filters =
      filters_of("filter_logits", view.rows, temperature, top_p, top_k, min_p);
  VLLM_CALL_KERNEL(filter_logits, view, filters);
}

void apply_penalties_op(const Tensor& logits, const Tensor& cu_tokens, const Tensor& token_ids,
                        const Tensor& output_counts, const Tensor& repetition,
                        const Tensor& frequency, const Tensor& presence) {
  const char* op = "apply_penalties";
  const Logits view = logits_of(op, logits);
  check_tensor(op, "token_ids", token_ids, 1);
  const int64_t count = token_ids.size(0);
  const PenaltyArgs args{
      .logits = view,
      .cu_tokens = vector_of<int64_t>(op, "cu_tokens", cu_tokens, view.rows + 1),
      .token_ids = vector_of<int64_t>(op, "token_ids", token_ids, count),
      .output_counts = vector_of<int32_t>(op, "output_counts", output_counts, count),
      .repetition = vector_of<float>(op, "repetition", repetition, view.rows),
      .frequency = vector_of<float>(op, "frequency", frequency, view.rows),
      .presence = vector_of<float>(op, "presence", presence, view.rows)};
  check_ids(op, "token_ids", args.token_ids, count, view.n);
  for (int64_t row = 0; row < view.rows; ++row) {
    CHECK_ARG(0 <= args.cu_tokens[row] && args.cu_tokens[row] <= args.cu_tokens[row + 1] &&
                  args.cu_tokens[row + 1] <= count,
              op, ": cu_tokens must rise from 0 to at most ", count, ", row ", row, " has ",
              args.cu_tokens[row], " and ", args.cu_tokens[row + 1]);
  }
  VLLM_CALL_KERNEL(apply_penalties, args);
}

void apply_token_bitmask_op(const Tensor& logits, const Tensor& rows, const Tensor& bitmask) {
  const char* op = "apply_token_bitmask";
  const Logits view = logits_of(op, logits);
  check_tensor(op, "rows", rows, 1);
  check_tensor(op, "bitmask", bitmask, 2);
  const int64_t num_rows = rows.size(0), num_words = bitmask.size(1);
  const BitmaskArgs args{.logits = view,
                         .rows = vector_of<int64_t>(op, "rows", rows, num_rows),
                         .words = matrix_of<int32_t>(op, "bitmask", bitmask, num_rows, num_words),
                         .num_rows = num_rows,
                         .num_words = num_words};
  check_ids(op, "rows", args.rows, num_rows, view.rows);
  VLLM_CALL_KERNEL(apply_token_bitmask, args);
}

void topk_logprobs_op(const Tensor& out_logprobs, const Tensor& out_ids, const Tensor& out_ranks,
                      const Tensor& logits, const Tensor& chosen_ids) {
  const char* op = "topk_logprobs";
  const Logits view = logits_of(op, logits);
  check_tensor(op, "out_ids", out_ids, 2);
  const int64_t width = out_ids.size(1);
  CHECK_ARG(width >= 1 && width <= view.n + 1, op, ": out_ids has shape ", shape_text(out_ids),
            ", its last size must be 1 to ", view.n + 1);
  const LogprobArgs args{
      .out_logprobs = matrix_of<float>(op, "out_logprobs", out_logprobs, view.rows, width),
      .out_ids = matrix_of<int64_t>(op, "out_ids", out_ids, view.rows, width),
      .out_ranks = vector_of<int64_t>(op, "out_ranks", out_ranks, view.rows),
      .logits = view,
      .chosen_ids = vector_of<int64_t>(op, "chosen_ids", chosen_ids, view.rows),
      .k = width - 1};
  check_ids(op, "chosen_ids", args.chosen_ids, view.rows, view.n);
  VLLM_CALL_KERNEL(topk_logprobs, args);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def("argmax(Tensor! out_ids, Tensor logits) -> ()");
  m.def(
      "sample(Tensor! out_ids, Tensor logits, Tensor temperature, Tensor top_p, Tensor top_k, "
      "Tensor min_p, Tensor seeds, Tensor offsets) -> ()");
  m.def(
      "filter_logits(Tensor! logits, Tensor temperature, Tensor top_p, Tensor top_k, "
      "Tensor min_p) -> ()");
  m.def(
      "apply_penalties(Tensor! logits, Tensor cu_tokens, Tensor token_ids, Tensor output_counts, "
      "Tensor repetition, Tensor frequency, Tensor presence) -> ()");
  m.def("apply_token_bitmask(Tensor! logits, Tensor rows, Tensor bitmask) -> ()");
  m.def(
      "topk_logprobs(Tensor! out_logprobs, Tensor! out_ids, Tensor! out_ranks, Tensor logits, "
      "Tensor chosen_ids) -> ()");
}

VLLM_OPS_IMPL(_C, CPU, m) {
  m.impl("argmax", TORCH_BOX(&argmax_op));
  m.impl("sample", TORCH_BOX(&sample_op));
  m.impl("filter_logits", TORCH_BOX(&filter_logits_op));
  m.impl("apply_penalties", TORCH_BOX(&apply_penalties_op));
  m.impl("apply_token_bitmask", TORCH_BOX(&apply_token_bitmask_op));
  m.impl("topk_logprobs", TORCH_BOX(&topk_logprobs_op));
}

}  // namespace vllm::cpu
