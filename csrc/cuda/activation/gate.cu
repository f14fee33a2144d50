// Op: _C::add_gated, which exists on CUDA only: what a gated expert that every token takes adds.
#include "core/registration.h"
#include "cuda/activation/row_grid.cuh"

namespace vllm::cuda {

namespace {

constexpr char kOp[] = "add_gated";

struct GateArgs {
  void* out;
  const void *x, *gate;
  Rows out_rows, x_rows;
  int64_t gate_stride, n;
  bool is_packed;
};

// out[t] += sigmoid(gate[t]) * x[t]; the sigmoid and the product are rounded to T.
template <typename T, int kPacks, bool kIsPacked>
__global__ void add_gated_kernel(const __grid_constant__ GateArgs args, const RowGrid grid) {
  await_inputs();
  let_next_start();
  const uint32_t row = grid.row();
  if (row >= grid.rows) return;
  T* out = static_cast<T*>(args.out) + args.out_rows.offset(row);
  const T* x = static_cast<const T*>(args.x) + args.x_rows.offset(row);
  const float logit = to_float(static_cast<const T*>(args.gate)[row * args.gate_stride]);
  Pack<T> added[kPacks], sums[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t begin = grid.begin_of<T>(p, kPacks);
    added[p] = load_pack(x, begin, args.n, kIsPacked);
    sums[p] = load_pack(out, begin, args.n, kIsPacked);
  }
  const float gate = round_to<T>(1.0f / (1.0f + expf(-logit)));
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    sums[p] = map_pairs<T>([&](int e) {
      const auto add = [&](int i) {
        return to_float(sums[p].item[i]) + round_to<T>(gate * to_float(added[p].item[i]));
      };
      return make_float2(add(e), add(e + 1));
    });
    store_pack(out, grid.begin_of<T>(p, kPacks), args.n, kIsPacked, sums[p]);
  }
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
                .is_packed = false};
  args.is_packed = is_packed(args.out, args.out_rows, args.n, item) &&
                   is_packed(args.x, args.x_rows, args.n, item);
  const LaunchScope scope(out);
  dispatch_float(out.scalar_type(), [&]<typename T>(TypeTag<T>) {
    dispatch_row_grid(
        kOp, args.n, Pack<T>::kSize, args.out_rows.count(), args.is_packed,
        [&]<int kPacks, bool kIsPacked>(ThreadPacks<kPacks, kIsPacked>, const RowGrid& grid) {
          launch_overlapping(scope, add_gated_kernel<T, kPacks, kIsPacked>, grid.blocks,
                             grid.threads, args, grid);
        });
  });
  scope.check(kOp);
}

}  // namespace

VLLM_OPS(_C, m) { m.def("add_gated(Tensor! out, Tensor x, Tensor gate) -> ()"); }

VLLM_OPS_IMPL(_C, CUDA, m) { m.impl("add_gated", TORCH_BOX(&add_gated)); }

}  // namespace vllm::cuda
