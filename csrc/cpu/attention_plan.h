// Cuts the attention of a step into units of work.
#pragma once

#include "cpu/kernels/attention.h"

namespace vllm::cpu {

// The plan lives in scratch of the calling thread until its next plan. Only speed depends on it:
// what a row computes is cut at fixed positions whatever the plan says.
AttentionPlan plan_attention(const AttentionBatch& batch, int64_t num_heads, int64_t num_kv_heads,
                             int64_t head_size, int64_t num_threads);

}  // namespace vllm::cpu
