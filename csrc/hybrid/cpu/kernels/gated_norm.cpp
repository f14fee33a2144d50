// RMS norm of groups of channels with a gate, before (Mamba-2) or after it (gated delta net).
#include <cmath>

#include "cpu/parallel.h"
#include "hybrid/cpu/kernels/state_space.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

template <typename T>
struct Group {
  const T* x;
  const T* gate;
  const T* weight;
  T* out;
};

template <typename T, bool kGateFirst>
VLLM_INLINE Vec read(const Group<T>& group, int64_t i, int64_t n) {
  const Vec x = load_n(group.x + i, n);
  if constexpr (!kGateFirst) return x;
  const Vec gate = load_n(group.gate + i, n);
  return mul(x, mul(gate, sigmoid(gate)));
}

template <typename T, bool kGateFirst>
VLLM_INLINE void norm_group(const Group<T>& group, int64_t size, float epsilon) {
  Vec sum = zero();
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = size - i < kLanes ? size - i : kLanes;
    const Vec x = read<T, kGateFirst>(group, i, n);
    sum = fma(x, x, sum);
  }
  const float mean = reduce_add(sum) / static_cast<float>(size);
  const Vec scale = set1(1.0f / std::sqrt(mean + epsilon));
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = size - i < kLanes ? size - i : kLanes;
    Vec x = round_to<T>(mul(read<T, kGateFirst>(group, i, n), scale));
    x = round_to<T>(mul(x, load_n(group.weight + i, n)));
    if constexpr (!kGateFirst) {
      const Vec gate = load_n(group.gate + i, n);
      x = mul(x, mul(gate, sigmoid(gate)));
    }
    store_n(group.out + i, x, n);
  }
}

template <typename T, bool kGateFirst>
void norm_rows(const GatedNormArgs& args) {
  const int64_t count = args.tokens * args.groups;
  parallel_for(count, count * args.group_size * 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i / args.groups, g = i % args.groups, at = g * args.group_size;
      const Group<T> group{
          .x = static_cast<const T*>(args.x) + t * args.x_stride + at,
          .gate = static_cast<const T*>(args.gate) + t * args.gate_stride + at,
          .weight = static_cast<const T*>(args.weight) + g * args.weight_stride,
          .out = static_cast<T*>(args.out) + t * args.out_stride + at,
      };
      norm_group<T, kGateFirst>(group, args.group_size, args.epsilon);
    }
  });
}

template <typename T>
void norm_order(const GatedNormArgs& args) {
  if (args.gate_first) return norm_rows<T, true>(args);
  norm_rows<T, false>(args);
}

}  // namespace

void gated_rms_norm(const GatedNormArgs& args) {
  if (args.element == Element::kFloat) return norm_order<float>(args);
  norm_order<bf16>(args);
}

}  // namespace VLLM_KERNEL_NAMESPACE
