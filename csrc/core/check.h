// Argument checks of ops. Every op checks rank, shape, stride, dtype and device before it touches
// memory; the message starts with kShapeErrorMark, by which vllm/_custom_ops/library.py turns the
// RuntimeError that torch raises into a ShapeError. Never used inside kernels.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace vllm {

using Tensor = torch::stable::Tensor;
using torch::headeronly::ScalarType;

inline constexpr char kShapeErrorMark[] = "[shape] ";

// Text without iostreams: their locale tables must not exist twice in a process, as they do where a
// toolchain links libstdc++ statically.
inline void append_text(std::string& text, const char* part) { text += part; }
inline void append_text(std::string& text, const std::string& part) { text += part; }
inline void append_text(std::string& text, char part) { text += part; }
template <typename Number>
  requires std::is_arithmetic_v<Number>
inline void append_text(std::string& text, Number part) {
  text += std::to_string(part);
}

template <typename... Parts>
[[noreturn]] inline void throw_shape_error(const Parts&... parts) {
  std::string text = kShapeErrorMark;
  (append_text(text, parts), ...);
  throw std::runtime_error(text);
}

// CHECK_ARG(condition, "op: what was given, what is allowed")
#define CHECK_ARG(condition, ...)             \
  do {                                        \
    if (!(condition)) [[unlikely]] {          \
      ::vllm::throw_shape_error(__VA_ARGS__); \
    }                                         \
  } while (false)

inline std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

inline const char* dtype_text(ScalarType type) { return torch::headeronly::toString(type); }

// A CPU tensor of the given rank whose last dimension is contiguous.
inline void check_tensor(const char* op, const char* name, const Tensor& t, int64_t rank) {
  CHECK_ARG(t.is_cpu(), op, ": ", name, " must be on the CPU");
  CHECK_ARG(t.dim() == rank, op, ": ", name, " has shape ", shape_text(t), ", expected rank ",
            rank);
  CHECK_ARG(rank == 0 || t.size(rank - 1) <= 1 || t.stride(rank - 1) == 1, op, ": ", name,
            " must be contiguous in its last dimension, its stride is ", t.stride(rank - 1));
}

inline void check_dtype(const char* op, const char* name, const Tensor& t, ScalarType type) {
  CHECK_ARG(t.scalar_type() == type, op, ": ", name, " is ", dtype_text(t.scalar_type()),
            ", expected ", dtype_text(type));
}

inline void check_float_dtype(const char* op, const char* name, const Tensor& t) {
  const ScalarType type = t.scalar_type();
  CHECK_ARG(type == ScalarType::Float || type == ScalarType::BFloat16, op, ": ", name, " is ",
            dtype_text(type), ", allowed: Float, BFloat16");
}

inline void check_size(const char* op, const char* name, const Tensor& t, int64_t dim,
                       int64_t expected) {
  CHECK_ARG(t.size(dim) == expected, op, ": ", name, " has shape ", shape_text(t), ", dimension ",
            dim, " must be ", expected);
}

inline void check_contiguous(const char* op, const char* name, const Tensor& t) {
  CHECK_ARG(t.is_contiguous(), op, ": ", name, " must be contiguous");
}

}  // namespace vllm
