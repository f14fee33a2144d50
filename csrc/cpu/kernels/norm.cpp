// RMS norm, plain and fused with the residual addition.
#include "cpu/kernels/norm.h"

#include "cpu/parallel.h"
#include "cpu/rows/norm.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

template <typename T, typename W>
void norm_rows(const RmsNormArgs& args) {
  const int64_t count = args.x_rows.count();
  parallel_for(count, count * args.n, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* out = static_cast<T*>(args.out) + args.out_rows.offset(row);
      const T* x = static_cast<const T*>(args.x) + args.x_rows.offset(row);
      if (args.residual != nullptr) {
        T* residual = static_cast<T*>(args.residual) + args.residual_rows.offset(row);
        add_row(residual, x, args.n);
        x = residual;
      }
      rms_norm_row(out, x, static_cast<const W*>(args.weight), args.n, args.epsilon);
    }
  });
}

}  // namespace

void rms_norm(const RmsNormArgs& args) {
  if (args.element == Element::kFloat) return norm_rows<float, float>(args);
  if (args.weight_element == Element::kFloat) return norm_rows<bf16, float>(args);
  norm_rows<bf16, bf16>(args);
}

}  // namespace VLLM_KERNEL_NAMESPACE
