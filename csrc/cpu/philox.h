// Counter-based random numbers: one number for each (seed, offset), in any order, on any thread.
// Philox4x32-10, from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cstdint>

#include "cpu/vec.h"

namespace VLLM_KERNEL_NAMESPACE {

// Uniform in [0, 1), 53 bits.
VLLM_INLINE double draw_uniform(uint64_t seed, uint64_t offset) {
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  uint32_t w[4] = {static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), 0, 0};
  for (int round = 0; round < 10; ++round) {
    const uint64_t low = uint64_t{w[0]} * 0xD2511F53u;
    const uint64_t high = uint64_t{w[2]} * 0xCD9E8D57u;
    w[0] = static_cast<uint32_t>(high >> 32) ^ w[1] ^ key[0];
    w[1] = static_cast<uint32_t>(high);
    w[2] = static_cast<uint32_t>(low >> 32) ^ w[3] ^ key[1];
    w[3] = static_cast<uint32_t>(low);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const uint64_t bits = (uint64_t{w[1]} << 32) | w[0];
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

}  // namespace VLLM_KERNEL_NAMESPACE
