// Activations, alone and multiplied with a second half.
#include "cpu/kernels/activation.h"

#include "cpu/parallel.h"
#include "cpu/rows/activation.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

// An exponential costs about this many additions.
constexpr int64_t kElementCost = 8;

template <typename T, typename Act, bool kGated>
void run_rows(const ActivationArgs& args) {
  const int64_t count = args.x_rows.count();
  parallel_for(count, count * args.n * kElementCost, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* out = static_cast<T*>(args.out) + args.out_rows.offset(row);
      const T* x = static_cast<const T*>(args.x) + args.x_rows.offset(row);
      if constexpr (kGated) {
        act_and_mul_row<Act>(out, x, x + args.n, args.n);
      } else {
        act_row<Act>(out, x, args.n);
      }
    }
  });
}

template <typename T, bool kGated>
void run_activation(const ActivationArgs& args) {
  switch (args.activation) {
    case Activation::kSilu:
      return run_rows<T, Silu, kGated>(args);
    case Activation::kGelu:
      return run_rows<T, Gelu, kGated>(args);
    case Activation::kGeluTanh:
      return run_rows<T, GeluTanh, kGated>(args);
    case Activation::kGeluQuick:
      return run_rows<T, GeluQuick, kGated>(args);
  }
}

}  // namespace

void act_and_mul(const ActivationArgs& args) {
  if (args.element == Element::kFloat) return run_activation<float, true>(args);
  run_activation<bf16, true>(args);
}

void act(const ActivationArgs& args) {
  if (args.element == Element::kFloat) return run_activation<float, false>(args);
  run_activation<bf16, false>(args);
}

}  // namespace VLLM_KERNEL_NAMESPACE
