// Instruction set in use, and which OpenMP runtime this library was bound to.
#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "core/dispatch.h"
#include "core/registration.h"

extern "C" int omp_get_max_threads();

namespace vllm::cpu {

namespace {

Isa detect_isa() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    throw std::runtime_error("this processor has no AVX2 with FMA, which the CPU ops need");
  }
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!wide) return Isa::kAvx2;
  return __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
}

int chosen_isa = -1;

}  // namespace

Isa best_isa() {
  static const Isa best = detect_isa();
  return best;
}

Isa current_isa() {
  if (chosen_isa < 0) chosen_isa = static_cast<int>(best_isa());
  return static_cast<Isa>(chosen_isa);
}

void set_isa(Isa isa) {
  if (isa < Isa::kAvx2 || isa > best_isa()) {
    throw std::runtime_error("set_cpu_isa: level " + std::to_string(static_cast<int>(isa)) +
                             " is not available, the best here is " +
                             std::to_string(static_cast<int>(best_isa())));
  }
  chosen_isa = static_cast<int>(isa);
}

namespace {

int64_t cpu_isa() { return static_cast<int64_t>(current_isa()); }

int64_t best_cpu_isa() { return static_cast<int64_t>(best_isa()); }

void set_cpu_isa(int64_t level) { set_isa(static_cast<Isa>(level)); }

int64_t num_threads() { return omp_get_max_threads(); }

std::string file_of(const void* address) {
  Dl_info info;
  return address != nullptr && dladdr(address, &info) ? info.dli_fname : "";
}

// Path of the OpenMP runtime that our parallel regions use, and of the one that torch's use.
std::tuple<std::string, std::string> openmp_runtimes() {
  const void* ours = reinterpret_cast<const void*>(&omp_get_max_threads);
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  // What the loader gave torch: a preloaded runtime first, then torch's own.
  const void* theirs = dlsym(RTLD_DEFAULT, "omp_get_max_threads");
  if (theirs == nullptr && torch != nullptr) theirs = dlsym(torch, "omp_get_max_threads");
  if (torch != nullptr) dlclose(torch);
  return {file_of(ours), file_of(theirs)};
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def("cpu_isa() -> int");
  m.def("best_cpu_isa() -> int");
  m.def("set_cpu_isa(int level) -> ()");
  m.def("num_threads() -> int");
  m.def("openmp_runtimes() -> (str, str)");
}

VLLM_OPS_IMPL(_C, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("best_cpu_isa", TORCH_BOX(&best_cpu_isa));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
  m.impl("num_threads", TORCH_BOX(&num_threads));
  m.impl("openmp_runtimes", TORCH_BOX(&openmp_runtimes));
}

}  // namespace vllm::cpu

// Found by a text search in the file when the library cannot be loaded.
extern "C" __attribute__((visibility("default"), used)) const char vllm_build_info[] =
    "VLLM_BUILT_FOR_TORCH=" VLLM_TORCH_BUILD_VERSION ";";
