// Op: _C::add_gated, which exists on CUDA only: what a gated expert that every token takes adds.
#include "core/registration.h"
#include "cuda/rows.cuh"

namespace vllm::cuda {

namespace {

constexpr char kOp[] = "add_gated";
constexpr int kThreads = 256;

struct GateArgs {
  void* out;
  const void *x, *gate;
  Rows out_rows, x_rows;
  int64_t gate_stride, n;
  uint32_t row_packs;
  bool is_packed;
};

// out[t] += sigmoid(gate[t]) * x[t]; the sigmoid and the product are rounded to T.
template <typename T>
__global__ void __launch_bounds__(kThreads) add_gated_kernel(const GateArgs args) {
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t row = index / args.row_packs;
  if (row >= args.out_rows.count()) return;
  const int64_t begin = static_cast<int64_t>(index % args.row_packs) * Pack<T>::kSize;
  T* out = static_cast<T*>(args.out) + args.out_rows.offset(row);
  const T* x = static_cast<const T*>(args.x) + args.x_rows.offset(row);
  const Pack<T> added = load_pack(x, begin, args.n, args.is_packed);
  Pack<T> sum = load_pack(out, begin, args.n, args.is_packed);
  const float logit = to_float(static_cast<const T*>(args.gate)[row * args.gate_stride]);
  const float gate = round_to<T>(1.0f / (1.0f + expf(-logit)));
#pragma unroll
  for (int e = 0; e < Pack<T>::kSize; ++e) {
    const float product = round_to<T>(gate * to_float(added.item[e]));
    sum.item[e] = from_float<T>(to_float(sum.item[e]) + product);
  }
  store_pack(out, begin, args.n, args.is_packed, sum);
}

void add_gated(const Tensor& out, const Tensor& x, const Tensor& gate) {
  check_tensor(kOp, "out", out, 2);
  check_float_dtype(kOp, "out", out);
  check_like(kOp, "x", x, out);
  check_tensor(kOp, "gate", gate, 2);
  check_dtype(kOp, "gate", gate, out.scalar_type());
  check_same_device(kOp, "gate", gate, out);
  check_size(kOp, "gate", gate, 0, out.size(0));
  check_size(kOp, "gate", gate, 1, 1);
  const int64_t item = static_cast<int64_t>(out.element_size());
  GateArgs args{.out = out.data_ptr(),
                .x = x.data_ptr(),
                .gate = gate.data_ptr(),
                .out_rows = rows_of(kOp, "out", out),
                .x_rows = rows_of(kOp, "x", x),
                .gate_stride = gate.stride(0),
                .n = out.size(1),
                .row_packs = static_cast<uint32_t>(ceil_div(out.size(1) * item, kPackBytes)),
                .is_packed = false};
  args.is_packed = is_packed(args.out, args.out_rows, args.n, item) &&
                   is_packed(args.x, args.x_rows, args.n, item);
  const int64_t packs = static_cast<int64_t>(args.out_rows.count()) * args.row_packs;
  CHECK_ARG(packs < 2 * kMaxRows - kThreads, kOp, ": out has shape ", shape_text(out),
            ", which is more than 64 GiB");
  if (packs == 0) return;
  const unsigned blocks = static_cast<unsigned>(ceil_div(packs, kThreads));
  const LaunchScope scope(out);
  dispatch_float(out.scalar_type(), [&]<typename T>(TypeTag<T>) {
    add_gated_kernel<T><<<blocks, kThreads, 0, scope.stream()>>>(args);
  });
  scope.check(kOp);
}

}  // namespace

VLLM_OPS(_C, m) { m.def("add_gated(Tensor! out, Tensor x, Tensor gate) -> ()"); }

VLLM_OPS_IMPL(_C, CUDA, m) { m.impl("add_gated", TORCH_BOX(&add_gated)); }

}  // namespace vllm::cuda
