// The threads of one parallel region and the barrier between its phases; included by kernels only.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <cstdint>

#include "cpu/vec.h"

namespace VLLM_KERNEL_NAMESPACE {

// Lies in memory that all threads of a region see; zero at the start.
struct Barrier {
  alignas(64) int32_t arrived;
  alignas(64) int32_t round;
};

// One thread's place among the threads of a region.
struct Team {
  Barrier* barrier;
  int64_t rank, size;

  // Waits until all threads are here. Spins for some 20 us, which covers the usual difference, then
  // lets other processes run: a processor may be shared with the API process.
  VLLM_INLINE void wait() const {
    constexpr int kSpins = 1000;
    if (size == 1) return;
    const int32_t round = __atomic_load_n(&barrier->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == size) {
      __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&barrier->round, round + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int spin = 0; __atomic_load_n(&barrier->round, __ATOMIC_ACQUIRE) == round; ++spin) {
      if (spin < kSpins) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

  // First item of this thread's equal share of `count`; the share ends where the next one begins.
  VLLM_INLINE int64_t begin(int64_t count) const { return count * rank / size; }
  VLLM_INLINE int64_t end(int64_t count) const { return count * (rank + 1) / size; }
};

}  // namespace VLLM_KERNEL_NAMESPACE
