// Argument checks of CUDA ops: check.h with the device, and with float16. They look at what the
// host knows (rank, shape, stride, dtype, device); values that lie on the device are checked there,
// by DEVICE_CHECK of cuda_launch.h, since a copy to the host would make every step wait.
#pragma once

#include "core/check.h"

namespace vllm::cuda {

// A CUDA tensor of the given rank whose last dimension is contiguous.
inline void check_tensor(const char* op, const char* name, const Tensor& t, int64_t rank) {
  CHECK_ARG(t.is_cuda(), op, ": ", name, " must be on a CUDA device");
  CHECK_ARG(t.dim() == rank, op, ": ", name, " has shape ", shape_text(t), ", expected rank ",
            rank);
  CHECK_ARG(rank == 0 || t.size(rank - 1) <= 1 || t.stride(rank - 1) == 1, op, ": ", name,
            " must be contiguous in its last dimension, its stride is ", t.stride(rank - 1));
}

inline void check_same_device(const char* op, const char* name, const Tensor& t,
                              const Tensor& like) {
  CHECK_ARG(t.is_cuda() && t.get_device_index() == like.get_device_index(), op, ": ", name,
            " must be on CUDA device ", like.get_device_index());
}

inline void check_float_dtype(const char* op, const char* name, const Tensor& t) {
  const ScalarType type = t.scalar_type();
  CHECK_ARG(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
            op, ": ", name, " is ", dtype_text(type), ", allowed: Float, BFloat16, Half");
}

// Checks that `t` has the dtype, the shape and the device of `like`.
inline void check_like(const char* op, const char* name, const Tensor& t, const Tensor& like) {
  check_dtype(op, name, t, like.scalar_type());
  check_same_device(op, name, t, like);
  CHECK_ARG(t.dim() == like.dim(), op, ": ", name, " has shape ", shape_text(t), ", expected ",
            shape_text(like));
  for (int64_t i = 0; i < like.dim(); ++i) {
    CHECK_ARG(t.size(i) == like.size(i), op, ": ", name, " has shape ", shape_text(t),
              ", expected ", shape_text(like));
  }
}

}  // namespace vllm::cuda
