// Cuts the attention of a step into units of work.
#pragma once

#include <vector>

#include "cpu/kernels/attention.h"

namespace vllm::cpu {

// Memory of plans; keeps its capacity from step to step.
struct AttentionPlanMemory {
  std::vector<AttentionUnit> units;
  std::vector<int32_t> num_parts, missing_parts;
  std::vector<int64_t> partial_starts;
  int32_t next_unit = 0;
};

// Only speed depends on the plan: what a row computes is cut at fixed positions whatever it says.
// The plan lives in `memory` and has no partials yet.
AttentionPlan plan_attention(AttentionPlanMemory& memory, const AttentionBatch& batch,
                             int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
                             int64_t num_threads);

}  // namespace vllm::cpu
