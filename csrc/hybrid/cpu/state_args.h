// Checks that the state ops share; included by csrc/hybrid/cpu/*.cpp only.
#pragma once

#include <optional>

#include "cpu/op.h"
#include "hybrid/cpu/kernels/state_space.h"

namespace vllm::cpu {

inline const int32_t* int_data(const char* op, const char* name, const Tensor& t, int64_t size) {
  check_tensor(op, name, t, 1);
  check_dtype(op, name, t, ScalarType::Int);
  check_size(op, name, t, 0, size);
  return static_cast<const int32_t*>(t.data_ptr());
}

inline const float* float_data(const char* op, const char* name, const Tensor& t, int64_t size) {
  check_tensor(op, name, t, 1);
  check_dtype(op, name, t, ScalarType::Float);
  check_size(op, name, t, 0, size);
  return static_cast<const float*>(t.data_ptr());
}

inline const float* float_data(const char* op, const char* name, const std::optional<Tensor>& t,
                               int64_t size) {
  return t.has_value() ? float_data(op, name, *t, size) : nullptr;
}

// The rows of a batch over `tokens` tokens; every number is checked, for the kernels trust them.
inline StateRows state_rows(const char* op, const Tensor& state, const Tensor& offsets,
                            const Tensor& bounds, const Tensor& computed, int64_t tokens) {
  const int64_t count = offsets.dim() > 0 ? offsets.size(0) : 0;
  const StateRows rows{.offsets = int_data(op, "state_offsets", offsets, count),
                       .bounds = int_data(op, "cu_query_lens", bounds, count + 1),
                       .computed = int_data(op, "num_computed", computed, count),
                       .count = count,
                       .tokens = tokens,
                       .unit_stride = state.stride(0)};
  CHECK_ARG(rows.bounds[0] == 0 && rows.bounds[count] == tokens, op, ": cu_query_lens runs from ",
            rows.bounds[0], " to ", rows.bounds[count], ", must be from 0 to ", tokens);
  for (int64_t row = 0; row < count; ++row) {
    CHECK_ARG(rows.bounds[row] <= rows.bounds[row + 1], op, ": cu_query_lens falls after row ",
              row);
    CHECK_ARG(rows.offsets[row] >= 0 && rows.offsets[row] < state.size(0), op, ": state_offsets[",
              row, "] is ", rows.offsets[row], ", the state has ", state.size(0), " units");
  }
  return rows;
}

// A float32 state of three dimensions a unit, contiguous inside the unit.
inline float* state_data(const char* op, const Tensor& state, int64_t heads, int64_t rows,
                         int64_t columns) {
  check_tensor(op, "state", state, 4);
  check_dtype(op, "state", state, ScalarType::Float);
  check_size(op, "state", state, 1, heads);
  check_size(op, "state", state, 2, rows);
  check_size(op, "state", state, 3, columns);
  CHECK_ARG(state.stride(2) == columns && state.stride(1) == rows * columns, op,
            ": a unit of state must be contiguous, its strides are ", state.stride(1), ", ",
            state.stride(2));
  return static_cast<float*>(state.data_ptr());
}

// [tokens, heads, size], contiguous in the last dimension.
inline HeadsOf heads_of(const char* op, const char* name, const Tensor& t, ScalarType type,
                        int64_t tokens, int64_t heads, int64_t size) {
  check_tensor(op, name, t, 3);
  check_dtype(op, name, t, type);
  check_size(op, name, t, 0, tokens);
  check_size(op, name, t, 1, heads);
  check_size(op, name, t, 2, size);
  return HeadsOf{t.data_ptr(), t.stride(0), t.stride(1)};
}

// [tokens, columns], contiguous in the last dimension.
inline void check_matrix(const char* op, const char* name, const Tensor& t, ScalarType type,
                         int64_t tokens, int64_t columns) {
  check_tensor(op, name, t, 2);
  check_dtype(op, name, t, type);
  check_size(op, name, t, 0, tokens);
  check_size(op, name, t, 1, columns);
}

}  // namespace vllm::cpu
