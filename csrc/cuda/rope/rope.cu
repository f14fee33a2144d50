// Op: _C::rotary_embedding on CUDA. A group of lanes turns one head; only the turning part is read.
#include "core/registration.h"
#include "cuda/lanes.cuh"
#include "cuda/launch.cuh"
#include "cuda/rope/head_rope.cuh"
#include "cuda/rows.cuh"

namespace vllm::cuda {

namespace {

constexpr char kOp[] = "rotary_embedding";

struct RopeHeads {
  void* data;
  uint32_t num_heads;
  int64_t token_stride, head_stride;
};

struct RopeArgs {
  RopeHeads query, key;
  const int64_t* positions;
  RopeTable table;
  uint32_t tokens;
  int lanes;
  bool is_packed;        // turning parts of all heads
  bool is_table_packed;  // see RopeTurn
};

// kIsPacked: all is whole packs, and pairs lie half a turning part apart.
template <typename T, int kPacks, bool kIsPacked>
__global__ void __launch_bounds__(kGroupThreads)
    rope_kernel(const __grid_constant__ RopeArgs args) {
  await_inputs();
  let_next_start();
  __shared__ Pack<T> exchange[kGroupThreads * kPacks];
  const LaneGroup group(args.lanes);
  const uint32_t num_heads = args.query.num_heads + args.key.num_heads;
  const uint32_t token = group.index / num_heads, number = group.index % num_heads;
  const bool is_live = token < args.tokens, is_key = number >= args.query.num_heads;
  const RopeHeads& heads = is_key ? args.key : args.query;
  const uint32_t head = is_key ? number - args.query.num_heads : number;
  T* row = static_cast<T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
  const int n = args.table.rot_dim;
  Pack<T> packs[kPacks] = {};
  Angles<T, kPacks> angles;
  RopeTurn turn{.cos_sin = nullptr,
                .rot_dim = n,
                .is_neox = kIsPacked || args.table.is_neox,
                .is_packed = kIsPacked || args.is_table_packed};
  const bool is_packed = kIsPacked || args.is_packed;
  if (is_live) {
    turn.cos_sin = args.table.row(args.positions[token]);
    if (turn.holds()) angles.load(group.lane, args.lanes, turn);
    load_lanes(packs, row, n, is_packed, group);
  }
  turn_lanes(packs, group.lane, args.lanes, is_live, turn, angles,
             group.share<T>(exchange, kPacks));
  if (is_live) store_lanes(packs, row, n, is_packed, group);
}

// [T, heads * head_size] or [T, heads, head_size], tokens and heads at any stride.
RopeHeads heads_of(const char* name, const Tensor& t, int64_t tokens, int64_t head_size) {
  check_float_dtype(kOp, name, t);
  check_tensor(kOp, name, t, t.dim() == 3 ? 3 : 2);
  check_size(kOp, name, t, 0, tokens);
  RopeHeads heads{
      .data = t.data_ptr(), .num_heads = 0, .token_stride = t.stride(0), .head_stride = head_size};
  if (t.dim() == 3) {
    check_size(kOp, name, t, 2, head_size);
    heads.num_heads = static_cast<uint32_t>(t.size(1));
    heads.head_stride = t.stride(1);
  } else {
    CHECK_ARG(t.size(1) % head_size == 0, kOp, ": ", name, " has shape ", shape_text(t),
              ", expected [T, heads * ", head_size, "]");
    heads.num_heads = static_cast<uint32_t>(t.size(1) / head_size);
  }
  return heads;
}

bool are_heads_packed(const RopeHeads& heads, int64_t rot_dim, int64_t item) {
  return is_pack_aligned(heads.data) && rot_dim * item % kPackBytes == 0 &&
         heads.token_stride * item % kPackBytes == 0 && heads.head_stride * item % kPackBytes == 0;
}

void rotary_embedding_op(const Tensor& positions, const Tensor& query, const Tensor& key,
                         int64_t head_size, const Tensor& cos_sin_cache, bool is_neox) {
  check_tensor(kOp, "positions", positions, 1);
  check_dtype(kOp, "positions", positions, ScalarType::Long);
  CHECK_ARG(head_size > 0, kOp, ": head_size must be positive, got ", head_size);
  const int64_t tokens = positions.size(0), item = static_cast<int64_t>(query.element_size());
  RopeArgs args{.query = heads_of("query", query, tokens, head_size),
                .key = heads_of("key", key, tokens, head_size),
                .positions = static_cast<const int64_t*>(positions.data_ptr()),
                .table = rope_table(kOp, cos_sin_cache, head_size, is_neox),
                .tokens = static_cast<uint32_t>(tokens),
                .lanes = 0,
                .is_packed = false,
                .is_table_packed = false};
  check_dtype(kOp, "key", key, query.scalar_type());
  check_same_device(kOp, "key", key, query);
  check_same_device(kOp, "positions", positions, query);
  check_same_device(kOp, "cos_sin_cache", cos_sin_cache, query);
  const int64_t rot_dim = args.table.rot_dim;
  args.is_packed =
      are_heads_packed(args.query, rot_dim, item) && are_heads_packed(args.key, rot_dim, item);
  args.is_table_packed = args.table.is_packed(item);
  const int64_t num_groups = tokens * (args.query.num_heads + args.key.num_heads);
  if (num_groups == 0) return;
  const LaunchScope scope(query);
  dispatch_lanes(
      kOp, query.scalar_type(), rot_dim, [&]<typename T, int kPacks>(LanePacks<T, kPacks>) {
        args.lanes = lanes_of<T>(rot_dim);
        const bool is_packed = args.is_packed && args.is_table_packed && is_neox;
        launch_overlapping(scope,
                           is_packed ? rope_kernel<T, kPacks, true> : rope_kernel<T, kPacks, false>,
                           group_blocks(kOp, num_groups, args.lanes), kGroupThreads, args);
      });
  scope.check(kOp);
}

}  // namespace

VLLM_OPS_IMPL(_C, CUDA, m) { m.impl("rotary_embedding", TORCH_BOX(&rotary_embedding_op)); }

}  // namespace vllm::cuda
