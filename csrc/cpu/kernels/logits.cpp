// What happens to logits before and beside the draw: penalties, grammar masks, log-probabilities.
#include "cpu/kernels/sampling.h"
#include "cpu/rows/logits.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

// log(sum of e^x) of a row whose maximum is `most`, as most + the result.
double find_log_mass(const float* x, int64_t n, float most, const RowScratch& scratch) {
  return __builtin_log(find_mass(x, n, 1.0f, most, scratch));
}

int64_t count_above(const float* x, int64_t n, float logit, const RowScratch& scratch) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kBlock) {
    if (!(scratch.maxima[i / kBlock] > logit)) continue;
    const int64_t end = i + kBlock < n ? i + kBlock : n;
    for (int64_t j = i; j < end; j += kLanes) {
      count += __builtin_popcount(lanes_less(set1(logit), load_clean(x + j, end - j)));
    }
  }
  return count;
}

// Puts the k first tokens of the row in front of scratch.tokens, in order. Where fewer than k are
// above -inf, the others follow in order of their ids.
void sort_first_k(const float* x, int64_t n, int64_t k, const RowScratch& scratch) {
  int64_t count = collect_first_k(x, n, k, scratch);
  sort(scratch.tokens, count, TokenBefore());
  for (int64_t id = 0; id < n && count < k; ++id) {
    if (clean(x[id]) == kMinusInf) {
      scratch.tokens[count++] = Token{kMinusInf, static_cast<int32_t>(id)};
    }
  }
}

void write_row(const LogprobArgs& args, int64_t row, const RowScratch& scratch) {
  const int64_t n = args.logits.n, k = args.k, chosen = args.chosen_ids[row];
  const float* x = args.logits.data + row * args.logits.stride;
  float* logprobs = args.out_logprobs + row * (1 + k);
  int64_t* ids = args.out_ids + row * (1 + k);
  const float most = find_maxima(x, n, scratch);
  const double log_mass = most == kMinusInf ? 0.0 : find_log_mass(x, n, most, scratch);
  const auto logprob = [&](float logit) {
    if (logit == kMinusInf) return kMinusInf;
    return static_cast<float>(static_cast<double>(logit) - most - log_mass);
  };
  const float chosen_logit = clean(x[chosen]);
  ids[0] = chosen;
  logprobs[0] = logprob(chosen_logit);
  args.out_ranks[row] = 1 + count_above(x, n, chosen_logit, scratch);
  if (k == 0) return;
  sort_first_k(x, n, k, scratch);
  for (int64_t i = 0; i < k; ++i) {
    ids[1 + i] = scratch.tokens[i].id;
    logprobs[1 + i] = logprob(scratch.tokens[i].logit);
  }
}

void penalise_row(const PenaltyArgs& args, int64_t row) {
  float* x = args.logits.data + row * args.logits.stride;
  for (int64_t i = args.cu_tokens[row]; i < args.cu_tokens[row + 1]; ++i) {
    float& logit = x[args.token_ids[i]];
    const float scale = args.repetition[row];
    const int32_t count = args.output_counts[i];
    float value = logit > 0.0f ? logit / scale : logit * scale;
    value -= args.frequency[row] * static_cast<float>(count);
    if (count > 0) value -= args.presence[row];
    logit = value;
  }
}

void mask_row(float* x, int64_t n, const int32_t* words, int64_t num_words) {
  for (int64_t word = 0; word * 32 < n; ++word) {
    const uint32_t bits = word < num_words ? static_cast<uint32_t>(words[word]) : 0;
    if (bits == 0xffffffffu) continue;
    float* first = x + word * 32;
    const int64_t count = n - word * 32 < 32 ? n - word * 32 : 32;
    for (int64_t i = 0; i < count; ++i) first[i] = (bits >> i & 1) != 0 ? first[i] : kMinusInf;
  }
}

}  // namespace

void apply_penalties(const PenaltyArgs& args) {
  const int64_t rows = args.logits.rows;
  parallel_for(rows, args.cu_tokens[rows] * 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) penalise_row(args, row);
  });
}

void apply_token_bitmask(const BitmaskArgs& args) {
  const int64_t n = args.logits.n;
  parallel_for(args.num_rows, args.num_rows * n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      mask_row(args.logits.data + args.rows[i] * args.logits.stride, n,
               args.words + i * args.num_words, args.num_words);
    }
  });
}

void topk_logprobs(const LogprobArgs& args) {
  const int64_t rows = args.logits.rows, n = args.logits.n;
  parallel_for(rows, rows * n * 8, [&](int64_t begin, int64_t end) {
    const RowScratch scratch(n);
    for (int64_t row = begin; row < end; ++row) write_row(args, row, scratch);
  });
}

}  // namespace VLLM_KERNEL_NAMESPACE
