// Op: _C::qkv_norm_rope_cache: between the projection to query, key and value and the attention, in
// one launch: norm and rotary embedding of every query and key head, rows of keys and values into
// the cache. It exists on CUDA only; its naive twin is the composition of the separate ops, with
// which it agrees bit for bit. It can begin with the parts of the projection, whose sum it takes.
#include "core/registration.h"
#include "cuda/launch.cuh"
#include "cuda/qkv/qkv_args.cuh"
#include "cuda/qkv/qkv_parts.cuh"

namespace vllm::cuda {

namespace {

constexpr char kOp[] = "qkv_norm_rope_cache";

// What a group of lanes knows of its token.
template <typename T, typename W, int kPacks>
struct TokenPart {
  bool is_packed, is_cache_packed;  // as in QkvArgs
  int2 slot;
  RopeTurn turn;
  Angles<T, kPacks> angles;
  WeightPack<T, W> q_weights[kPacks], k_weights[kPacks];
};

// Norms, turns and stores one head. Every lane of the warp takes part.
template <typename T, typename W, int kPacks>
__device__ __forceinline__ void finish_head(Pack<T> (&packs)[kPacks], uint32_t head, bool is_live,
                                            T* row, T* exchange, const LaneGroup& group,
                                            const TokenPart<T, W, kPacks>& part,
                                            const QkvArgs& args) {
  const bool is_query = head < args.num_heads;
  const bool is_value = head >= args.num_heads + args.num_kv_heads;
  const bool is_changed = is_live && !is_value;
  if (args.q_weight != nullptr || args.k_weight != nullptr) {
    const bool is_normed = (is_query ? args.q_weight : args.k_weight) != nullptr;
    WeightPack<T, W> weights[kPacks];  // chosen by value: an address would push both to memory
#pragma unroll
    for (int p = 0; p < kPacks; ++p) weights[p] = part.q_weights[p];
    if (!is_query) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) weights[p] = part.k_weights[p];
    }
    norm_lanes(packs, weights, args.lanes, is_changed && is_normed, args.head_size, args.epsilon);
  }
  if (part.turn.rot_dim > 0) {
    turn_lanes(packs, group.lane, args.lanes, is_changed, part.turn, part.angles, exchange);
  }
  if (is_changed) store_lanes(packs, row, args.head_size, part.is_packed, group);
  if (!is_live || is_query || part.slot.x < 0) return;
  const uint32_t first = is_value ? args.num_heads + args.num_kv_heads : args.num_heads;
  T* target = is_value ? args.value_cache.row<T>(part.slot, head - first)
                       : args.key_cache.row<T>(part.slot, head - first);
  store_lanes(packs, target, args.head_size, part.is_cache_packed, group);
}

// A group of lanes serves one head of a token: query heads come first, then key heads, then value
// heads. kIsPacked: all is whole packs, and pairs lie half a turning part apart; behind a branch,
// the load of a head would be waited for before the next is sent.
template <typename T, typename W, int kPacks, bool kIsPacked>
__global__ void __launch_bounds__(kGroupThreads)
    qkv_norm_rope_cache_kernel(const __grid_constant__ QkvArgs args) {
  __shared__ Pack<T> exchange[kGroupThreads * kPacks];
  const LaneGroup group(args.lanes);
  TokenPart<T, W, kPacks> part;
  part.is_packed = kIsPacked || args.is_packed;
  part.is_cache_packed = kIsPacked || args.is_cache_packed;
  part.slot = make_int2(-1, 0);
  part.turn = {.cos_sin = nullptr,
               .rot_dim = args.table.rot_dim,
               .is_neox = kIsPacked || args.table.is_neox,
               .is_packed = kIsPacked || args.is_table_packed};
  load_head_weight(part.q_weights, args.q_weight, group, part.is_packed, args.head_size);
  load_head_weight(part.k_weights, args.k_weight, group, part.is_packed, args.head_size);
  // Groups beyond the last token read what there is and store nothing.
  const bool is_live = group.index / args.groups_of_token < args.tokens;
  const uint32_t token = min(group.index / args.groups_of_token, args.tokens - 1);
  const uint32_t head = group.index % args.groups_of_token;
  T* row = static_cast<T*>(args.qkv) + token * args.token_stride + int64_t{head} * args.head_size;
  Pack<T> packs[kPacks];
  await_inputs();
  let_next_start();
  load_lanes(packs, row, args.head_size, part.is_packed, group);
  part.slot = args.slots[token];
  if (part.turn.rot_dim > 0) part.turn.cos_sin = args.table.row(args.positions[token]);
  if (part.turn.rot_dim > 0 && part.turn.holds()) {
    part.angles.load(group.lane, args.lanes, part.turn);
  }
  finish_head(packs, head, is_live, row, group.share<T>(exchange, kPacks), group, part, args);
}

// The same where a head is exactly one pack for each of kLanes lanes, all is packed, and queries
// and keys have a norm both or neither. Instructions are the limit over prompts: here loops over
// lanes are unrolled, nothing checks for a head's end, a group serves kHeads heads of its token,
// whose angles it reads once, and a warp that has values alone skips norm and turn. Heads and
// tokens beyond the last read what there is and store nothing.
template <typename T, typename W, int kLanes, int kHeads>
__global__ void __launch_bounds__(kGroupThreads)
    qkv_whole_heads_kernel(const __grid_constant__ QkvArgs args) {
  constexpr int kHeadSize = kLanes * Pack<T>::kSize;
  const LaneGroup group(kLanes);
  const bool has_norm = args.q_weight != nullptr, has_turn = args.table.rot_dim > 0;
  const uint32_t first_value = args.num_heads + args.num_kv_heads;
  const uint32_t num_heads = first_value + args.num_kv_heads;
  const bool is_live = group.index / args.groups_of_token < args.tokens;
  const uint32_t token = min(group.index / args.groups_of_token, args.tokens - 1);
  const uint32_t first = args.first_head + group.index % args.groups_of_token;
  T* rows = static_cast<T*>(args.qkv) + token * args.token_stride + group.begin_of<T>(0);
  Pack<T> packs[kHeads][1];
  await_inputs();
  let_next_start();
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const uint32_t head = min(first + i * args.groups_of_token, num_heads - 1);
    packs[i][0] = pack_of<T>(*reinterpret_cast<const uint4*>(rows + head * kHeadSize));
  }
  const int2 slot = args.slots[token];
  RopeTurn turn{
      .cos_sin = nullptr, .rot_dim = args.table.rot_dim, .is_neox = true, .is_packed = true};
  Angles<T, 1> angles;
  if (has_turn) {
    turn.cos_sin = args.table.row(args.positions[token]);
    angles.load(group.lane, kLanes, turn);
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const uint32_t head = first + i * args.groups_of_token;
    const bool is_query = head < args.num_heads, is_value = head >= first_value;
    const bool has_head = is_live && head < num_heads;
    if ((has_norm || has_turn) && !__all_sync(0xffffffffu, is_value)) {
      if (has_norm) {
        WeightPack<T, W> weight[1];  // from the nearest cache; registers are fewer than warps want
        load_head_weight(weight, is_query ? args.q_weight : args.k_weight, group, true, kHeadSize);
        norm_lanes(packs[i], weight, kLanes, !is_value, kHeadSize, args.epsilon);
      }
      if (has_turn) {
        turn_halves_packed(packs[i], group.lane, kLanes, !is_value, turn.rot_dim, angles);
      }
      if (has_head && !is_value) store_bits(rows + head * kHeadSize, bits_of(packs[i][0]));
    }
    if (!has_head || is_query || slot.x < 0) continue;
    T* target = is_value ? args.value_cache.row<T>(slot, head - first_value)
                         : args.key_cache.row<T>(slot, head - args.num_heads);
    store_bits(target + group.begin_of<T>(0), bits_of(packs[i][0]));
  }
}

template <typename T, int kHeads>
unsigned share_heads(QkvArgs& args) {
  args.lanes = lanes_of<T>(args.head_size);
  args.groups_of_token = ceil_div(args.num_heads + 2 * args.num_kv_heads - args.first_head, kHeads);
  return group_blocks(kOp, int64_t{args.tokens} * args.groups_of_token, args.lanes);
}

template <typename T, typename W, int kPacks, bool kIsPacked>
void launch_any(QkvArgs args, const LaunchScope& scope) {
  const unsigned blocks = share_heads<T, 1>(args);
  launch_overlapping(scope, qkv_norm_rope_cache_kernel<T, W, kPacks, kIsPacked>, blocks,
                     kGroupThreads, args);
}

// A group serves several heads where there are more than run at once.
template <typename T, typename W, int kLanes>
void launch_whole(QkvArgs args, const LaunchScope& scope) {
  constexpr int64_t kManyPacks = int64_t{1} << 20;
  const bool is_changed = args.q_weight != nullptr || args.table.rot_dim > 0;
  args.first_head = is_changed ? 0 : args.num_heads;
  const int64_t num_heads = args.num_heads + 2 * args.num_kv_heads - args.first_head;
  if (num_heads * args.tokens * kLanes >= kManyPacks) {
    const unsigned blocks = share_heads<T, 4>(args);
    launch_overlapping(scope, qkv_whole_heads_kernel<T, W, kLanes, 4>, blocks, kGroupThreads, args);
  } else {
    const unsigned blocks = share_heads<T, 1>(args);
    launch_overlapping(scope, qkv_whole_heads_kernel<T, W, kLanes, 1>, blocks, kGroupThreads, args);
  }
}

template <typename T, typename W, int kPacks>
void launch_qkv(const QkvArgs& args, const LaunchScope& scope) {
  if (!is_all_packed(args)) {
    return launch_any<T, W, kPacks, false>(args, scope);
  }
  if constexpr (kPacks == 1) {
    const int lanes = are_norms_alike(args) && args.head_size % Pack<T>::kSize == 0
                          ? args.head_size / Pack<T>::kSize
                          : 0;
    if (lanes == 8) return launch_whole<T, W, 8>(args, scope);
    if (lanes == 16) return launch_whole<T, W, 16>(args, scope);
    if (lanes == 32) return launch_whole<T, W, 32>(args, scope);
  }
  launch_any<T, W, kPacks, true>(args, scope);
}

const void* norm_weight(const char* name, const std::optional<Tensor>& weight, const Tensor& qkv,
                        int64_t head_size) {
  if (!weight.has_value()) return nullptr;
  check_norm_weight(kOp, name, *weight, qkv, head_size);
  return weight->data_ptr();
}

// The type of both weights; that of the activations where there are none.
ScalarType weight_type(const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                       const Tensor& qkv) {
  if (q_norm.has_value() && k_norm.has_value()) {
    check_dtype(kOp, "k_norm", *k_norm, q_norm->scalar_type());
  }
  if (q_norm.has_value()) return q_norm->scalar_type();
  return k_norm.has_value() ? k_norm->scalar_type() : qkv.scalar_type();
}

RopeTable turning_table(const std::optional<Tensor>& cos_sin, const Tensor& qkv, int64_t head_size,
                        int64_t rotary_dim, bool is_neox) {
  CHECK_ARG((rotary_dim > 0) == cos_sin.has_value(), kOp, ": rotary_dim is ", rotary_dim,
            cos_sin.has_value() ? " and there is a table" : " and there is no table");
  if (rotary_dim == 0) return {};
  check_same_device(kOp, "cos_sin", *cos_sin, qkv);
  const RopeTable table = rope_table(kOp, *cos_sin, head_size, is_neox);
  check_size(kOp, "cos_sin", *cos_sin, 1, rotary_dim);
  return table;
}

void check_qkv(const Tensor& qkv, const Tensor& positions, int64_t num_heads, int64_t num_kv_heads,
               int64_t head_size) {
  check_tensor(kOp, "qkv", qkv, 2);
  check_float_dtype(kOp, "qkv", qkv);
  CHECK_ARG(num_heads > 0 && num_kv_heads > 0 && head_size > 0, kOp, ": ", num_heads, " and ",
            num_kv_heads, " heads of ", head_size, " elements, all must be positive");
  check_size(kOp, "qkv", qkv, 1, (num_heads + 2 * num_kv_heads) * head_size);
  check_tensor(kOp, "positions", positions, 1);
  check_dtype(kOp, "positions", positions, ScalarType::Long);
  check_same_device(kOp, "positions", positions, qkv);
  check_size(kOp, "positions", positions, 0, qkv.size(0));
}

const void* parts_bias(const std::optional<Tensor>& bias, const Tensor& qkv) {
  if (!bias.has_value()) return nullptr;
  check_tensor(kOp, "bias", *bias, 1);
  check_dtype(kOp, "bias", *bias, qkv.scalar_type());
  check_same_device(kOp, "bias", *bias, qkv);
  check_size(kOp, "bias", *bias, 0, qkv.size(1));
  return bias->data_ptr();
}

bool are_heads_packed(const QkvArgs& args, int64_t item) {
  return is_pack_aligned(args.qkv) && args.token_stride * item % kPackBytes == 0 &&
         args.head_size * item % kPackBytes == 0 && is_pack_aligned(args.q_weight) &&
         is_pack_aligned(args.k_weight);
}

void qkv_norm_rope_cache_op(const Tensor& qkv, const Tensor& positions, const Tensor& slots,
                            const Tensor& key_cache, const Tensor& value_cache,
                            const std::optional<Tensor>& q_norm,
                            const std::optional<Tensor>& k_norm, double epsilon,
                            const std::optional<Tensor>& cos_sin, int64_t num_heads,
                            int64_t num_kv_heads, int64_t head_size, int64_t rotary_dim,
                            bool is_neox, const std::optional<Tensor>& parts,
                            const std::optional<Tensor>& bias) {
  check_qkv(qkv, positions, num_heads, num_kv_heads, head_size);
  const int64_t item = static_cast<int64_t>(qkv.element_size());
  QkvArgs args{
      .qkv = qkv.data_ptr(),
      .token_stride = qkv.stride(0),
      .positions = static_cast<const int64_t*>(positions.data_ptr()),
      .slots = slots_of(kOp, slots, qkv, qkv.size(0)),
      .key_cache = cache_rows(kOp, "key_cache", key_cache, qkv, num_kv_heads, head_size),
      .value_cache = cache_rows(kOp, "value_cache", value_cache, qkv, num_kv_heads, head_size),
      .q_weight = norm_weight("q_norm", q_norm, qkv, head_size),
      .k_weight = norm_weight("k_norm", k_norm, qkv, head_size),
      .epsilon = static_cast<float>(epsilon),
      .table = turning_table(cos_sin, qkv, head_size, rotary_dim, is_neox),
      .tokens = static_cast<uint32_t>(qkv.size(0)),
      .num_heads = static_cast<uint32_t>(num_heads),
      .num_kv_heads = static_cast<uint32_t>(num_kv_heads),
      .first_head = 0,
      .groups_of_token = 0,
      .head_size = static_cast<int>(head_size),
      .lanes = 0,
      .is_packed = false,
      .is_cache_packed = false,
      .is_table_packed = false};
  args.is_packed = are_heads_packed(args, item);
  args.is_cache_packed =
      is_packed(args.key_cache, head_size, item) && is_packed(args.value_cache, head_size, item);
  args.is_table_packed = args.table.is_packed(item);
  const ScalarType weights = weight_type(q_norm, k_norm, qkv);
  CHECK_ARG(parts.has_value() || !bias.has_value(), kOp,
            ": bias is added to parts, there are none");
  if (args.tokens == 0) return;
  const LaunchScope scope(qkv);
  if (parts.has_value()) {
    const Parts summands = parts_of(kOp, *parts, qkv);
    const void* added = parts_bias(bias, qkv);
    if (launch_qkv_parts(scope, args, qkv.scalar_type(), weights, summands, added)) {
      return scope.check(kOp);
    }
    write_sum(scope, qkv, summands, added);
  }
  dispatch_lanes(
      kOp, qkv.scalar_type(), head_size, [&]<typename T, int kPacks>(LanePacks<T, kPacks>) {
        dispatch_weight<T>(weights,
                           [&]<typename W>(TypeTag<W>) { launch_qkv<T, W, kPacks>(args, scope); });
      });
  scope.check(kOp);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def(
      "qkv_norm_rope_cache(Tensor! qkv, Tensor positions, Tensor slots, Tensor! key_cache, "
      "Tensor! value_cache, Tensor? q_norm, Tensor? k_norm, float epsilon, Tensor? cos_sin, "
      "int num_heads, int num_kv_heads, int head_size, int rotary_dim, bool is_neox, "
      "Tensor? parts=None, Tensor? bias=None) -> ()");
}

VLLM_OPS_IMPL(_C, CUDA, m) { m.impl("qkv_norm_rope_cache", TORCH_BOX(&qkv_norm_rope_cache_op)); }

}  // namespace vllm::cuda
