// Filtering and drawing: temperature, top-k, top-p, min-p, one random number a row.
#include "cpu/kernels/sampling.h"

#include "cpu/philox.h"
#include "cpu/rows/logits.h"
#include "cpu/rows/mass_band.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

constexpr float kGreedyTemperature = 1e-5f;
constexpr int64_t kRowCost = 16;  // of one logit: several passes, one exponential

// The parameters of one row.
struct Filter {
  float temperature, top_p, min_p;
  int64_t top_k;

  Filter(const FilterArgs& args, int64_t row)
      : temperature(args.temperature[row]),
        top_p(args.top_p[row]),
        min_p(args.min_p[row] < 1.0f ? args.min_p[row] : 1.0f),
        top_k(args.top_k[row]) {}
  // Also where no scaled logit would be finite any more.
  bool is_greedy(float most) const {
    return !(temperature >= kGreedyTemperature) || clean(most / temperature) == kMinusInf;
  }
};

// Of `count` unordered tokens, the last one of the shortest prefix of their order whose mass, added
// to what comes before them, reaches `target`.
Token find_last_kept(Token* tokens, int64_t count, const float* mass, double before,
                     double target) {
  const TokenBefore order;
  while (count > kShort) {
    const int64_t left = partition(tokens, count, order);
    double left_mass = 0.0;
    for (int64_t i = 0; i < left; ++i) left_mass += mass[tokens[i].id];
    if (before + left_mass >= target) {
      count = left;
    } else {
      before += left_mass;
      tokens += left;
      count -= left;
    }
  }
  insertion_sort(tokens, count, order);
  for (int64_t i = 0; i + 1 < count; ++i) {
    before += mass[tokens[i].id];
    if (before >= target) return tokens[i];
  }
  return tokens[count - 1];
}

Token find_top_k_cut(const float* x, int64_t n, const Filter& filter, const RowScratch& scratch) {
  const int64_t count = collect_first_k(x, n, filter.top_k, scratch);
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) total += scratch.mass[scratch.tokens[i].id];
  const double target = filter.top_p < 1.0f ? filter.top_p * total : __builtin_inf();
  return find_last_kept(scratch.tokens, count, scratch.mass, 0.0, target);
}

Token find_top_p_cut(const float* x, int64_t n, const Filter& filter, double total,
                     const RowScratch& scratch) {
  const double target = filter.top_p * total;
  // Tokens lighter than an n-th of half the mass that may go are not needed to reach the target.
  const double lightest = 0.5 * (1.0 - filter.top_p) * total / static_cast<double>(n);
  const MassBand band = find_band(n, static_cast<float>(lightest), target, scratch);
  const int64_t count = collect_band(x, n, band, scratch);
  return find_last_kept(scratch.tokens, count, scratch.mass, band.mass_above, target);
}

// The last token that top-k and top-p keep; its id is -1 where both keep everything.
Token find_cut(const float* x, int64_t n, const Filter& filter, double total,
               const RowScratch& scratch) {
  if (filter.top_k > 0 && filter.top_k < n) return find_top_k_cut(x, n, filter, scratch);
  if (filter.top_p < 1.0f) return find_top_p_cut(x, n, filter, total, scratch);
  return Token{0.0f, -1};
}

// Takes the mass of filtered tokens away; returns what is left, by chunk in scratch.sums.
double drop_filtered(const float* x, int64_t n, Token cut, float min_p, const RowScratch& scratch) {
  const bool has_cut = cut.id >= 0;
  for_chunks(n, [&](int64_t chunk, int64_t first, int64_t last) {
    Vec sum = zero();
    for (int64_t i = first; i < last; i += kLanes) {
      Vec mass = load(scratch.mass + i);
      mass = select_less(mass, set1(min_p), zero(), mass);
      if (has_cut) {
        const Vec logits = load_clean(x + i, last - i);
        mass = select_less(logits, set1(cut.logit), zero(), mass);
        store(scratch.mass + i, mass);
        const uint32_t unequal =
            lanes_less(logits, set1(cut.logit)) | lanes_less(set1(cut.logit), logits);
        uint32_t equal = ~unequal & ((1u << kLanes) - 1);
        for (; equal != 0 && i + kLanes > cut.id + 1; equal &= equal - 1) {
          const int64_t id = i + __builtin_ctz(equal);
          if (id > cut.id) scratch.mass[id] = 0.0f;
        }
        mass = load(scratch.mass + i);
      } else {
        store(scratch.mass + i, mass);
      }
      sum = add(sum, mass);
    }
    scratch.sums[chunk] = reduce_add(sum);
  });
  double total = 0.0;
  for (int64_t c = 0; c < ceil_div(n, kChunk); ++c) total += scratch.sums[c];
  return total;
}

// Mass of every token that is kept, in scratch.mass; returns the sum, by chunk in scratch.sums.
double weigh_row(const float* x, int64_t n, const Filter& filter, float most,
                 const RowScratch& scratch) {
  const float top = clean(most / filter.temperature);
  const double total = find_mass(x, n, filter.temperature, top, scratch);
  const Token cut = find_cut(x, n, filter, total, scratch);
  if (cut.id < 0 && !(filter.min_p > 0.0f)) return total;
  return drop_filtered(x, n, cut, filter.min_p, scratch);
}

// The first token, in order of ids, at which the mass exceeds `target`.
int64_t find_at_mass(int64_t n, double target, int64_t fallback, const RowScratch& scratch) {
  double before = 0.0;
  int64_t last_kept = fallback;
  for (int64_t c = 0; c < ceil_div(n, kChunk); ++c) {
    if (before + scratch.sums[c] > target) {
      double sum = before;
      const int64_t end = (c + 1) * kChunk < n ? (c + 1) * kChunk : n;
      for (int64_t id = c * kChunk; id < end; ++id) {
        if (scratch.mass[id] == 0.0f) continue;
        sum += scratch.mass[id];
        last_kept = id;
        if (sum > target) return id;
      }
    }
    before += scratch.sums[c];
  }
  return last_kept;
}

int64_t sample_row(const SampleArgs& args, int64_t row, const RowScratch& scratch) {
  const int64_t n = args.logits.n;
  const float* x = args.logits.data + row * args.logits.stride;
  const float most = find_maxima(x, n, scratch);
  if (most == kMinusInf) return 0;
  const int64_t best = find_first(x, n, most, scratch);
  const Filter filter(args.filters, row);
  if (filter.is_greedy(most)) return best;
  const double total = weigh_row(x, n, filter, most, scratch);
  const double u = draw_uniform(static_cast<uint64_t>(args.seeds[row]),
                                static_cast<uint64_t>(args.offsets[row]));
  return find_at_mass(n, u * total, best, scratch);
}

void filter_row(float* x, int64_t n, const Filter& filter, const RowScratch& scratch) {
  const float most = find_maxima(x, n, scratch);
  if (most == kMinusInf || filter.is_greedy(most)) return;
  weigh_row(x, n, filter, most, scratch);
  const bool is_filtered = filter.min_p > 0.0f || filter.top_p < 1.0f || filter.top_k > 0;
  for_chunks(n, [&](int64_t, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kLanes) {
      const int64_t rest = last - i < kLanes ? last - i : kLanes;
      const Vec logits = load_clean(x + i, rest);
      Vec scaled = min(div(logits, set1(filter.temperature)), set1(FLT_MAX));
      if (is_filtered) {
        scaled = select_less(zero(), load(scratch.mass + i), scaled, set1(kMinusInf));
      }
      store_n(x + i, scaled, rest);
    }
  });
}

}  // namespace

void argmax(int64_t* out_ids, const Logits& logits) {
  parallel_for(logits.rows, logits.rows * logits.n, [&](int64_t begin, int64_t end) {
    const RowScratch scratch(logits.n);
    for (int64_t row = begin; row < end; ++row) {
      const float* x = logits.data + row * logits.stride;
      const float most = find_maxima(x, logits.n, scratch);
      out_ids[row] = most == kMinusInf ? 0 : find_first(x, logits.n, most, scratch);
    }
  });
}

void sample(const SampleArgs& args) {
  const int64_t rows = args.logits.rows;
  parallel_for(rows, rows * args.logits.n * kRowCost, [&](int64_t begin, int64_t end) {
    const RowScratch scratch(args.logits.n);
    for (int64_t row = begin; row < end; ++row) {
      args.out_ids[row] = sample_row(args, row, scratch);
    }
  });
}

void filter_logits(const Logits& logits, const FilterArgs& filters) {
  parallel_for(logits.rows, logits.rows * logits.n * kRowCost, [&](int64_t begin, int64_t end) {
    const RowScratch scratch(logits.n);
    for (int64_t row = begin; row < end; ++row) {
      filter_row(logits.data + row * logits.stride, logits.n, Filter(filters, row), scratch);
    }
  });
}

}  // namespace VLLM_KERNEL_NAMESPACE
