// Loops over independent items on torch's OpenMP threads; included by kernels only.
//
// What an item computes must not depend on which thread runs it or on how many there are.
#pragma once

#include <omp.h>

#include <cstdint>

#include "cpu/vec.h"

namespace VLLM_KERNEL_NAMESPACE {

// fn(begin, end) over equal contiguous shares of [0, count); inline where the work is small.
// `cost` is a rough number of elementary operations (or bytes) of all items together.
template <typename Fn>
VLLM_INLINE void parallel_for(int64_t count, int64_t cost, const Fn& fn) {
  constexpr int64_t kWorthAThread = 32 * 1024;
  int64_t threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  if (threads > cost / kWorthAThread + 1) threads = cost / kWorthAThread + 1;
  if (threads > count) threads = count;
  if (threads <= 1) {
    fn(int64_t{0}, count);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    const int64_t n = omp_get_num_threads();
    const int64_t i = omp_get_thread_num();
    fn(count * i / n, count * (i + 1) / n);
  }
}

}  // namespace VLLM_KERNEL_NAMESPACE
