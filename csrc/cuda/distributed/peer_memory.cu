// Ops: _C::allocate_peer_memory, open_peer_memory, close_peer_memory, free_peer_memory: device
// memory that other processes of this host read and write, through CUDA's interprocess handles.
//
// Addresses are int64: such memory belongs to no tensor. Nothing here runs while a step does.
#include <cstring>

#include "core/cuda_launch.h"
#include "core/registration.h"

namespace vllm::cuda {

namespace {

// Makes a device current while it lives.
class DeviceScope {
 public:
  explicit DeviceScope(int64_t device) {
    throw_on_error("cudaGetDevice", cudaGetDevice(&previous_));
    throw_on_error("cudaSetDevice", cudaSetDevice(static_cast<int>(device)));
  }
  ~DeviceScope() { cudaSetDevice(previous_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
};

// Throws; the next launch does not find the error again, since callers do without this memory.
void throw_once(const char* op, cudaError_t error) {
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  throw_on_error(op, error);
}

void* address_of(int64_t address) { return reinterpret_cast<void*>(address); }

void check_handle(const char* op, const Tensor& handle) {
  check_tensor(op, "handle", handle, 1);
  check_dtype(op, "handle", handle, ScalarType::Byte);
  check_size(op, "handle", handle, 0, sizeof(cudaIpcMemHandle_t));
}

// Allocates zeros and writes the handle by which others open them.
int64_t allocate_peer_memory(int64_t device, int64_t bytes, const Tensor& handle) {
  constexpr char kOp[] = "allocate_peer_memory";
  check_handle(kOp, handle);
  CHECK_ARG(bytes > 0, kOp, ": bytes is ", bytes, ", expected more than 0");
  const DeviceScope scope(device);
  void* memory = nullptr;
  throw_once(kOp, cudaMalloc(&memory, static_cast<size_t>(bytes)));
  cudaIpcMemHandle_t text;
  cudaError_t error = cudaMemset(memory, 0, static_cast<size_t>(bytes));
  if (error == cudaSuccess) error = cudaDeviceSynchronize();  // before anyone else writes there
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(&text, memory);
  if (error != cudaSuccess) {
    cudaFree(memory);
    throw_once(kOp, error);
  }
  std::memcpy(handle.data_ptr(), &text, sizeof(text));
  return reinterpret_cast<int64_t>(memory);
}

int64_t open_peer_memory(int64_t device, const Tensor& handle) {
  constexpr char kOp[] = "open_peer_memory";
  check_handle(kOp, handle);
  const DeviceScope scope(device);
  cudaIpcMemHandle_t text;
  std::memcpy(&text, handle.data_ptr(), sizeof(text));
  void* memory = nullptr;
  throw_once(kOp, cudaIpcOpenMemHandle(&memory, text, cudaIpcMemLazyEnablePeerAccess));
  return reinterpret_cast<int64_t>(memory);
}

void close_peer_memory(int64_t device, int64_t address) {
  const DeviceScope scope(device);
  throw_on_error("close_peer_memory", cudaIpcCloseMemHandle(address_of(address)));
}

void free_peer_memory(int64_t device, int64_t address) {
  const DeviceScope scope(device);
  throw_on_error("free_peer_memory", cudaFree(address_of(address)));
}

}  // namespace

}  // namespace vllm::cuda

VLLM_OPS(_C, m) {
  m.def("allocate_peer_memory(int device, int bytes, Tensor! handle) -> int");
  m.def("open_peer_memory(int device, Tensor handle) -> int");
  m.def("close_peer_memory(int device, int address) -> ()");
  m.def("free_peer_memory(int device, int address) -> ()");
}

VLLM_OPS_IMPL(_C, CompositeExplicitAutograd, m) {
  using namespace vllm::cuda;
  m.impl("allocate_peer_memory", TORCH_BOX(&allocate_peer_memory));
  m.impl("open_peer_memory", TORCH_BOX(&open_peer_memory));
  m.impl("close_peer_memory", TORCH_BOX(&close_peer_memory));
  m.impl("free_peer_memory", TORCH_BOX(&free_peer_memory));
}
