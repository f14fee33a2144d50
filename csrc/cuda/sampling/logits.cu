// Ops: _C::apply_penalties, _C::apply_token_bitmask on CUDA, in place.
#include "core/registration.h"
#include "cuda/sampling/launch.cuh"

namespace vllm::cuda {

namespace {

constexpr int kBlockThreads = 256;
constexpr int kTokensOfThread = 4;  // so many at most, where there are few rows
constexpr int kMaxBlocksOfRow = 64;

struct PenaltyArgs {
  Logits logits;
  const int64_t *cu_tokens, *token_ids;
  const int32_t* output_counts;
  const float *repetition, *frequency, *presence;
};

struct BitmaskArgs {
  Logits logits;
  const int64_t* rows;
  const int32_t* words;
  int64_t num_words;
};

__global__ void __launch_bounds__(kBlockThreads) penalise_kernel(PenaltyArgs args) {
  const int64_t row = blockIdx.x;
  float* x = args.logits.data + row * args.logits.stride;
  const int64_t end = args.cu_tokens[row + 1];
  const int64_t step = static_cast<int64_t>(gridDim.y) * kBlockThreads;
  const float scale = args.repetition[row];
  const float frequency = args.frequency[row], presence = args.presence[row];
  for (int64_t i = args.cu_tokens[row] + blockIdx.y * kBlockThreads + threadIdx.x; i < end;
       i += step) {
    const int64_t id = args.token_ids[i];
    DEVICE_CHECK(id >= 0 && id < args.logits.n);
    const int32_t count = args.output_counts[i];
    const float logit = x[id];
    float value = logit > 0.0f ? logit / scale : logit * scale;
    value -= frequency * static_cast<float>(count);
    x[id] = count > 0 ? value - presence : value;
  }
}

__global__ void __launch_bounds__(kBlockThreads) mask_kernel(BitmaskArgs args) {
  const int64_t row = args.rows[blockIdx.x];
  DEVICE_CHECK(row >= 0 && row < args.logits.rows);
  float* x = args.logits.data + row * args.logits.stride;
  const int32_t* words = args.words + blockIdx.x * args.num_words;
  const int step = static_cast<int>(gridDim.y) * kBlockThreads;
  for (int id = blockIdx.y * kBlockThreads + threadIdx.x; id < args.logits.n; id += step) {
    const uint32_t word = id / 32 < args.num_words ? static_cast<uint32_t>(words[id / 32]) : 0;
    if ((word >> (id % 32) & 1) == 0) x[id] = kMinusInf;
  }
}

unsigned count_blocks(int64_t items) {
  const int64_t wanted = ceil_div(items, kBlockThreads * kTokensOfThread);
  return static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, kMaxBlocksOfRow));
}

void apply_penalties(const Tensor& logits, const Tensor& cu_tokens, const Tensor& token_ids,
                     const Tensor& output_counts, const Tensor& repetition, const Tensor& frequency,
                     const Tensor& presence) {
  const char* op = "apply_penalties";
  const Logits view = logits_of(op, logits);
  check_tensor(op, "token_ids", token_ids, 1);
  const int64_t count = token_ids.size(0), rows = view.rows;
  const PenaltyArgs args{
      .logits = view,
      .cu_tokens = vector_of<int64_t>(op, "cu_tokens", cu_tokens, rows + 1, logits),
      .token_ids = vector_of<int64_t>(op, "token_ids", token_ids, count, logits),
      .output_counts = vector_of<int32_t>(op, "output_counts", output_counts, count, logits),
      .repetition = vector_of<float>(op, "repetition", repetition, rows, logits),
      .frequency = vector_of<float>(op, "frequency", frequency, rows, logits),
      .presence = vector_of<float>(op, "presence", presence, rows, logits)};
  if (rows == 0 || count == 0) return;
  const LaunchScope scope(logits);
  const dim3 grid(static_cast<unsigned>(rows), count_blocks(ceil_div(count, rows)));
  penalise_kernel<<<grid, kBlockThreads, 0, scope.stream()>>>(args);
  scope.check(op);
}

void apply_token_bitmask(const Tensor& logits, const Tensor& rows, const Tensor& bitmask) {
  const char* op = "apply_token_bitmask";
  const Logits view = logits_of(op, logits);
  check_tensor(op, "rows", rows, 1);
  check_tensor(op, "bitmask", bitmask, 2);
  const int64_t num_rows = rows.size(0), num_words = bitmask.size(1);
  const BitmaskArgs args{
      .logits = view,
      .rows = vector_of<int64_t>(op, "rows", rows, num_rows, logits),
      .words = matrix_of<int32_t>(op, "bitmask", bitmask, num_rows, num_words, logits),
      .num_words = num_words};
  if (num_rows == 0) return;
  const LaunchScope scope(logits);
  const dim3 grid(static_cast<unsigned>(num_rows), count_blocks(view.n));
  mask_kernel<<<grid, kBlockThreads, 0, scope.stream()>>>(args);
  scope.check(op);
}

}  // namespace

VLLM_OPS_IMPL(_C, CUDA, m) {
  m.impl("apply_penalties", TORCH_BOX(&apply_penalties));
  m.impl("apply_token_bitmask", TORCH_BOX(&apply_token_bitmask));
}

}  // namespace vllm::cuda
