// How CUDA ops launch: on torch's current stream of the tensors' device, with an error check after.
//
//   const LaunchScope scope(input);
//   some_kernel<<<grid, block, 0, scope.stream()>>>(args);
//   scope.check("some_op");
//
// No host synchronisation and no allocation, so that every op can be captured in a CUDA graph. No
// torch CUDA header: the stream comes through the stable C interface, which libtorch_cuda exports.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/check.h"

extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace vllm::cuda {

inline void throw_on_error(const char* what, cudaError_t error) {
  if (error == cudaSuccess) [[likely]]
    return;
  std::string text = what;
  text += ": ";
  text += cudaGetErrorString(error);
  throw std::runtime_error(text);
}

// Makes the device of `t` current while it lives, and knows torch's current stream there.
class LaunchScope {
 public:
  explicit LaunchScope(const Tensor& t) : device_(t.get_device_index()) {
    throw_on_error("cudaGetDevice", cudaGetDevice(&previous_));
    is_other_ = device_ != previous_;
    if (is_other_) throw_on_error("cudaSetDevice", cudaSetDevice(device_));
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(device_, &stream) != 0) {
      throw std::runtime_error("torch has no current CUDA stream on device " +
                               std::to_string(device_));
    }
    stream_ = static_cast<cudaStream_t>(stream);
  }
  ~LaunchScope() {
    if (is_other_) cudaSetDevice(previous_);
  }
  LaunchScope(const LaunchScope&) = delete;
  LaunchScope& operator=(const LaunchScope&) = delete;

  cudaStream_t stream() const { return stream_; }

  // Whether a kernel can start while the one before it ends.
  bool can_overlap() const {
    int major = 0;
    throw_on_error("cudaDeviceGetAttribute",
                   cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_));
    return major >= 9;
  }

  // Throws if the last launch was refused; errors while running are reported by later calls.
  void check(const char* op) const { throw_on_error(op, cudaGetLastError()); }

 private:
  int device_, previous_ = 0;
  bool is_other_ = false;
  cudaStream_t stream_ = nullptr;
};

template <typename Count>
constexpr Count ceil_div(Count a, std::type_identity_t<Count> b) {
  return (a + b - 1) / b;
}

}  // namespace vllm::cuda

// DEVICE_CHECK(condition): inside kernels, about values that only the device knows. A failure stops
// the process's work on the device with a message, as an index error inside torch does.
#define DEVICE_CHECK(condition)                                                               \
  do {                                                                                        \
    if (!(condition)) [[unlikely]] {                                                          \
      __assert_fail(#condition, __FILE_NAME__, __LINE__, static_cast<const char*>(__func__)); \
    }                                                                                         \
  } while (false)
