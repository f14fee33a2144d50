// cap * tanh(x * scale / cap), in place. NaN stays NaN: the sampler must see it.
#include "cpu/kernels/soft_cap.h"

#include "cpu/parallel.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

template <typename T>
void cap_rows(const SoftCapArgs& args) {
  // Pieces of rows, since a step may have one long row.
  constexpr int64_t kPiece = 4096, kElementCost = 16;
  const int64_t pieces = (args.n + kPiece - 1) / kPiece;
  const Vec scale = set1(args.scale), cap = set1(args.cap), zero = set1(0.0f);
  const auto capped = [&](Vec x) {
    const Vec y = mul(tanh(div(mul(x, scale), cap)), cap);
    return select_less(x, zero, y, select_less(zero, x, y, x));  // neither: zero or NaN
  };
  parallel_for(args.rows * pieces, args.rows * args.n * kElementCost,
               [&](int64_t begin, int64_t end) {
                 for (int64_t piece = begin; piece < end; ++piece) {
                   const int64_t first = piece % pieces * kPiece;
                   const int64_t last = first + kPiece < args.n ? first + kPiece : args.n;
                   T* row = static_cast<T*>(args.x) + piece / pieces * args.stride;
                   int64_t i = first;
                   for (; i + kLanes <= last; i += kLanes) store(row + i, capped(load(row + i)));
                   if (i < last) store_n(row + i, capped(load_n(row + i, last - i)), last - i);
                 }
               });
}

}  // namespace

void soft_cap(const SoftCapArgs& args) {
  args.element == Element::kFloat ? cap_rows<float>(args) : cap_rows<bf16>(args);
}

}  // namespace VLLM_KERNEL_NAMESPACE
