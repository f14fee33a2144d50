// Kernels of the sampling ops (csrc/cpu/sampling.cpp).
#pragma once

#include <cstdint>

#include "core/dispatch.h"

namespace vllm::cpu {

struct Logits {
  float* data;
  int64_t rows, n;  // n is the size of the vocabulary
  int64_t stride;   // in elements
};

struct FilterArgs {
  const float* temperature;
  const float* top_p;
  const int32_t* top_k;
  const float* min_p;
};

struct SampleArgs {
  int64_t* out_ids;
  Logits logits;
  FilterArgs filters;
  const int64_t* seeds;
  const int64_t* offsets;
};

struct PenaltyArgs {
  Logits logits;
  const int64_t* cu_tokens;
  const int64_t* token_ids;
  const int32_t* output_counts;
  const float* repetition;
  const float* frequency;
  const float* presence;
};

struct BitmaskArgs {
  Logits logits;
  const int64_t* rows;   // [num_rows] of the logits
  const int32_t* words;  // [num_rows, num_words]
  int64_t num_rows, num_words;
};

struct LogprobArgs {
  float* out_logprobs;  // [rows, 1 + k]
  int64_t* out_ids;     // [rows, 1 + k]
  int64_t* out_ranks;   // [rows]
  Logits logits;
  const int64_t* chosen_ids;
  int64_t k;
};

VLLM_DECLARE_KERNEL(void argmax(int64_t* out_ids, const Logits& logits))
VLLM_DECLARE_KERNEL(void sample(const SampleArgs& args))
VLLM_DECLARE_KERNEL(void filter_logits(const Logits& logits, const FilterArgs& filters))
VLLM_DECLARE_KERNEL(void apply_penalties(const PenaltyArgs& args))
VLLM_DECLARE_KERNEL(void apply_token_bitmask(const BitmaskArgs& args))
VLLM_DECLARE_KERNEL(void topk_logprobs(const LogprobArgs& args))

}  // namespace vllm::cpu
