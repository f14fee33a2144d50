// Launches that overlap (programmatic dependent launch, compute capability 9.0 on): blocks of a
// kernel start while the kernel before it ends, so that a short kernel's start costs nothing.
//
// A kernel may first read what no kernel of a step writes, which are weights. It calls
// await_inputs() on every path before it reads or writes anything else, and before an early return:
// who waits for this kernel relies on what this kernel waited for. After that, not before, it calls
// let_next_start(): so one kernel waits at a time, not as many as the device has room for.
#pragma once

#include <utility>

#include "core/cuda_launch.h"

namespace vllm::cuda {

// From now on the next kernel's blocks may take what room this one's leave.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// The kernels before this one have ended and what they wrote is there.
__device__ __forceinline__ void await_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Launches kernel(args...), which calls the two functions above; a refusal is told by scope.check.
template <typename... Params, typename... Args>
void launch_overlapping(const LaunchScope& scope, void (*kernel)(Params...), dim3 grid, dim3 block,
                        Args&&... args) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = scope.stream();
  config.attrs = &overlap;
  config.numAttrs = scope.can_overlap() ? 1 : 0;
  static_cast<void>(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

}  // namespace vllm::cuda
