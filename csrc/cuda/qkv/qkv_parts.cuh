// The fused query, key and value op over a product that is still in parts, of a few tokens whose
// heads have 128 elements of 16 bits.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/parts.cuh"
#include "cuda/qkv/qkv_args.cuh"

namespace vllm::cuda {

inline constexpr int kPartsHeadSize = 128;

// As qkv_whole_heads_kernel with a head for each group of lanes, but value heads are written too.
// What comes before await_inputs and after let_next_start: see launch.cuh.
template <typename T, typename W, int kParts>
__global__ void __launch_bounds__(kGroupThreads)
    qkv_parts_kernel(const __grid_constant__ QkvArgs args, const __grid_constant__ Parts parts,
                     const T* bias) {
  constexpr int kItems = Pack<T>::kSize, kLanes = kPartsHeadSize / kItems;
  __shared__ __align__(kPackBytes) float memory[kGroupThreads * kItems * kParts];
  const LaneGroup group(kLanes);
  const uint32_t num_heads = args.num_heads + 2 * args.num_kv_heads;
  const bool is_live = group.index / num_heads < args.tokens;
  const uint32_t token = min(group.index / num_heads, args.tokens - 1);
  const uint32_t head = group.index % num_heads;
  const uint32_t first_value = args.num_heads + args.num_kv_heads;
  const bool is_query = head < args.num_heads, is_value = head >= first_value;
  const int64_t n = int64_t{num_heads} * kPartsHeadSize, first = int64_t{head} * kPartsHeadSize;
  const int64_t column = first + group.begin_of<T>(0);
  const bool has_norm = args.q_weight != nullptr, has_turn = args.table.rot_dim > 0;
  WeightPack<T, W> weight[1] = {};
  if (!is_value) {
    load_head_weight(weight, is_query ? args.q_weight : args.k_weight, group, true, kPartsHeadSize);
  }
  float added[kItems] = {};
  if (bias != nullptr) unpack(load_pack(bias, column, n, true), added);
  let_next_start();
  await_inputs();
  float* of_group = memory + (static_cast<int>(threadIdx.x) - group.lane) * kItems * kParts;
  bring_parts<kParts, kLanes>(parts.data + token * n + first, parts.stride, of_group, group.lane);
  const int2 slot = args.slots[token];
  RopeTurn turn{
      .cos_sin = nullptr, .rot_dim = args.table.rot_dim, .is_neox = true, .is_packed = true};
  Angles<T, 1> angles;
  if (has_turn) {
    turn.cos_sin = args.table.row(args.positions[token]);
    angles.load(group.lane, kLanes, turn);
  }
  float sum[kItems];
  sum_parts<kParts, kLanes>(of_group, group.lane, sum);
  if (bias != nullptr) {
#pragma unroll
    for (int e = 0; e < kItems; ++e) sum[e] += added[e];
  }
  Pack<T> packs[1];
  packs[0] = map_pairs<T>([&](int e) { return make_float2(sum[e], sum[e + 1]); });
  if (has_norm) norm_lanes(packs, weight, kLanes, !is_value, kPartsHeadSize, args.epsilon);
  if (has_turn) turn_halves_packed(packs, group.lane, kLanes, !is_value, turn.rot_dim, angles);
  if (!is_live) return;
  store_bits(static_cast<T*>(args.qkv) + token * args.token_stride + column, bits_of(packs[0]));
  if (is_query || slot.x < 0) return;
  T* target = is_value ? args.value_cache.row<T>(slot, head - first_value)
                       : args.key_cache.row<T>(slot, head - args.num_heads);
  store_bits(target + group.begin_of<T>(0), bits_of(packs[0]));
}

// Returns false, and launches nothing, where the kernel does not serve the shape.
inline bool launch_qkv_parts(const LaunchScope& scope, const QkvArgs& args, ScalarType type,
                             ScalarType weight_type, const Parts& parts, const void* bias) {
  if (type == ScalarType::Float || args.head_size != kPartsHeadSize || !is_all_packed(args) ||
      !are_norms_alike(args) || parts.count > kMaxFastParts || !is_pack_aligned(parts.data) ||
      !is_pack_aligned(bias)) {
    return false;
  }
  const int64_t num_groups = int64_t{args.tokens} * (args.num_heads + 2 * args.num_kv_heads);
  dispatch_16_bits(type, weight_type, [&]<typename T, typename W>(TypeTag<T>, TypeTag<W>) {
    dispatch_parts(parts.count, [&]<int kParts>(PartCount<kParts>) {
      const auto kernel = qkv_parts_kernel<T, W, kParts>;
      static_cast<void>(prepare_sharing(kernel, 0));  // no more than any block can have
      const unsigned blocks =
          group_blocks("qkv_norm_rope_cache", num_groups, lanes_of<T>(kPartsHeadSize));
      launch_overlapping(scope, kernel, blocks, kGroupThreads, args, parts,
                         static_cast<const T*>(bias));
    });
  });
  return true;
}

}  // namespace vllm::cuda
