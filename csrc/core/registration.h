// Registration of ops through torch's stable ABI; included by the op files csrc/*/<op>.cpp.
//
//   VLLM_OPS(_C, m) { m.def("silu_and_mul(Tensor! out, Tensor input) -> ()"); }
//   VLLM_OPS_IMPL(_C, CPU, m) { m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul)); }
//
// Functions to box take stable Tensors by value or const reference, std::optional<Tensor>, double,
// int64_t, bool and std::vector<Tensor>. Ops without tensor arguments use
// CompositeExplicitAutograd.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#define VLLM_OPS(ns, m) STABLE_TORCH_LIBRARY_FRAGMENT(ns, m)
#define VLLM_OPS_IMPL(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)
