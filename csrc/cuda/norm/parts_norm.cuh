// Sum of a product's parts, addition to the residual stream and norm in one pass: for rows of whole
// warps of packs, as long as one pack a thread holds. It adds in the order of norm_long_row_kernel.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/norm/row_norm.cuh"
#include "cuda/parts.cuh"

namespace vllm::cuda {

inline constexpr int64_t kMaxPartsRow = 4096;

struct PartsNormArgs {
  Parts parts;
  void *out, *residual;
  const void* weight;
  int64_t out_stride, residual_stride, n;
  float epsilon;
};

// A block has a row. What comes before await_inputs and after let_next_start: see launch.cuh.
template <typename T, typename W, int kParts>
__global__ void __launch_bounds__(kMaxPartsRow / Pack<T>::kSize)
    parts_norm_kernel(const __grid_constant__ PartsNormArgs args) {
  constexpr int kWarpItems = 32 * Pack<T>::kSize;
  extern __shared__ __align__(kPackBytes) float parts_memory[];
  __shared__ float of_runs[kMaxRuns];
  WeightPack<T, W> weights[1];
  load_row_weight(weights, args.weight, args.n, true);
  let_next_start();
  await_inputs();
  T* residual = static_cast<T*>(args.residual) + blockIdx.x * args.residual_stride;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_begin = static_cast<int>(threadIdx.x) / 32 * kWarpItems;
  float* of_warp = parts_memory + warp_begin * kParts;
  bring_parts<kParts, 32>(args.parts.data + blockIdx.x * args.n + warp_begin, args.parts.stride,
                          of_warp, lane);
  Pack<T> packs[1], old[1];
  old[0] = load_fresh(residual + row_begin<T>(0));
  float sum[Pack<T>::kSize];
  sum_parts<kParts, 32>(of_warp, lane, sum);
  packs[0] = map_pairs<T>([&](int e) { return make_float2(sum[e], sum[e + 1]); });
  add_row(packs, old);
  store_row(packs, residual, args.n, true);
  scale_row(packs, weights, row_scale(packs, args.n, args.epsilon, of_runs));
  store_row(packs, static_cast<T*>(args.out) + blockIdx.x * args.out_stride, args.n, true);
}

// Returns false, and launches nothing, where the kernel does not serve the shape.
inline bool launch_parts_norm(const LaunchScope& scope, const Tensor& out, const Parts& parts,
                              const Tensor& residual, const Tensor& weight, double epsilon) {
  const int64_t n = residual.size(1), item = static_cast<int64_t>(residual.element_size());
  const auto rows = [&](const Tensor& t) {
    return Rows{static_cast<uint32_t>(t.size(0)), 1, t.stride(0), 0};
  };
  if (parts.count > kMaxFastParts || item != 2 || n > kMaxPartsRow || n % (32 * kPackBytes / 2) ||
      n <= max_lane_row<bf16>(kMaxLanePacks) || !is_pack_aligned(parts.data) ||
      !is_pack_aligned(weight.data_ptr()) || !is_packed(out.data_ptr(), rows(out), n, item) ||
      !is_packed(residual.data_ptr(), rows(residual), n, item) || residual.size(0) >= kMaxRows) {
    return false;
  }
  const PartsNormArgs args{.parts = parts,
                           .out = out.data_ptr(),
                           .residual = residual.data_ptr(),
                           .weight = weight.data_ptr(),
                           .out_stride = out.stride(0),
                           .residual_stride = residual.stride(0),
                           .n = n,
                           .epsilon = static_cast<float>(epsilon)};
  const unsigned blocks = static_cast<unsigned>(residual.size(0));
  bool is_served = false;
  const auto launch = [&]<typename T, typename W>(TypeTag<T>, TypeTag<W>) {
    dispatch_parts(parts.count, [&]<int kParts>(PartCount<kParts>) {
      const auto kernel = parts_norm_kernel<T, W, kParts>;
      const size_t shared_bytes = sizeof(float) * kParts * n;
      is_served = prepare_sharing(kernel, shared_bytes);
      if (!is_served) return;
      launch_sharing(scope, shared_bytes, kernel, blocks, static_cast<unsigned>(n / Pack<T>::kSize),
                     args);
    });
  };
  const auto launch_type = [&]<typename T>(TypeTag<T> type) {
    dispatch_weight<T>(weight.scalar_type(), [&](auto weight_type) { launch(type, weight_type); });
  };
  if (residual.scalar_type() == ScalarType::BFloat16) {
    launch_type(TypeTag<bf16>{});
  } else {
    launch_type(TypeTag<half>{});
  }
  return is_served;
}

}  // namespace vllm::cuda
