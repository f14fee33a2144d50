// What every CPU op file includes: checks, registration, dispatch, and the step from torch's dtype
// to the kernels' element type. Kernels never include it.
#pragma once

#include "core/check.h"
#include "core/dispatch.h"
#include "core/registration.h"
#include "cpu/types.h"

namespace vllm::cpu {

inline Element element_of(const Tensor& t) {
  return t.scalar_type() == ScalarType::BFloat16 ? Element::kBf16 : Element::kFloat;
}

}  // namespace vllm::cpu
