// Blocks of a cluster (compute capability 9.0 on), which run at once and write to each other's
// shared memory. Elsewhere a cluster is one block.
#pragma once

#include <cstdint>

namespace vllm::cuda {

// Every thread of the cluster arrives, then waits; what was written before is there after it.
__device__ __forceinline__ void arrive_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void await_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Stores to the place that `place` of this block's shared memory is in block `rank` of the cluster,
// which must have begun: its threads have arrived once.
__device__ __forceinline__ void store_to_block(float* place, int rank, float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .u32 there;\n"
      " mapa.shared::cluster.u32 there, %0, %1;\n"
      " st.shared::cluster.f32 [there], %2;\n}\n" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(place))),
      "r"(rank), "f"(x)
      : "memory");
#else
  *place = x;
#endif
}

}  // namespace vllm::cuda
