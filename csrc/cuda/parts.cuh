// Products of few rows that are still in parts (`skinny_linear_parts`): float32 [P, T, N], which
// the op that comes next adds up in their order.
#pragma once

#include <utility>

#include "cuda/pack.cuh"
#include "cuda/rows.cuh"

namespace vllm::cuda {

inline constexpr int kMaxFastParts = 9;  // more are summed by a launch of their own

struct Parts {
  const float* data;
  int64_t stride;  // elements from one part to the next
  int64_t count;
};

// Checks parts of a product of the shape [T, N] of `like`.
inline Parts parts_of(const char* op, const Tensor& parts, const Tensor& like) {
  check_tensor(op, "parts", parts, 3);
  check_dtype(op, "parts", parts, ScalarType::Float);
  check_same_device(op, "parts", parts, like);
  check_contiguous(op, "parts", parts);
  check_size(op, "parts", parts, 1, like.size(0));
  check_size(op, "parts", parts, 2, like.size(1));
  CHECK_ARG(parts.size(0) > 0, op, ": parts has shape ", shape_text(parts),
            ", there must be a part");
  return Parts{.data = static_cast<const float*>(parts.data_ptr()),
               .stride = parts.stride(0),
               .count = parts.size(0)};
}

// Writes round(sum of parts + bias) to `out` [T, N]; `bias` is of its dtype, null is none.
void write_sum(const LaunchScope& scope, const Tensor& out, const Parts& parts, const void* bias);

// A pack that a kernel may have written since this one's blocks began, and not the last before it:
// not out of the nearest cache.
template <typename T>
__device__ __forceinline__ Pack<T> load_fresh(const T* place) {
  return pack_of<T>(__ldcg(reinterpret_cast<const uint4*>(place)));
}

// 16 bytes to shared memory, past the nearest cache and the registers.
__device__ __forceinline__ void copy_async(float* shared, const float* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}

__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Sends for the parts of 8 kLanes neighbours behind `first`; `memory` is the group's, 8 kParts
// kLanes floats. Through it they are on their way all at once, and beside what is loaded until
// sum_parts: the compiler would send two loads of a thread and wait for them.
template <int kParts, int kLanes>
__device__ __forceinline__ void bring_parts(const float* first, int64_t stride, float* memory,
                                            int lane) {
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = (i * kLanes + lane) * 4;
      copy_async(memory + p * kLanes * 8 + place, first + p * stride + place);
    }
  }
}

// The sums of what bring_parts has sent for: lane l has elements 8 l ... 8 l + 7, which are one
// pack of 16-bit numbers.
template <int kParts, int kLanes>
__device__ __forceinline__ void sum_parts(const float* memory, int lane, float (&sum)[8]) {
  await_copies();
  __syncwarp();
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const float4* from = reinterpret_cast<const float4*>(memory + (p * kLanes + lane) * 8);
    const float4 a = from[0], b = from[1];
    const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] = p == 0 ? x[e] : sum[e] + x[e];
  }
}

template <int kCount>
struct PartCount {};

// Calls f(PartCount<count>{}) for 1 to kMaxFastParts parts.
template <typename F>
void dispatch_parts(int64_t count, F&& f) {
  const auto find = [&]<int... kBefore>(std::integer_sequence<int, kBefore...>) {
    ((count == kBefore + 1 ? f(PartCount<kBefore + 1>{}) : void()), ...);
  };
  find(std::make_integer_sequence<int, kMaxFastParts>{});
}

}  // namespace vllm::cuda
