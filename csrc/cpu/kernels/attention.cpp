// Paged attention, one kernel for prefill and decode.
#include "cpu/kernels/attention.h"

#include "cpu/attention_units.h"
#include "cpu/parallel.h"

namespace VLLM_KERNEL_NAMESPACE {

void attention(const AttentionArgs& args, const AttentionPlan& plan) {
  const int64_t threads =
      plan.num_units < omp_get_max_threads() ? plan.num_units : omp_get_max_threads();
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    const auto nothing = [](const AttentionUnit&) {};
    if (args.element == Element::kFloat) {
      run_units<float>(args, plan, nothing);
    } else {
      run_units<bf16>(args, plan, nothing);
    }
  }
}

}  // namespace VLLM_KERNEL_NAMESPACE
