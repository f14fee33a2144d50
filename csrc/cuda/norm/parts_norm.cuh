// Sum of a product's parts, addition to the residual stream and norm in one pass: for rows of whole
// warps of packs, as long as one pack a thread holds. It adds in the order of norm_long_row_kernel.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/launch.cuh"
#include "cuda/norm/row_norm.cuh"
#include "cuda/parts.cuh"

namespace vllm::cuda {

inline constexpr int64_t kMaxPartsRow = 4096;
inline constexpr int64_t kHalfRun = 32 * kPackBytes / 2;  // 16-bit numbers of a run
inline constexpr int64_t kMaxRowBlocks = 8;               // in a cluster
inline constexpr int64_t kMaxFewBlocks = 32;              // of all rows, see count_row_blocks

struct PartsNormArgs {
  Parts parts;
  void *out, *residual;
  const void* weight;
  int64_t out_stride, residual_stride, n;
  float epsilon;
  uint32_t row_blocks;  // a cluster
};

// A cluster has a row, since its parts are much for one processor. A warp has a run of 32 packs.
// The sums of runs are added as in row_scale. What comes before await_inputs: see launch.cuh.
template <typename T, typename W, int kParts>
__global__ void __launch_bounds__(kMaxPartsRow / Pack<T>::kSize)
    parts_norm_kernel(const __grid_constant__ PartsNormArgs args) {
  constexpr int kRunItems = 32 * Pack<T>::kSize;
  extern __shared__ __align__(kPackBytes) float parts_memory[];
  __shared__ float of_runs[kMaxPartsRow / kRunItems];
  const int64_t row = blockIdx.x / args.row_blocks;
  const int rank = static_cast<int>(blockIdx.x % args.row_blocks);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int run = rank * (static_cast<int>(blockDim.x) / 32) + warp;
  const int num_runs = static_cast<int>(args.n) / kRunItems;
  const bool is_live = run < num_runs;  // else the warp is there for the others
  const int64_t begin = run * kRunItems + lane * Pack<T>::kSize;
  arrive_cluster();
  WeightPack<T, W> weights[1];
  weights[0].load(static_cast<const W*>(args.weight), begin, args.n, true);
  let_next_start();
  await_inputs();
  T* residual = static_cast<T*>(args.residual) + row * args.residual_stride;
  float* of_warp = parts_memory + warp * kRunItems * kParts;
  Pack<T> packs[1] = {}, old[1];
  if (is_live) {
    bring_parts<kParts, 32>(args.parts.data + row * args.n + run * kRunItems, args.parts.stride,
                            of_warp, lane);
    old[0] = load_fresh(residual + begin);
    float sum[Pack<T>::kSize];
    sum_parts<kParts, 32>(of_warp, lane, sum);
    packs[0] = map_pairs<T>([&](int e) { return make_float2(sum[e], sum[e + 1]); });
    add_row(packs, old);
    store_pack(residual, begin, args.n, true, packs[0]);
  }
  const float of_run = sum_lanes(sum_of_squares(packs[0], 0.0f), 32);
  await_cluster();  // the others have begun
  if (is_live && lane < static_cast<int>(args.row_blocks)) {
    store_to_block(of_runs + run, lane, of_run);
  }
  arrive_cluster();
  await_cluster();
  const float sum = sum_lanes(lane < num_runs ? of_runs[lane] : 0.0f, 32);
  scale_row(packs, weights, inverse_rms(sum, args.n, args.epsilon));
  store_pack(static_cast<T*>(args.out) + row * args.out_stride, begin, args.n, true, packs[0]);
}

// Few rows have a cluster of several blocks each. A block of the product behind, whose ring takes
// all memory of a processor, begins where there is none of these.
inline unsigned count_row_blocks(const LaunchScope& scope, int64_t num_rows) {
  int64_t blocks = 1;
  if (!scope.can_overlap()) return 1;  // nor are there clusters
  while (blocks < kMaxRowBlocks && 2 * blocks * num_rows <= kMaxFewBlocks) blocks *= 2;
  return static_cast<unsigned>(blocks);
}

inline bool serves_parts_norm(const Tensor& out, const Parts& parts, const Tensor& residual,
                              const Tensor& weight) {
  const int64_t n = residual.size(1), item = static_cast<int64_t>(residual.element_size());
  const auto has_packs = [&](const Tensor& t) {
    return is_packed(t.data_ptr(), {static_cast<uint32_t>(t.size(0)), 1, t.stride(0), 0}, n, item);
  };
  return parts.count <= kMaxFastParts && item == 2 && n > max_lane_row<bf16>(kMaxLanePacks) &&
         n <= kMaxPartsRow && n % kHalfRun == 0 && residual.size(0) < kMaxRows &&
         is_pack_aligned(parts.data) && is_pack_aligned(weight.data_ptr()) && has_packs(out) &&
         has_packs(residual);
}

// Returns false, and launches nothing, where the kernel does not serve the shape.
inline bool launch_parts_norm(const LaunchScope& scope, const Tensor& out, const Parts& parts,
                              const Tensor& residual, const Tensor& weight, double epsilon) {
  if (!serves_parts_norm(out, parts, residual, weight)) return false;
  const int64_t n = residual.size(1);
  const unsigned row_blocks = count_row_blocks(scope, residual.size(0));
  const unsigned runs = static_cast<unsigned>(ceil_div(n / kHalfRun, row_blocks));  // of a block
  const PartsNormArgs args{.parts = parts,
                           .out = out.data_ptr(),
                           .residual = residual.data_ptr(),
                           .weight = weight.data_ptr(),
                           .out_stride = out.stride(0),
                           .residual_stride = residual.stride(0),
                           .n = n,
                           .epsilon = static_cast<float>(epsilon),
                           .row_blocks = row_blocks};
  const unsigned blocks = static_cast<unsigned>(residual.size(0)) * row_blocks;
  bool is_served = false;
  const auto launch = [&]<typename T, typename W>(TypeTag<T>, TypeTag<W>) {
    dispatch_parts(parts.count, [&]<int kParts>(PartCount<kParts>) {
      const auto kernel = parts_norm_kernel<T, W, kParts>;
      const BlockSharing sharing{.shared_bytes = sizeof(float) * kParts * runs * kHalfRun,
                                 .cluster_blocks = row_blocks};
      is_served = prepare_sharing(kernel, sharing.shared_bytes);
      if (is_served) launch_sharing(scope, sharing, kernel, blocks, runs * 32, args);
    });
  };
  dispatch_16_bits(residual.scalar_type(), weight.scalar_type(), launch);
  return is_served;
}

}  // namespace vllm::cuda
