// Op: _C::choose_experts, which exists on CUDA only: experts of routers that score by sigmoids,
// correct scores for the choice, scale weights or choose within groups, and experts that every
// token takes. One warp a token.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>

#include "core/cuda_check.h"
#include "core/registration.h"
#include "cuda/launch.cuh"

namespace vllm::cuda {

namespace {

constexpr char kOp[] = "choose_experts";
constexpr int kWarpsOfBlock = 4;
constexpr int64_t kMaxExperts = 512;
constexpr int64_t kMaxChoices = 32;
constexpr int64_t kMaxGroups = 32;
constexpr int kTaken = INT_MIN;
constexpr unsigned kAll = ~0u;

struct ChoiceArgs {
  float* weights;
  int32_t* indices;
  const void* logits;
  const float* correction;
  int64_t tokens, stride;
  int experts, k, shared, groups, chosen_groups, group_best;
  float epsilon, scale;
  bool has_shared_gate, is_sigmoid, renormalize;
};

// Integers in the order of the floats.
__device__ int order_of(float value) {
  const int bits = __float_as_int(value);
  return bits ^ ((bits >> 31) & INT_MAX);
}

template <typename Op>
__device__ float reduce_warp(float value, Op op) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = op(value, __shfl_xor_sync(kAll, value, mask));
  return value;
}

__device__ float add(float a, float b) { return a + b; }

// Lane l holds experts l, l + 32, ...
template <typename T, int kPerLane>
__device__ void load_scores(const ChoiceArgs& args, int64_t token, float (&scores)[kPerLane]) {
  const T* logits = static_cast<const T*>(args.logits) + token * args.stride;
  const int lane = threadIdx.x % 32;
  float most = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane + 32 * i;
    scores[i] = expert < args.experts ? static_cast<float>(logits[expert]) : -INFINITY;
    most = fmaxf(most, scores[i]);
  }
  if (args.is_sigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
    return;
  }
  most = reduce_warp(most, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    scores[i] = expf(scores[i] - most);  // 0 beyond the last
    sum += scores[i];
  }
  sum = reduce_warp(sum, add);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) scores[i] /= sum;
}

// Closes all groups but the best ones; lane g ranks group g by the sum of its best experts.
template <int kPerLane>
__device__ void close_groups(const ChoiceArgs& args, const float* ranks, int (&keys)[kPerLane]) {
  const int lane = threadIdx.x % 32;
  const int size = args.experts / args.groups;
  float best = -INFINITY, second = -INFINITY;
  if (lane < args.groups) {
    for (int i = 0; i < size; ++i) {
      const float rank = ranks[lane * size + i];
      second = fmaxf(second, fminf(best, rank));
      best = fmaxf(best, rank);
    }
  }
  const int own = order_of(args.group_best == 2 ? best + second : best);
  int num_better = 0;
  for (int group = 0; group < args.groups; ++group) {
    const int other = __shfl_sync(kAll, own, group);
    num_better += other > own || (other == own && group < lane);
  }
  const unsigned open = __ballot_sync(kAll, lane < args.groups && num_better < args.chosen_groups);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane + 32 * i;
    if (expert < args.experts && !(open >> (expert / size) & 1)) keys[i] = kTaken;
  }
}

// The sigmoid of a shared expert's own logit, rounded to T.
template <typename T>
__device__ float gate_of(const ChoiceArgs& args, int64_t token, int column) {
  const T* logits = static_cast<const T*>(args.logits) + token * args.stride;
  const float gate = 1.0f / (1.0f + expf(-static_cast<float>(logits[column])));
  return static_cast<float>(static_cast<T>(gate));
}

// Chooses the k largest one after the other; lane j keeps the j-th. Equal ones go by number.
template <typename T, int kPerLane>
__global__ void __launch_bounds__(kWarpsOfBlock * 32) choose_kernel(const ChoiceArgs args) {
  __shared__ float share[kWarpsOfBlock][32 * kPerLane];
  const int lane = threadIdx.x % 32;
  const int64_t token = int64_t{blockIdx.x} * kWarpsOfBlock + threadIdx.x / 32;
  await_inputs();
  let_next_start();
  if (token >= args.tokens) return;
  float scores[kPerLane];
  int keys[kPerLane];
  load_scores<T, kPerLane>(args, token, scores);
  float* ranks = share[threadIdx.x / 32];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane + 32 * i;
    const bool is_in = expert < args.experts;
    float rank = scores[i];
    if (is_in && args.correction != nullptr) rank += args.correction[expert];
    keys[i] = is_in ? order_of(rank) : kTaken;
    ranks[expert] = rank;
  }
  __syncwarp();
  if (args.chosen_groups < args.groups) close_groups<kPerLane>(args, ranks, keys);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) ranks[lane + 32 * i] = scores[i];
  __syncwarp();
  float weight = 0.0f;
  int chosen = 0;
  for (int j = 0; j < args.k; ++j) {
    int best = keys[0];
    unsigned expert = lane;
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) {
      if (keys[i] > best) {
        best = keys[i];
        expert = lane + 32 * i;
      }
    }
    const int most = __reduce_max_sync(kAll, best);
    expert = __reduce_min_sync(kAll, best == most ? expert : kAll);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (expert == static_cast<unsigned>(lane + 32 * i)) keys[i] = kTaken;
    }
    if (lane == j) {
      chosen = static_cast<int>(expert);
      weight = ranks[expert];
    }
  }
  if (args.renormalize) weight /= reduce_warp(weight, add) + args.epsilon;
  weight *= args.scale;
  const int all = args.k + args.shared;
  if (lane >= args.k && lane < all) {
    chosen = args.experts + lane - args.k;
    weight = args.has_shared_gate ? gate_of<T>(args, token, chosen) : 1.0f;
  }
  if (lane < all) {
    args.weights[token * all + lane] = weight;
    args.indices[token * all + lane] = chosen;
  }
}

template <typename T>
void launch_choice(const ChoiceArgs& args, const LaunchScope& scope) {
  const auto blocks = static_cast<unsigned>(ceil_div(args.tokens, kWarpsOfBlock));
  const auto launch = [&](auto* kernel) {
    launch_overlapping(scope, kernel, blocks, kWarpsOfBlock * 32, args);
  };
  if (args.experts <= 64) return launch(choose_kernel<T, 2>);
  if (args.experts <= 128) return launch(choose_kernel<T, 4>);
  if (args.experts <= 256) return launch(choose_kernel<T, 8>);
  launch(choose_kernel<T, 16>);
}

void check_outputs(const Tensor& weights, const Tensor& indices, const Tensor& logits, int64_t most,
                   int64_t num_shared) {
  check_tensor(kOp, "weights", weights, 2);
  check_contiguous(kOp, "weights", weights);
  check_dtype(kOp, "weights", weights, ScalarType::Float);
  check_same_device(kOp, "weights", weights, logits);
  check_size(kOp, "weights", weights, 0, logits.size(0));
  const int64_t columns = weights.size(1);
  most = most + num_shared < kMaxChoices ? most + num_shared : kMaxChoices;
  CHECK_ARG(num_shared >= 0 && columns > num_shared && columns <= most, kOp, ": weights has shape ",
            shape_text(weights), ", its last size must be ", num_shared + 1, " to ", most, " here");
  check_tensor(kOp, "indices", indices, 2);
  check_contiguous(kOp, "indices", indices);
  check_dtype(kOp, "indices", indices, ScalarType::Int);
  check_same_device(kOp, "indices", indices, logits);
  check_size(kOp, "indices", indices, 0, logits.size(0));
  check_size(kOp, "indices", indices, 1, columns);
}

void check_logits(const Tensor& logits, const std::optional<Tensor>& correction, int64_t experts,
                  int64_t num_groups, int64_t num_chosen_groups, int64_t num_gates) {
  check_tensor(kOp, "logits", logits, 2);
  check_float_dtype(kOp, "logits", logits);
  CHECK_ARG(experts >= 1 && experts <= kMaxExperts, kOp, ": num_experts is ", experts,
            ", allowed: 1 to ", kMaxExperts);
  CHECK_ARG(logits.size(1) >= experts + num_gates, kOp, ": logits has shape ", shape_text(logits),
            ", expected at least ", experts + num_gates, " columns");
  CHECK_ARG(num_groups >= 1 && num_groups <= kMaxGroups && experts % num_groups == 0, kOp,
            ": num_groups is ", num_groups, ", allowed: up to ", kMaxGroups,
            ", a divisor of the number of experts");
  CHECK_ARG(num_chosen_groups >= 1 && num_chosen_groups <= num_groups, kOp,
            ": num_chosen_groups is ", num_chosen_groups, ", allowed: 1 to num_groups");
  if (correction) {
    check_tensor(kOp, "correction", *correction, 1);
    check_dtype(kOp, "correction", *correction, ScalarType::Float);
    check_same_device(kOp, "correction", *correction, logits);
    check_size(kOp, "correction", *correction, 0, experts);
  }
}

void choose_experts(const Tensor& weights, const Tensor& indices, const Tensor& logits,
                    const std::optional<Tensor>& correction, int64_t num_experts,
                    int64_t num_groups, int64_t num_chosen_groups, int64_t num_shared,
                    bool has_shared_gate, bool is_sigmoid, bool renormalize, double epsilon,
                    double scale) {
  check_logits(logits, correction, num_experts, num_groups, num_chosen_groups,
               has_shared_gate ? num_shared : 0);
  check_outputs(weights, indices, logits, num_experts / num_groups * num_chosen_groups, num_shared);
  if (logits.size(0) == 0) return;
  const ChoiceArgs args{
      .weights = static_cast<float*>(weights.data_ptr()),
      .indices = static_cast<int32_t*>(indices.data_ptr()),
      .logits = logits.data_ptr(),
      .correction = correction ? static_cast<const float*>(correction->data_ptr()) : nullptr,
      .tokens = logits.size(0),
      .stride = logits.stride(0),
      .experts = static_cast<int>(num_experts),
      .k = static_cast<int>(weights.size(1) - num_shared),
      .shared = static_cast<int>(num_shared),
      .groups = static_cast<int>(num_groups),
      .chosen_groups = static_cast<int>(num_chosen_groups),
      .group_best = is_sigmoid ? 2 : 1,
      .epsilon = static_cast<float>(epsilon),
      .scale = static_cast<float>(scale),
      .has_shared_gate = has_shared_gate,
      .is_sigmoid = is_sigmoid,
      .renormalize = renormalize};
  const LaunchScope scope(logits);
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      launch_choice<float>(args, scope);
      break;
    case ScalarType::BFloat16:
      launch_choice<__nv_bfloat16>(args, scope);
      break;
    default:
      launch_choice<__half>(args, scope);
  }
  scope.check(kOp);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def(
      "choose_experts(Tensor! weights, Tensor! indices, Tensor logits, Tensor? correction, "
      "int num_experts, int num_groups, int num_chosen_groups, int num_shared, "
      "bool has_shared_gate, bool is_sigmoid, bool renormalize, float epsilon, float scale) -> ()");
}

VLLM_OPS_IMPL(_C, CUDA, m) { m.impl("choose_experts", TORCH_BOX(&choose_experts)); }

}  // namespace vllm::cuda
