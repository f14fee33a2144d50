// Memory for kernels: scratch of a thread, which stays from call to call, and huge pages.
#pragma once

#include <cstddef>

namespace vllm::cpu {

// Users of scratch that may be active at once on one thread.
enum class Scratch : int { kActivations, kAttention, kPartials, kStep, kLogits, kExperts, kCount };

// At least `bytes` bytes, 64-byte aligned, uninitialised, owned by the calling thread and valid
// until its next call for the same use. Other threads may write to it while the owner waits for
// them.
void* thread_scratch(Scratch use, size_t bytes);

}  // namespace vllm::cpu
