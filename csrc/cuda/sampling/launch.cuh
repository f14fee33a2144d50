// Host side of the sampling ops: checks of their tensors, and the launch of a kernel that gives
// each row a team of blocks.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <type_traits>

#include "core/cuda_check.h"
#include "core/cuda_launch.h"
#include "cuda/sampling/team.cuh"

namespace vllm::cuda {

struct Logits {
  float* data;
  int64_t rows, stride;
  int n;
};

inline void check_vocab(const char* op, const Tensor& t) {
  CHECK_ARG(t.size(1) > 0 && t.size(1) <= kMaxVocab, op, ": logits has shape ", shape_text(t),
            ", the vocabulary must have 1 to ", kMaxVocab, " tokens");
}

inline Logits logits_of(const char* op, const Tensor& t) {
  check_tensor(op, "logits", t, 2);
  check_dtype(op, "logits", t, ScalarType::Float);
  check_vocab(op, t);
  return Logits{.data = static_cast<float*>(t.data_ptr()),
                .rows = t.size(0),
                .stride = t.stride(0),
                .n = static_cast<int>(t.size(1))};
}

template <typename T>
void check_item(const char* op, const char* name, const Tensor& t) {
  check_dtype(op, name, t,
              sizeof(T) == 8          ? ScalarType::Long
              : std::is_integral_v<T> ? ScalarType::Int
                                      : ScalarType::Float);
}

template <typename T>
T* vector_of(const char* op, const char* name, const Tensor& t, int64_t size, const Tensor& like) {
  check_tensor(op, name, t, 1);
  check_same_device(op, name, t, like);
  check_item<T>(op, name, t);
  check_size(op, name, t, 0, size);
  return static_cast<T*>(t.data_ptr());
}

template <typename T>
T* matrix_of(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t columns,
             const Tensor& like) {
  check_tensor(op, name, t, 2);
  check_contiguous(op, name, t);
  check_same_device(op, name, t, like);
  check_item<T>(op, name, t);
  check_size(op, name, t, 0, rows);
  check_size(op, name, t, 1, columns);
  return static_cast<T*>(t.data_ptr());
}

inline int count_multiprocessors(int device) {
  int count = 0;
  throw_on_error("cudaDeviceGetAttribute",
                 cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Blocks for each row so that all rows together have about `blocks`, and a warp a tile.
inline int count_parts(int64_t rows, int n, int blocks) {
  const int64_t useful = ceil_div(n, kTile * kWarps);
  return static_cast<int>(
      std::max<int64_t>(1, std::min<int64_t>({kMaxParts, useful, blocks / rows})));
}

// Launches kernel(args, scratch) on a team of blocks for each row. Blocks of a team wait for each
// other: there are never more than run at once, and the launch is cooperative.
template <typename Args>
void launch_teams(const char* op, void (*kernel)(Args, RowScratch*), Args args,
                  const Tensor& logits) {
  const int64_t rows = logits.size(0);
  if (rows == 0) return;
  const LaunchScope scope(logits);
  int of_processor = 0;
  throw_on_error(op,
                 cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_processor, kernel, kThreads, 0));
  const int blocks = of_processor * count_multiprocessors(logits.get_device_index());
  const int parts = count_parts(rows, static_cast<int>(logits.size(1)), blocks);
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(parts));
  if (parts == 1) {
    kernel<<<grid, kThreads, 0, scope.stream()>>>(args, nullptr);
    scope.check(op);
    return;
  }
  const int64_t bytes = rows * static_cast<int64_t>(sizeof(RowScratch));
  const Tensor memory = torch::stable::new_empty(logits, {bytes}, ScalarType::Byte);
  auto* scratch = static_cast<RowScratch*>(memory.data_ptr());
  throw_on_error(op, cudaMemset2DAsync(scratch, sizeof(RowScratch), 0, 2 * sizeof(unsigned),
                                       static_cast<size_t>(rows), scope.stream()));
  void* arguments[] = {&args, &scratch};
  throw_on_error(op, cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), grid,
                                                 dim3(kThreads), arguments, 0, scope.stream()));
}

}  // namespace vllm::cuda
