// Op: _C::soft_cap.
#include "cpu/kernels/soft_cap.h"

#include "cpu/op.h"

namespace vllm::cpu {

namespace {

void soft_cap_op(const Tensor& x, double scale, double cap) {
  const char* op = "soft_cap";
  check_tensor(op, "x", x, 2);
  check_float_dtype(op, "x", x);
  CHECK_ARG(cap > 0, op, ": cap is ", cap, ", must be positive");
  const SoftCapArgs args{.x = x.data_ptr(),
                         .element = element_of(x),
                         .rows = x.size(0),
                         .n = x.size(1),
                         .stride = x.stride(0),
                         .scale = static_cast<float>(scale),
                         .cap = static_cast<float>(cap)};
  if (args.rows > 0 && args.n > 0) VLLM_CALL_KERNEL(soft_cap, args);
}

}  // namespace

VLLM_OPS(_C, m) { m.def("soft_cap(Tensor! x, float scale, float cap) -> ()"); }

VLLM_OPS_IMPL(_C, CPU, m) { m.impl("soft_cap", TORCH_BOX(&soft_cap_op)); }

}  // namespace vllm::cpu
