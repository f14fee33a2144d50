// Routing to experts, and their MLPs over pairs of (token, expert) grouped by expert.
#include "cpu/kernels/moe.h"

#include "cpu/gemm_share.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/rows/activation.h"
#include "cpu/rows/expert_activation.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

// The k largest of `probabilities`, largest first, equal ones by number; takes them out.
void take_first_k(float* probabilities, int64_t experts, int64_t k, float* weights,
                  int32_t* indices) {
  for (int64_t j = 0; j < k; ++j) {
    int64_t best = 0;
    for (int64_t e = 1; e < experts; ++e) {
      if (probabilities[e] > probabilities[best]) best = e;
    }
    weights[j] = probabilities[best];
    indices[j] = static_cast<int32_t>(best);
    probabilities[best] = -1.0f;
  }
}

// Logits that are not numbers count as the lowest, so that a token always gets k experts.
template <typename T>
void route_token(const TopkSoftmaxArgs& args, int64_t token, float* probabilities) {
  const T* gating = static_cast<const T*>(args.gating) + token * args.stride;
  float most = -__builtin_inff();
  for (int64_t e = 0; e < args.experts; ++e) {
    const float logit = to_float(gating[e]);
    if (logit > most) most = logit;
  }
  for (int64_t e = 0; e < args.experts; ++e) {
    const float distance = to_float(gating[e]) - most;
    probabilities[e] = distance > -87.0f ? distance : -87.0f;
  }
  float sum = 0.0f;
  for (int64_t e = 0; e < args.experts; e += kLanes) {
    const int64_t rest = args.experts - e < kLanes ? args.experts - e : kLanes;
    store_n(probabilities + e, exp(load_n(probabilities + e, rest)), rest);
  }
  for (int64_t e = 0; e < args.experts; ++e) sum += probabilities[e];
  for (int64_t e = 0; e < args.experts; ++e) probabilities[e] /= sum;
  float* weights = args.weights + token * args.k;
  take_first_k(probabilities, args.experts, args.k, weights, args.indices + token * args.k);
  if (!args.renormalize) return;
  float chosen = 0.0f;
  for (int64_t j = 0; j < args.k; ++j) chosen += weights[j];
  for (int64_t j = 0; j < args.k; ++j) weights[j] /= chosen;
}

template <typename T>
void route_tokens(const TopkSoftmaxArgs& args) {
  const int64_t cost = args.tokens * args.experts * (8 + args.k);
  parallel_for(args.tokens, cost, [&](int64_t begin, int64_t end) {
    float* probabilities = static_cast<float*>(
        thread_scratch(Scratch::kExperts, static_cast<size_t>(args.experts) * sizeof(float)));
    for (int64_t token = begin; token < end; ++token) {
      route_token<T>(args, token, probabilities);
    }
  });
}

// Rows of the steps between input and output, one for each pair. Strides keep neighbouring rows out
// of one set of the cache.
template <typename T>
struct Buffers {
  static constexpr int64_t kGap = 64 / static_cast<int64_t>(sizeof(T));

  int64_t hidden_stride, first_stride, inner_stride;
  T *x, *first, *inner, *y;

  explicit Buffers(const ExpertsArgs& args)
      : hidden_stride(padded(args.hidden)),
        first_stride(padded(args.experts.first_size)),
        inner_stride(padded(args.experts.inner)) {
    const int64_t pairs = args.tokens * args.k;
    const int64_t elements = pairs * (2 * hidden_stride + first_stride + inner_stride);
    x = static_cast<T*>(
        thread_scratch(Scratch::kExperts, static_cast<size_t>(elements) * sizeof(T)));
    first = x + pairs * hidden_stride;
    inner = first + pairs * first_stride;
    y = inner + pairs * inner_stride;
  }
  static int64_t padded(int64_t n) { return (n + kGap - 1) / kGap * kGap + kGap; }
};

// This thread's share of out = x · W^T + bias for all experts. Blocks of all experts lie on one
// line whose unit is the cost of a block, and each thread takes an equal part of it.
template <typename T>
void multiply_experts(const ExpertsArgs& args, T* out, int64_t out_stride, const T* x,
                      int64_t x_stride, const void* stack, const void* biases, int64_t n, int64_t k,
                      int64_t thread, int64_t threads) {
  const T* packed = static_cast<const T*>(stack);
  const int64_t blocks = num_blocks(n), block_size = block_elements<T>(k);
  const auto rows_of = [&](int64_t e) {
    return args.pair_ends[e] - (e == 0 ? 0 : args.pair_ends[e - 1]);
  };
  const auto cost_of = [&](int64_t e) {
    return rows_of(e) == 0 ? 0 : rows_of(e) + kMaxTileRows;  // of one block
  };
  int64_t total = 0;
  for (int64_t e = 0; e < args.experts.count; ++e) total += blocks * cost_of(e);
  const int64_t begin = total * thread / threads, end = total * (thread + 1) / threads;
  int64_t base = 0;
  for (int64_t e = 0; e < args.experts.count && base < end; ++e) {
    const int64_t cost = cost_of(e), rows = rows_of(e);
    if (rows == 0) continue;
    const auto first_block_from = [&](int64_t place) {
      const int64_t block = place <= base ? 0 : (place - base + cost - 1) / cost;
      return block < blocks ? block : blocks;
    };
    const int64_t first = first_block_from(begin), last = first_block_from(end);
    const int64_t first_row = args.pair_ends[e] - rows;
    const T* bias = biases == nullptr ? nullptr : static_cast<const T*>(biases) + e * n;
    for (int64_t row = 0; row < rows; row += kRowsOfCache) {
      const int64_t height = rows - row < kRowsOfCache ? rows - row : kRowsOfCache;
      for (int64_t block = first; block < last; ++block) {
        const T* w = packed + (e * blocks + block) * block_size;
        multiply_block(x + (first_row + row) * x_stride, x_stride, height, w, k,
                       block + 1 < last ? w + block_size : nullptr,
                       ColumnStore<T, T>{out + (first_row + row) * out_stride, out_stride, n, bias,
                                         block * kBlockCols});
      }
    }
    base += blocks * cost;
  }
}

template <typename T>
void activate_row(const Experts& experts, T* out, const T* x) {
  const int64_t n = experts.inner;
  switch (experts.activation) {
    case ExpertActivation::kSilu:
      return act_and_mul_row<Silu>(out, x, x + n, n);
    case ExpertActivation::kGelu:
      return act_and_mul_row<Gelu>(out, x, x + n, n);
    case ExpertActivation::kGeluTanh:
      return act_and_mul_row<GeluTanh>(out, x, x + n, n);
    case ExpertActivation::kClamped:
      return clamped_gate_row(out, x, n, experts.alpha, experts.limit);
    case ExpertActivation::kRelu2:
      return act_row<Relu2>(out, x, n);
  }
}

// out = sum over the token's experts, in the order of its top-k, of weight * y.
template <typename T>
void combine_token(const ExpertsArgs& args, int64_t token, const Buffers<T>& buffers) {
  T* out = static_cast<T*>(args.out) + token * args.out_stride;
  const float* weights = args.weights + token * args.k;
  const int32_t* pairs = args.pair_of + token * args.k;
  for (int64_t i = 0; i < args.hidden; i += kLanes) {
    const int64_t rest = args.hidden - i < kLanes ? args.hidden - i : kLanes;
    Vec sum = zero();
    for (int64_t j = 0; j < args.k; ++j) {
      const T* y = buffers.y + pairs[j] * buffers.hidden_stride + i;
      sum = fma(set1(weights[j]), load_n(y, rest), sum);
    }
    store_n(out + i, sum, rest);
  }
}

template <typename T>
void run_experts(const ExpertsArgs& args) {
  const int64_t pairs = args.tokens * args.k;
  const Buffers<T> b(args);
  const Experts& experts = args.experts;
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t first_pair = pairs * thread / threads;
    const int64_t last_pair = pairs * (thread + 1) / threads;
    for (int64_t p = first_pair; p < last_pair; ++p) {
      std::memcpy(b.x + p * b.hidden_stride,
                  static_cast<const T*>(args.x) + args.token_of[p] * args.x_stride,
                  static_cast<size_t>(args.hidden) * sizeof(T));
    }
#pragma omp barrier
    multiply_experts(args, b.first, b.first_stride, b.x, b.hidden_stride, experts.first,
                     experts.first_bias, experts.first_size, args.hidden, thread, threads);
#pragma omp barrier
    for (int64_t p = first_pair; p < last_pair; ++p) {
      activate_row(experts, b.inner + p * b.inner_stride, b.first + p * b.first_stride);
    }
#pragma omp barrier
    multiply_experts(args, b.y, b.hidden_stride, b.inner, b.inner_stride, experts.second,
                     experts.second_bias, args.hidden, experts.inner, thread, threads);
#pragma omp barrier
    for (int64_t t = args.tokens * thread / threads; t < args.tokens * (thread + 1) / threads;
         ++t) {
      combine_token(args, t, b);
    }
  }
}

}  // namespace

void topk_softmax(const TopkSoftmaxArgs& args) {
  if (args.element == Element::kFloat) return route_tokens<float>(args);
  route_tokens<bf16>(args);
}

void fused_experts(const ExpertsArgs& args) {
  if (args.element == Element::kFloat) return run_experts<float>(args);
  run_experts<bf16>(args);
}

}  // namespace VLLM_KERNEL_NAMESPACE
