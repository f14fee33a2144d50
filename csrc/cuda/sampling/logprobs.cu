// Op: _C::topk_logprobs on CUDA: log-softmax of the chosen token and of the k most likely ones.
#include "core/registration.h"
#include "cuda/sampling/cut.cuh"
#include "cuda/sampling/launch.cuh"

namespace vllm::cuda {

namespace {

struct LogprobArgs {
  Logits logits;
  float* out_logprobs;
  int64_t *out_ids, *out_ranks;
  const int64_t* chosen_ids;
  int k;
};

// Of one row.
struct LogSoftmax {
  float most;
  double log_mass;

  __device__ float operator()(float x) const {
    return x == kMinusInf ? kMinusInf : static_cast<float>(double{x} - most - log_mass);
  }
};

// Collects the first `count` tokens above -inf, perhaps a few more.
__device__ int collect_first(Team& team, Word count, const LinearBins& bins, const Scale& scale,
                             Shared& shared) {
  const Place place = find_place(Measure::kCount, count, shared);
  if (place.count <= kFewTokens) {
    return collect_candidates(team, [&](float x, int) { return bins(x) <= place.bin; }, shared);
  }
  Mass unused;
  const Order cut = search_row(team, Measure::kCount, count, scale, true, unused, shared);
  return collect_candidates(team, [&](float x, int id) { return order_of(x, id) >= cut; }, shared);
}

// Ids of the first tokens at -inf, by one warp: they follow those above it.
__device__ void write_forbidden(const Team& team, int64_t* ids, float* logprobs, int count) {
  int written = 0;
  for (int begin = 0; begin < team.n && written < count; begin += 32) {
    const int id = begin + lane_id();
    const bool is_forbidden = id < team.n && clean(team.x[id]) == kMinusInf;
    const unsigned found = __ballot_sync(~0u, is_forbidden);
    const int index = written + __popc(found & ((1u << lane_id()) - 1));
    if (is_forbidden && index < count) {
      ids[index] = id;
      logprobs[index] = kMinusInf;
    }
    written += __popc(found);
  }
}

__global__ void __launch_bounds__(kThreads) logprob_kernel(LogprobArgs args, RowScratch* scratch) {
  __shared__ Shared shared;
  const int64_t row = blockIdx.x;
  Team team(args.logits.data + row * args.logits.stride, args.logits.n, scratch);
  float* logprobs = args.out_logprobs + row * (1 + args.k);
  int64_t* ids = args.out_ids + row * (1 + args.k);
  const int64_t chosen = args.chosen_ids[row];
  DEVICE_CHECK(chosen >= 0 && chosen < args.logits.n);
  const float chosen_logit = clean(team.x[chosen]);
  float low;
  const float most = logit_of_order(find_range(team, low, shared));
  Word above = 0, count = 0;
  Mass mass = 0;
  int found = 0;
  if (most != kMinusInf) {
    for_tokens(team, [&](float x, int) { above += x > chosen_logit ? 1 : 0; });
    Word unused = 0;
    reduce_row(team, above, unused, Add(), shared);
    const Scale scale{1.0f, most};
    const LinearBins bins(most, low, -kNoMass);
    fill_histogram(team, bins, scale, true, shared);
    sum_bins(count, mass, shared);
    count = min(count, static_cast<Word>(args.k));
    if (count > 0) found = collect_first(team, count, bins, scale, shared);
  }
  if (team.part != 0) return;
  const double log_mass =
      most == kMinusInf ? 0.0 : log(static_cast<double>(mass) * exp2(-double{kMassBits}));
  const LogSoftmax logprob{most, log_mass};
  if (threadIdx.x == 0) {
    ids[0] = chosen;
    logprobs[0] = logprob(chosen_logit);
    args.out_ranks[row] = static_cast<int64_t>(1 + above);
  }
  for (int i = threadIdx.x; i < found; i += kThreads) {
    const Order own = shared.candidates[i];
    int before = 0;
    for (int j = 0; j < found; ++j) before += shared.candidates[j] > own ? 1 : 0;
    if (before >= args.k) continue;
    ids[1 + before] = id_of(own);
    logprobs[1 + before] = logprob(logit_of_order(own));
  }
  const int rest = args.k - static_cast<int>(count);
  if (rest > 0 && warp_id() == 0) {
    write_forbidden(team, ids + 1 + count, logprobs + 1 + count, rest);
  }
}

void topk_logprobs(const Tensor& out_logprobs, const Tensor& out_ids, const Tensor& out_ranks,
                   const Tensor& logits, const Tensor& chosen_ids) {
  const char* op = "topk_logprobs";
  const Logits view = logits_of(op, logits);
  check_tensor(op, "out_ids", out_ids, 2);
  const int64_t width = out_ids.size(1), widest = 1 + std::min<int64_t>(view.n, kFewTokens);
  CHECK_ARG(width >= 1 && width <= widest, op, ": out_ids has shape ", shape_text(out_ids),
            ", its last size must be 1 to ", widest, " on CUDA");
  const LogprobArgs args{
      .logits = view,
      .out_logprobs = matrix_of<float>(op, "out_logprobs", out_logprobs, view.rows, width, logits),
      .out_ids = matrix_of<int64_t>(op, "out_ids", out_ids, view.rows, width, logits),
      .out_ranks = vector_of<int64_t>(op, "out_ranks", out_ranks, view.rows, logits),
      .chosen_ids = vector_of<int64_t>(op, "chosen_ids", chosen_ids, view.rows, logits),
      .k = static_cast<int>(width - 1)};
  launch_teams(op, logprob_kernel, args, logits);
}

}  // namespace

VLLM_OPS_IMPL(_C, CUDA, m) { m.impl("topk_logprobs", TORCH_BOX(&topk_logprobs)); }

}  // namespace vllm::cuda
