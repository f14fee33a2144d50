// One token of a row on the device: how its logit is read, its place in the order of tokens, its
// mass. NaN reads as -inf, +inf as the largest float, as on a CPU.
//
// Masses are fixed-point numbers: sums of integers are the same in any order, so that blocks and
// atomics may add them as they come and a row still gives the same token every time.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

namespace vllm::cuda {

using Word = unsigned long long;  // what 64-bit atomics take
using Order = Word;               // larger for the token that comes first
using Mass = Word;                // 2^kMassBits for the most likely token

constexpr float kMinusInf = -INFINITY;
constexpr float kNoMass = -87.3f;  // below this distance from the maximum a token has no mass
constexpr int kMassBits = 43;
constexpr int64_t kMaxVocab = int64_t{1} << 19;  // sums of masses stay below 2^62

__device__ inline float clean(float x) { return fminf(fmaxf(x, kMinusInf), FLT_MAX); }

// Rises with the logit; -0 and 0 are equal.
__device__ inline uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

__device__ inline float logit_of(uint32_t key) {
  return __uint_as_float(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

// Larger logit first, then lower id.
__device__ inline Order order_of(float x, int id) {
  return Word{key_of(x)} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

__device__ inline int id_of(Order order) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(order));
}

__device__ inline float logit_of_order(Order order) {
  return logit_of(static_cast<uint32_t>(order >> 32));
}

// Turns logits of a row into masses.
struct Scale {
  float temperature;
  float top;  // the largest logit of the row after division by the temperature

  __device__ float divide(float x) const { return fminf(x / temperature, FLT_MAX); }
  // e^(distance from the top), 0 far below it.
  __device__ float weigh(float x) const {
    const float distance = divide(x) - top;
    return distance < kNoMass ? 0.0f : expf(distance);
  }
};

__device__ inline Mass mass_of(float weight) {
  return __float2ull_rn(weight * static_cast<float>(int64_t{1} << kMassBits));
}

}  // namespace vllm::cuda
