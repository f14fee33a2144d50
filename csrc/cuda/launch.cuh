// Launches that overlap (programmatic dependent launch, compute capability 9.0 on): blocks of a
// kernel start while the kernel before it ends, so that a short kernel's start costs nothing.
//
// A kernel may first read what no kernel of a step writes, which are weights. It calls
// await_inputs() on every path before it reads or writes anything else, and before an early return:
// who waits for this kernel relies on what this kernel waited for. After that, not before, it calls
// let_next_start(): so one kernel waits at a time, not as many as the device has room for.
//
// A short kernel between products of few rows, all of whose blocks run at once, calls it first: the
// product behind it then brings its weights while this kernel waits. It reads past the nearest
// cache what others than the kernel before it wrote in this step, since those may not have ended
// when its blocks began (`load_fresh`).
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

// What blocks of a launch have together: memory inside each, and a cluster (compute capability 9.0
// on) in which they reach each other's.
struct BlockSharing {
  size_t shared_bytes = 0;  // dynamic
  unsigned cluster_blocks = 1;
};

// Launches kernel(args...), which calls the two functions above; a refusal is told by scope.check.
template <typename... Params, typename... Args>
void launch_sharing(const LaunchScope& scope, const BlockSharing& sharing,
                    void (*kernel)(Params...), dim3 grid, dim3 block, Args&&... args) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = sharing.shared_bytes;
  config.stream = scope.stream();
  config.attrs = attributes;
  if (scope.can_overlap()) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (sharing.cluster_blocks > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = sharing.cluster_blocks;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  static_cast<void>(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

template <typename... Params, typename... Args>
void launch_overlapping(const LaunchScope& scope, void (*kernel)(Params...), dim3 grid, dim3 block,
                        Args&&... args) {
  launch_sharing(scope, BlockSharing{}, kernel, grid, block, std::forward<Args>(args)...);
}

// Prepares a kernel that runs between products, whose blocks fill the shared memory: a processor
// that has given more of its memory to the cache takes no such block before it is idle. Returns
// whether blocks can have `shared_bytes` of dynamic shared memory.
template <typename... Params>
bool prepare_sharing(void (*kernel)(Params...), size_t shared_bytes) {
  const void* function = reinterpret_cast<const void*>(kernel);
  cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           static_cast<int>(cudaSharedmemCarveoutMaxShared));
  if (error == cudaSuccess && shared_bytes > 0) {  // with what is static, 48 KB are soon full
    error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
  }
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());  // told by the result
  return error == cudaSuccess;
}

}  // namespace vllm::cuda
