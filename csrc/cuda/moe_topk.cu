// Op: _C::topk_softmax on CUDA: one warp a token, its probabilities in registers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/cuda_check.h"
#include "core/registration.h"
#include "cuda/launch.cuh"

namespace vllm::cuda {

namespace {

constexpr int kWarpsOfBlock = 4;
constexpr int64_t kMaxExperts = 512;
constexpr int64_t kMaxChoices = 32;
constexpr float kLeastDistance = -87.0f;  // also of logits that are not numbers

struct RouteArgs {
  float* weights;
  int32_t* indices;
  const void* gating;
  int64_t tokens, stride;
  int experts, k;
  bool renormalize;
};

template <typename Op>
__device__ float reduce_warp(float value, Op op) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = op(value, __shfl_xor_sync(~0u, value, mask));
  return value;
}

// Softmax over the experts of a token; lane l holds experts l, l + 32, ... as the bits of their
// probabilities, which order like integers, -1 beyond the last.
template <typename T, int kPerLane>
__device__ void load_probabilities(const RouteArgs& args, int64_t token, int (&bits)[kPerLane]) {
  const T* gating = static_cast<const T*>(args.gating) + token * args.stride;
  const int lane = threadIdx.x % 32;
  float logits[kPerLane];
  float most = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane + 32 * i;
    logits[i] = expert < args.experts ? static_cast<float>(gating[expert]) : -INFINITY;
    most = fmaxf(most, logits[i]);
  }
  most = reduce_warp(most, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const float distance = logits[i] - most;
    logits[i] = expf(distance > kLeastDistance ? distance : kLeastDistance);
    if (lane + 32 * i < args.experts) sum += logits[i];
  }
  sum = reduce_warp(sum, [](float a, float b) { return a + b; });
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    bits[i] = lane + 32 * i < args.experts ? __float_as_int(logits[i] / sum) : -1;
  }
}

// Chooses the k largest one after the other; lane j keeps the j-th. Equal ones go by number.
template <typename T, int kPerLane>
__global__ void __launch_bounds__(kWarpsOfBlock * 32) route_kernel(RouteArgs args) {
  await_inputs();
  let_next_start();
  const int64_t token = int64_t{blockIdx.x} * kWarpsOfBlock + threadIdx.x / 32;
  if (token >= args.tokens) return;
  const int lane = threadIdx.x % 32;
  int bits[kPerLane];
  load_probabilities<T, kPerLane>(args, token, bits);
  float weight = 0.0f;
  int chosen = 0;
  for (int j = 0; j < args.k; ++j) {
    int best = -1;
    unsigned expert = lane;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (bits[i] > best) {
        best = bits[i];
        expert = lane + 32 * i;
      }
    }
    const int most = __reduce_max_sync(~0u, best);
    expert = __reduce_min_sync(~0u, best == most ? expert : ~0u);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (expert == static_cast<unsigned>(lane + 32 * i)) bits[i] = -1;
    }
    if (lane == j) {
      weight = __int_as_float(most);
      chosen = static_cast<int>(expert);
    }
  }
  if (args.renormalize) {
    weight /= reduce_warp(weight, [](float a, float b) { return a + b; });
  }
  if (lane < args.k) {
    args.weights[token * args.k + lane] = weight;
    args.indices[token * args.k + lane] = chosen;
  }
}

template <typename T>
void launch_route(const RouteArgs& args, const LaunchScope& scope) {
  const auto blocks = static_cast<unsigned>(ceil_div(args.tokens, kWarpsOfBlock));
  const auto launch = [&](auto* kernel) {
    launch_overlapping(scope, kernel, blocks, kWarpsOfBlock * 32, args);
  };
  if (args.experts <= 64) return launch(route_kernel<T, 2>);
  if (args.experts <= 128) return launch(route_kernel<T, 4>);
  if (args.experts <= 256) return launch(route_kernel<T, 8>);
  launch(route_kernel<T, 16>);
}

void topk_softmax(const Tensor& weights, const Tensor& indices, const Tensor& gating,
                  bool renormalize) {
  const char* op = "topk_softmax";
  check_tensor(op, "gating", gating, 2);
  check_float_dtype(op, "gating", gating);
  const int64_t tokens = gating.size(0), experts = gating.size(1);
  CHECK_ARG(experts >= 1 && experts <= kMaxExperts, op, ": gating has shape ", shape_text(gating),
            ", allowed on CUDA: 1 to ", kMaxExperts, " experts");
  check_tensor(op, "weights", weights, 2);
  check_contiguous(op, "weights", weights);
  check_dtype(op, "weights", weights, ScalarType::Float);
  check_same_device(op, "weights", weights, gating);
  check_size(op, "weights", weights, 0, tokens);
  const int64_t k = weights.size(1), most = experts < kMaxChoices ? experts : kMaxChoices;
  CHECK_ARG(k >= 1 && k <= most, op, ": weights has shape ", shape_text(weights),
            ", its last size must be 1 to ", most, " on CUDA");
  check_tensor(op, "indices", indices, 2);
  check_contiguous(op, "indices", indices);
  check_dtype(op, "indices", indices, ScalarType::Int);
  check_same_device(op, "indices", indices, gating);
  check_size(op, "indices", indices, 0, tokens);
  check_size(op, "indices", indices, 1, k);
  if (tokens == 0) return;
  const RouteArgs args{.weights = static_cast<float*>(weights.data_ptr()),
                       .indices = static_cast<int32_t*>(indices.data_ptr()),
                       .gating = gating.data_ptr(),
                       .tokens = tokens,
                       .stride = gating.stride(0),
                       .experts = static_cast<int>(experts),
                       .k = static_cast<int>(k),
                       .renormalize = renormalize};
  const LaunchScope scope(gating);
  switch (gating.scalar_type()) {
    case ScalarType::Float:
      launch_route<float>(args, scope);
      break;
    case ScalarType::BFloat16:
      launch_route<__nv_bfloat16>(args, scope);
      break;
    default:
      launch_route<__half>(args, scope);
  }
  scope.check(op);
}

}  // namespace

VLLM_OPS_IMPL(_C, CUDA, m) { m.impl("topk_softmax", TORCH_BOX(&topk_softmax)); }

}  // namespace vllm::cuda
