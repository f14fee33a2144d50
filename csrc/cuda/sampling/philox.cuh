// Counter-based random numbers: one number for each (seed, offset), the same as on a CPU.
// Philox4x32-10, from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cstdint>

namespace vllm::cuda {

// Uniform in [0, 1), 53 bits.
__device__ inline double draw_uniform(uint64_t seed, uint64_t offset) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t w0 = static_cast<uint32_t>(offset), w1 = static_cast<uint32_t>(offset >> 32);
  uint32_t w2 = 0, w3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t low = uint64_t{w0} * 0xD2511F53u;
    const uint64_t high = uint64_t{w2} * 0xCD9E8D57u;
    w0 = static_cast<uint32_t>(high >> 32) ^ w1 ^ key0;
    w1 = static_cast<uint32_t>(high);
    w2 = static_cast<uint32_t>(low >> 32) ^ w3 ^ key1;
    w3 = static_cast<uint32_t>(low);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const uint64_t bits = (uint64_t{w1} << 32) | w0;
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

}  // namespace vllm::cuda
