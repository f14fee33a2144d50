// Ops: _C::sample, _C::filter_logits on CUDA: temperature, top-k, top-p, min-p, one random number a
// row.
#include "core/registration.h"
#include "cuda/sampling/cut.cuh"
#include "cuda/sampling/launch.cuh"
#include "cuda/sampling/philox.cuh"

namespace vllm::cuda {

namespace {

struct FilterArgs {
  Logits logits;
  const float *temperature, *top_p;
  const int32_t* top_k;
  const float* min_p;

  __device__ Filter row(int64_t row) const {
    return Filter{.temperature = temperature[row],
                  .top_p = top_p[row],
                  .min_p = min_p[row] < 1.0f ? min_p[row] : 1.0f,
                  .top_k = top_k[row]};
  }
};

struct SampleArgs {
  FilterArgs filters;
  int64_t* out_ids;
  const int64_t *seeds, *offsets;
};

// The place of a random number in [0, 1) on the masses: a token is drawn if the sum up to and with
// it exceeds that.
__device__ Word place_of(double uniform, Mass total) {
  return min(static_cast<Word>(uniform * static_cast<double>(total)), total - 1);
}

// Draws among the candidates of a cut, in order of their ids, by one block.
__device__ int draw_candidate(const Cut& cut, float min_p, const Scale& scale, double uniform,
                              Shared& shared) {
  Mass total = 0;
  Word unused = 0;
  for (int i = threadIdx.x; i < cut.num_candidates; i += kThreads) {
    const Order order = shared.candidates[i];
    const bool is_kept = order >= cut.order && !(scale.weigh(logit_of_order(order)) < min_p);
    if (!is_kept) shared.masses[i] = 0;
    total += shared.masses[i];
  }
  reduce_block(total, unused, Add(), shared);
  const Word target = place_of(uniform, total);
  for (int i = threadIdx.x; i < cut.num_candidates; i += kThreads) {
    const int id = id_of(shared.candidates[i]);
    Mass sum = 0;
    for (int j = 0; j < cut.num_candidates; ++j) {
      if (id_of(shared.candidates[j]) <= id) sum += shared.masses[j];
    }
    if (sum > target && sum - shared.masses[i] <= target) shared.found = id;
  }
  __syncthreads();
  return shared.found;
}

__global__ void __launch_bounds__(kThreads) sample_kernel(SampleArgs args, RowScratch* scratch) {
  __shared__ Shared shared;
  const int64_t row = blockIdx.x;
  const Logits& logits = args.filters.logits;
  Team team(logits.data + row * logits.stride, logits.n, scratch);
  float low;
  const Order best = find_range(team, low, shared);
  const float most = logit_of_order(best);
  const Filter filter = args.filters.row(row);
  if (most == kMinusInf || filter.is_greedy(most)) {
    if (team.part == 0 && threadIdx.x == 0) args.out_ids[row] = id_of(best);
    return;
  }
  const Scale scale{filter.temperature, clean(most / filter.temperature)};
  Cut cut{0, 0};
  if (filter.has_cut(team.n)) cut = find_cut(team, filter, scale, most, low, shared);
  const auto draw = [&] {
    return draw_uniform(static_cast<uint64_t>(args.seeds[row]),
                        static_cast<uint64_t>(args.offsets[row]));
  };
  if (cut.num_candidates > 0) {
    if (team.part != 0) return;
    const int id = draw_candidate(cut, filter.min_p, scale, draw(), shared);
    if (threadIdx.x == 0) args.out_ids[row] = id;
    return;
  }
  const auto weight = [&](float x, int id) -> Word {
    const float own = scale.weigh(x);
    return own < filter.min_p || order_of(x, id) < cut.order ? 0 : mass_of(own);
  };
  const RowSum sum = sum_row(team, weight, shared);
  const int id = find_at_sum(team, sum, place_of(draw(), sum.total), weight, shared);
  if (id >= 0 && threadIdx.x == 0) args.out_ids[row] = id;
}

__global__ void __launch_bounds__(kThreads) filter_kernel(FilterArgs args, RowScratch* scratch) {
  __shared__ Shared shared;
  const int64_t row = blockIdx.x;
  float* x = args.logits.data + row * args.logits.stride;
  Team team(x, args.logits.n, scratch);
  float low;
  const float most = logit_of_order(find_range(team, low, shared));
  const Filter filter = args.row(row);
  if (most == kMinusInf || filter.is_greedy(most)) return;
  const Scale scale{filter.temperature, clean(most / filter.temperature)};
  Cut cut{0, 0};
  if (filter.has_cut(team.n)) cut = find_cut(team, filter, scale, most, low, shared);
  const bool is_filtered = filter.top_p < 1.0f || filter.top_k > 0 || filter.min_p > 0.0f;
  for_tokens(team, [&](float logit, int id) {
    const float own = scale.weigh(logit);
    const bool is_kept =
        !is_filtered || (own > 0.0f && !(own < filter.min_p) && order_of(logit, id) >= cut.order);
    x[id] = is_kept ? scale.divide(logit) : kMinusInf;
  });
}

FilterArgs filters_of(const char* op, const Tensor& logits, const Tensor& temperature,
                      const Tensor& top_p, const Tensor& top_k, const Tensor& min_p) {
  const Logits view = logits_of(op, logits);
  return FilterArgs{
      .logits = view,
      .temperature = vector_of<float>(op, "temperature", temperature, view.rows, logits),
      .top_p = vector_of<float>(op, "top_p", top_p, view.rows, logits),
      .top_k = vector_of<int32_t>(op, "top_k", top_k, view.rows, logits),
      .min_p = vector_of<float>(op, "min_p", min_p, view.rows, logits)};
}

void sample(const Tensor& out_ids, const Tensor& logits, const Tensor& temperature,
            const Tensor& top_p, const Tensor& top_k, const Tensor& min_p, const Tensor& seeds,
            const Tensor& offsets) {
  const char* op = "sample";
  const FilterArgs filters = filters_of(op, logits, temperature, top_p, top_k, min_p);
  const int64_t rows = filters.logits.rows;
  const SampleArgs args{.filters = filters,
                        .out_ids = vector_of<int64_t>(op, "out_ids", out_ids, rows, logits),
                        .seeds = vector_of<int64_t>(op, "seeds", seeds, rows, logits),
                        .offsets = vector_of<int64_t>(op, "offsets", offsets, rows, logits)};
  launch_teams(op, sample_kernel, args, logits);
}

void filter_logits(const Tensor& logits, const Tensor& temperature, const Tensor& top_p,
                   const Tensor& top_k, const Tensor& min_p) {
  const char* op = "filter_logits";
  launch_teams(op, filter_kernel, filters_of(op, logits, temperature, top_p, top_k, min_p), logits);
}

}  // namespace

VLLM_OPS_IMPL(_C, CUDA, m) {
  m.impl("sample", TORCH_BOX(&sample));
  m.impl("filter_logits", TORCH_BOX(&filter_logits));
}

}  // namespace vllm::cuda
