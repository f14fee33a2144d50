// What stands in for libtorch_cuda.so at link time where torch has no CUDA; never loaded.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) int32_t aoti_torch_get_current_cuda_stream(
    int32_t, void**) {
  return 1;
}
