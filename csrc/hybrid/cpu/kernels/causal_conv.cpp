// Causal convolution of every channel with its own filter, and its state of past inputs.
#include "cpu/parallel.h"
#include "hybrid/cpu/kernels/state_space.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

// One vector of channels through all tokens of a row. `n` channels are real.
template <typename T, int kTaps>
VLLM_INLINE void convolve(const CausalConvArgs& args, int64_t row, int64_t channel, int64_t n) {
  const T* weight = static_cast<const T*>(args.weight) + channel;
  const T* x = static_cast<const T*>(args.x) + channel;
  T* out = static_cast<T*>(args.out) + channel;
  T* state = static_cast<T*>(args.state) + args.rows.place(row) + channel;
  Vec taps[kTaps], past[kTaps];
#pragma GCC unroll 8
  for (int j = 0; j < kTaps; ++j) taps[j] = load_n(weight + j * args.weight_stride, n);
  const Vec bias =
      args.bias == nullptr ? zero() : load_n(static_cast<const T*>(args.bias) + channel, n);
  const bool is_new = args.rows.is_new(row);
#pragma GCC unroll 8
  for (int j = 0; j + 1 < kTaps; ++j) {
    past[j] = is_new ? zero() : load_n(state + j * args.state_stride, n);
  }
  for (int64_t t = args.rows.begin(row); t < args.rows.end(row); ++t) {
    past[kTaps - 1] = load_n(x + t * args.x_stride, n);
    Vec sum = mul(past[0], taps[0]);
#pragma GCC unroll 8
    for (int j = 1; j < kTaps; ++j) sum = fma(past[j], taps[j], sum);
    sum = round_to<T>(add(sum, bias));
    if (args.silu) sum = mul(sum, sigmoid(sum));
    store_n(out + t * args.out_stride, sum, n);
#pragma GCC unroll 8
    for (int j = 0; j + 1 < kTaps; ++j) past[j] = past[j + 1];
  }
#pragma GCC unroll 8
  for (int j = 0; j + 1 < kTaps; ++j) store_n(state + j * args.state_stride, past[j], n);
}

template <typename T, int kTaps>
void convolve_rows(const CausalConvArgs& args) {
  const int64_t vecs = (args.channels + kLanes - 1) / kLanes;
  const int64_t cost = (args.rows.tokens + args.rows.count) * args.channels * kTaps;
  // Channels outside, rows inside: a long row is shared by all threads.
  parallel_for(vecs * args.rows.count, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i % args.rows.count, channel = i / args.rows.count * kLanes;
      if (args.rows.begin(row) == args.rows.end(row)) continue;
      const int64_t rest = args.channels - channel;
      if (rest >= kLanes) {
        convolve<T, kTaps>(args, row, channel, kLanes);
      } else {
        convolve<T, kTaps>(args, row, channel, rest);
      }
    }
  });
}

template <typename T>
void convolve_taps(const CausalConvArgs& args) {
#define VLLM_TAPS(K) \
  case K:            \
    return convolve_rows<T, K>(args)
  switch (args.taps) {
    VLLM_TAPS(2);
    VLLM_TAPS(3);
    VLLM_TAPS(4);
    VLLM_TAPS(5);
    VLLM_TAPS(6);
    VLLM_TAPS(7);
    VLLM_TAPS(8);
  }
#undef VLLM_TAPS
}

}  // namespace

void causal_conv(const CausalConvArgs& args) {
  if (args.element == Element::kFloat) return convolve_taps<float>(args);
  convolve_taps<bf16>(args);
}

}  // namespace VLLM_KERNEL_NAMESPACE
