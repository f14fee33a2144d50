// Run-time choice of instruction set and element type.
//
// A kernel is declared once in a header of csrc/cpu/kernels with VLLM_DECLARE_KERNEL, defined in
// the .cpp beside it inside VLLM_KERNEL_NAMESPACE, compiled once for each instruction set, and
// called from the op with VLLM_CALL_KERNEL.
//
// Kernel files include no torch header and no standard container: a weak symbol that was compiled
// with wide vectors could otherwise be picked by the linker for the baseline code.
#pragma once

namespace vllm::cpu {

enum class Isa : int { kAvx2 = 0, kAvx512 = 1, kAvx512Bf16 = 2 };

Isa current_isa();      // the one in use
Isa best_isa();         // the best that this processor has; throws without AVX2 and FMA
void set_isa(Isa isa);  // tests only; throws if the processor lacks it

}  // namespace vllm::cpu

// VLLM_DECLARE_KERNEL(void rms_norm(const RmsNormArgs& args));   inside namespace vllm::cpu
#define VLLM_DECLARE_KERNEL(...) \
  namespace avx2 {               \
  __VA_ARGS__;                   \
  }                              \
  namespace avx512 {             \
  __VA_ARGS__;                   \
  }                              \
  namespace avx512_bf16 {        \
  __VA_ARGS__;                   \
  }

// VLLM_CALL_KERNEL(rms_norm, args);
#define VLLM_CALL_KERNEL(name, ...)                  \
  do {                                               \
    switch (::vllm::cpu::current_isa()) {            \
      case ::vllm::cpu::Isa::kAvx512Bf16:            \
        ::vllm::cpu::avx512_bf16::name(__VA_ARGS__); \
        break;                                       \
      case ::vllm::cpu::Isa::kAvx512:                \
        ::vllm::cpu::avx512::name(__VA_ARGS__);      \
        break;                                       \
      case ::vllm::cpu::Isa::kAvx2:                  \
        ::vllm::cpu::avx2::name(__VA_ARGS__);        \
        break;                                       \
    }                                                \
  } while (false)
