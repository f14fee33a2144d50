// Norm of one row by a group of lanes of a warp; used by the norm op for short rows and by the
// fused query, key and value op, which therefore agree bit for bit.
#pragma once

#include "cuda/lanes.cuh"

namespace vllm::cuda {

template <typename T>
__device__ __forceinline__ float sum_of_squares(const Pack<T>& pack, float sum) {
  float x[Pack<T>::kSize];
  unpack(pack, x);
#pragma unroll
  for (int e = 0; e < Pack<T>::kSize; ++e) sum = fmaf(x[e], x[e], sum);
  return sum;
}

// The weights of one pack of T; a wider weight takes two packs of its own.
template <typename T, typename W>
struct WeightPack {
  static constexpr int kParts = Pack<T>::kSize / Pack<W>::kSize;
  Pack<W> part[kParts];

  __device__ __forceinline__ void load(const W* weight, int64_t begin, int64_t n, bool is_packed) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      part[i] = load_pack(weight, begin + i * Pack<W>::kSize, n, is_packed);
    }
  }
  __device__ __forceinline__ float at(int e) const {
    return to_float(part[e / Pack<W>::kSize].item[e % Pack<W>::kSize]);
  }
};

// A weight of the model's type multiplies what was rounded to that type; a float32 weight beside a
// narrower type multiplies before the rounding (Gemma's 1 + w).
template <typename T, typename W>
__device__ __forceinline__ void scale_pack(Pack<T>& pack, const WeightPack<T, W>& weight,
                                           float scale) {
  float x[Pack<T>::kSize];
  unpack(pack, x);
  if constexpr (sizeof(W) == sizeof(T)) {
    const Pack<T> normed =
        map_pairs<T>([&](int e) { return make_float2(x[e] * scale, x[e + 1] * scale); });
    pack = multiply_packs(normed, weight.part[0]);
  } else {
    pack = map_pairs<T>([&](int e) {
      return make_float2(x[e] * scale * weight.at(e), x[e + 1] * scale * weight.at(e + 1));
    });
  }
}

__device__ __forceinline__ float inverse_rms(float sum, int64_t n, float epsilon) {
  // 1 / n does not wait for the sum; the device's rsqrtf is off by two units in the last place.
  return rsqrtf(fmaf(sum, 1.0f / static_cast<float>(n), epsilon));
}

// Norms the row that the group holds, in place. Every lane of the warp takes part; where it is not
// `is_live`, nothing changes.
template <typename T, typename W, int kPacks>
__device__ __forceinline__ void norm_lanes(Pack<T> (&packs)[kPacks],
                                           const WeightPack<T, W> (&weights)[kPacks], int lanes,
                                           bool is_live, int64_t n, float epsilon) {
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) sum = sum_of_squares(packs[p], sum);
  const float scale = inverse_rms(sum_lanes(sum, lanes), n, epsilon);
  if (!is_live) return;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) scale_pack(packs[p], weights[p], scale);
}

// Calls f(TypeTag<W>{}) with the element type of a norm's weight over rows of T.
template <typename T, typename F>
void dispatch_weight(ScalarType type, F&& f) {
  if constexpr (std::is_same_v<T, float>) {
    f(TypeTag<float>{});
  } else if (type == ScalarType::Float) {
    f(TypeTag<float>{});
  } else {
    f(TypeTag<T>{});
  }
}

// Calls f(TypeTag<T>{}, TypeTag<W>{}) for rows of 16-bit numbers and their norm's weight.
template <typename F>
void dispatch_16_bits(ScalarType type, ScalarType weight_type, F&& f) {
  const auto add_weight = [&]<typename T>(TypeTag<T> tag) {
    dispatch_weight<T>(weight_type, [&](auto weight_tag) { f(tag, weight_tag); });
  };
  if (type == ScalarType::BFloat16) {
    add_weight(TypeTag<bf16>{});
  } else {
    add_weight(TypeTag<half>{});
  }
}

inline void check_norm_weight(const char* op, const char* name, const Tensor& weight,
                              const Tensor& x, int64_t n) {
  check_tensor(op, name, weight, 1);
  check_same_device(op, name, weight, x);
  if (weight.scalar_type() != ScalarType::Float) check_dtype(op, name, weight, x.scalar_type());
  check_size(op, name, weight, 0, n);
}

}  // namespace vllm::cuda
