// Ops: _C::make_decoder_stack, _C::decoder_layers.
#include "cpu/kernels/decoder.h"

#include <algorithm>
#include <memory>

#include <torch/csrc/stable/ops.h>

#include "cpu/attention_args.h"
#include "cpu/attention_plan.h"
#include "cpu/memory.h"

extern "C" int omp_get_max_threads();

namespace vllm::cpu {

namespace {

constexpr int64_t kBlockCols = 32;
constexpr uint64_t kStackMark = 0x766c6c6d2d646563;  // tells a stack from any other tensor

// Numbers of one layer, as vllm/_custom_ops/decoder.py writes them. The first ones are indices into
// the list of weights, negative where there is none.
enum LayerInt : int {
  kInputNorm,
  kPostAttentionNorm,
  kMlpNorm,
  kPostMlpNorm,
  kQNorm,
  kKNorm,
  kQkv,
  kQkvBias,
  kOut,
  kOutBias,
  kGateUp,
  kGateUpBias,
  kDown,
  kDownBias,
  kSinks,
  kNumHeads,
  kNumKvHeads,
  kHeadSize,
  kIntermediateSize,
  kRopeTable,
  kRotaryDim,
  kIsNeox,
  kActivation,
  kWindow,
  kChunkTokens,
  kSinkTokens,
  kNumLayerInts
};
enum LayerFloat : int { kScale, kSoftCap, kNumLayerFloats };

struct HeadShape {
  int64_t num_heads, num_kv_heads, head_size;
  bool operator==(const HeadShape&) const = default;
};

// Layers ready to run; owns references to their weights.
struct DecoderStack {
  uint64_t mark = kStackMark;
  std::vector<Tensor> weights;
  std::vector<DecoderLayer> layers;
  std::vector<HeadShape> head_shapes;
  std::vector<int32_t> shape_of_layer;
  const void* final_norm = nullptr;
  int64_t hidden_size = 0, num_rope_tables = 0;
  float epsilon = 0.0f;
  ScalarType type = ScalarType::Float, norm_type = ScalarType::Float;
};

// Reads the weights of one layer, each checked.
class LayerReader {
 public:
  LayerReader(const DecoderStack& stack, const int64_t* ints) : stack_(stack), ints_(ints) {}

  const void* norm(const char* name, LayerInt field, int64_t size) const {
    return vector(name, field, size, stack_.norm_type);
  }

  const void* vector(const char* name, LayerInt field, int64_t size, ScalarType type) const {
    const Tensor* t = find(name, field);
    if (t == nullptr) return nullptr;
    check_tensor(kMake, name, *t, 1);
    check_dtype(kMake, name, *t, type);
    check_size(kMake, name, *t, 0, size);
    return t->data_ptr();
  }

  PackedLinear linear(const char* name, LayerInt field, LayerInt bias, int64_t n, int64_t k) const {
    const Tensor* t = find(name, field);
    CHECK_ARG(t != nullptr, kMake, ": every layer needs ", name);
    const bool is_float = stack_.type == ScalarType::Float;
    check_tensor(kMake, name, *t, is_float ? 3 : 4);
    check_dtype(kMake, name, *t, stack_.type);
    check_contiguous(kMake, name, *t);
    check_size(kMake, name, *t, 0, (n + kBlockCols - 1) / kBlockCols);
    check_size(kMake, name, *t, 1, is_float ? k : (k + 1) / 2);
    return PackedLinear{t->data_ptr(), vector(name, bias, n, stack_.type), n, k};
  }

  static constexpr char kMake[] = "make_decoder_stack";

 private:
  const Tensor* find(const char* name, LayerInt field) const {
    const int64_t index = ints_[field];
    if (index < 0) return nullptr;
    CHECK_ARG(index < static_cast<int64_t>(stack_.weights.size()), kMake, ": ", name,
              " is weight number ", index, ", there are ", stack_.weights.size());
    return &stack_.weights[static_cast<size_t>(index)];
  }

  const DecoderStack& stack_;
  const int64_t* ints_;
};

DecoderLayer read_layer(const DecoderStack& stack, const int64_t* ints, const double* floats) {
  const LayerReader read(stack, ints);
  const int64_t hidden = stack.hidden_size, size = ints[kHeadSize], inner = ints[kIntermediateSize];
  const int64_t heads = ints[kNumHeads], kv_heads = ints[kNumKvHeads];
  check_heads(LayerReader::kMake, heads, kv_heads, size);
  CHECK_ARG(inner > 0 && ints[kWindow] >= 0 && ints[kChunkTokens] >= 0 && ints[kSinkTokens] >= 0,
            "make_decoder_stack: sizes must not be negative");
  CHECK_ARG(ints[kActivation] >= 0 && ints[kActivation] <= 2, "make_decoder_stack: activation ",
            ints[kActivation], " is not known");
  CHECK_ARG(ints[kRopeTable] < 0 ||
                (ints[kRotaryDim] > 0 && ints[kRotaryDim] % 2 == 0 && ints[kRotaryDim] <= size),
            "make_decoder_stack: ", ints[kRotaryDim], " turning elements do not fit a head of ",
            size);
  DecoderLayer layer{};
  layer.input_norm = read.norm("input_norm", kInputNorm, hidden);
  layer.post_attention_norm = read.norm("post_attention_norm", kPostAttentionNorm, hidden);
  layer.mlp_norm = read.norm("mlp_norm", kMlpNorm, hidden);
  layer.post_mlp_norm = read.norm("post_mlp_norm", kPostMlpNorm, hidden);
  layer.q_norm = read.norm("q_norm", kQNorm, size);
  layer.k_norm = read.norm("k_norm", kKNorm, size);
  CHECK_ARG(layer.input_norm != nullptr && layer.mlp_norm != nullptr,
            "make_decoder_stack: every layer needs input_norm and mlp_norm");
  CHECK_ARG((layer.q_norm == nullptr) == (layer.k_norm == nullptr),
            "make_decoder_stack: q_norm and k_norm come together");
  layer.qkv = read.linear("qkv", kQkv, kQkvBias, (heads + 2 * kv_heads) * size, hidden);
  layer.out = read.linear("out", kOut, kOutBias, hidden, heads * size);
  layer.gate_up = read.linear("gate_up", kGateUp, kGateUpBias, 2 * inner, hidden);
  layer.down = read.linear("down", kDown, kDownBias, hidden, inner);
  layer.sinks = static_cast<const float*>(read.vector("sinks", kSinks, heads, ScalarType::Float));
  layer.num_heads = heads;
  layer.num_kv_heads = kv_heads;
  layer.head_size = size;
  layer.intermediate_size = inner;
  layer.rope_table = ints[kRopeTable];
  layer.rotary_dim = ints[kRotaryDim];
  layer.is_neox = ints[kIsNeox] != 0;
  layer.activation = static_cast<Activation>(ints[kActivation]);
  layer.visibility = {ints[kWindow], ints[kChunkTokens], ints[kSinkTokens]};
  layer.scale = static_cast<float>(floats[kScale]);
  layer.soft_cap = static_cast<float>(floats[kSoftCap]);
  return layer;
}

// A tensor whose memory is a DecoderStack, deleted with the tensor.
Tensor make_decoder_stack(const std::vector<Tensor>& weights, const std::vector<int64_t>& ints,
                          const std::vector<double>& floats, int64_t hidden_size, double epsilon,
                          const std::optional<Tensor>& final_norm) {
  const char* op = "make_decoder_stack";
  const size_t num_layers = ints.size() / kNumLayerInts;
  CHECK_ARG(num_layers > 0 && ints.size() == num_layers * kNumLayerInts &&
                floats.size() == num_layers * kNumLayerFloats,
            op, ": ", ints.size(), " ints and ", floats.size(), " floats are no whole layers");
  auto stack = std::make_unique<DecoderStack>();
  stack->weights = weights;
  stack->hidden_size = hidden_size;
  stack->epsilon = static_cast<float>(epsilon);
  const auto weight_type = [&](LayerInt field) {
    const int64_t index = ints[field];
    CHECK_ARG(index >= 0 && index < static_cast<int64_t>(weights.size()), op,
              ": every layer needs input_norm and qkv");
    check_float_dtype(op, "weights", weights[static_cast<size_t>(index)]);
    return weights[static_cast<size_t>(index)].scalar_type();
  };
  stack->type = weight_type(kQkv);
  stack->norm_type = weight_type(kInputNorm);
  for (size_t i = 0; i < num_layers; ++i) {
    const DecoderLayer layer =
        read_layer(*stack, &ints[i * kNumLayerInts], &floats[i * kNumLayerFloats]);
    const HeadShape shape{layer.num_heads, layer.num_kv_heads, layer.head_size};
    auto place = std::find(stack->head_shapes.begin(), stack->head_shapes.end(), shape);
    if (place == stack->head_shapes.end()) place = stack->head_shapes.insert(place, shape);
    stack->shape_of_layer.push_back(static_cast<int32_t>(place - stack->head_shapes.begin()));
    stack->num_rope_tables = std::max(stack->num_rope_tables, layer.rope_table + 1);
    stack->layers.push_back(layer);
  }
  if (final_norm.has_value()) {
    check_tensor(op, "final_norm", *final_norm, 1);
    check_dtype(op, "final_norm", *final_norm, stack->norm_type);
    check_size(op, "final_norm", *final_norm, 0, hidden_size);
    stack->final_norm = final_norm->data_ptr();
    stack->weights.push_back(*final_norm);
  }
  const int64_t size = sizeof(DecoderStack), stride = 1;
  DecoderStack* data = stack.release();
  return torch::stable::from_blob(
      data, {&size, 1}, {&stride, 1}, torch::stable::Device(torch::headeronly::DeviceType::CPU),
      ScalarType::Byte, [](void* memory) { delete static_cast<DecoderStack*>(memory); });
}

constexpr char kOp[] = "decoder_layers";

const DecoderStack& stack_of(const Tensor& handle) {
  CHECK_ARG(handle.is_cpu() && handle.dim() == 1 && handle.scalar_type() == ScalarType::Byte &&
                handle.size(0) == static_cast<int64_t>(sizeof(DecoderStack)),
            kOp, ": stack was not made by make_decoder_stack");
  const auto* stack = static_cast<const DecoderStack*>(handle.data_ptr());
  CHECK_ARG(stack->mark == kStackMark, kOp, ": stack was not made by make_decoder_stack");
  return *stack;
}

const int32_t* slot_rows(const Tensor& slots, int64_t tokens, int64_t num_units,
                         int64_t block_tokens) {
  check_tensor(kOp, "slots", slots, 2);
  check_dtype(kOp, "slots", slots, ScalarType::Int);
  check_size(kOp, "slots", slots, 0, tokens);
  check_size(kOp, "slots", slots, 1, 2);
  check_contiguous(kOp, "slots", slots);
  const int32_t* slot = static_cast<const int32_t*>(slots.data_ptr());
  for (int64_t t = 0; t < tokens; ++t) {
    CHECK_ARG(slot[2 * t] < num_units &&
                  (slot[2 * t] < 0 || (slot[2 * t + 1] >= 0 && slot[2 * t + 1] < block_tokens)),
              kOp, ": slots[", t, "] is (", slot[2 * t], ", ", slot[2 * t + 1], "), the cache has ",
              num_units, " units of ", block_tokens, " tokens");
  }
  return slot;
}

// What a step needs beside the stack; keeps its capacity from step to step.
struct StepArrays {
  std::vector<DecoderLayerCache> caches;
  std::vector<AttentionBatch> batches;
  std::vector<const int32_t*> slots;
  std::vector<const float*> rope_tables;
  std::vector<AttentionPlanMemory> plan_memories;
  std::vector<AttentionPlan> plans;
};

struct CacheArgs {
  const std::vector<Tensor>& block_offsets;
  const std::vector<Tensor>& slots;
  const std::vector<Tensor>& key_caches;
  const std::vector<Tensor>& value_caches;
  const std::vector<int64_t>& groups;
};

void read_caches(const DecoderStack& stack, const CacheArgs& given, const Tensor& cu_query_lens,
                 const Tensor& seq_lens, int64_t tokens, StepArrays& arrays) {
  const size_t num_layers = stack.layers.size(), num_groups = given.block_offsets.size();
  CHECK_ARG(given.key_caches.size() == num_layers && given.value_caches.size() == num_layers &&
                given.groups.size() == num_layers,
            kOp, ": the stack has ", num_layers, " layers, given are ", given.key_caches.size(),
            " key caches, ", given.value_caches.size(), " value caches, ", given.groups.size(),
            " groups");
  CHECK_ARG(given.slots.size() == num_groups, kOp, ": block_offsets and slots of every group");
  arrays.caches.clear();
  arrays.batches.assign(num_groups, AttentionBatch{});
  arrays.slots.assign(num_groups, nullptr);
  for (size_t i = 0; i < num_layers; ++i) {
    const DecoderLayer& layer = stack.layers[i];
    const Tensor& key = given.key_caches[i];
    const Tensor& value = given.value_caches[i];
    const int64_t group = given.groups[i];
    CHECK_ARG(group >= 0 && group < static_cast<int64_t>(num_groups), kOp, ": layer ", i,
              " names group ", group, ", there are ", num_groups);
    arrays.caches.push_back(DecoderLayerCache{
        cache_rows(kOp, "key_cache", key, stack.type, layer.num_kv_heads, layer.head_size),
        cache_rows(kOp, "value_cache", value, stack.type, layer.num_kv_heads, layer.head_size),
        group});
    AttentionBatch& batch = arrays.batches[static_cast<size_t>(group)];
    const int64_t units = key.size(0), block_tokens = key.size(1);
    CHECK_ARG(value.size(0) == units && value.size(1) == block_tokens &&
                  (batch.block_tokens == 0 || batch.block_tokens == block_tokens),
              kOp, ": caches of group ", group, " differ in their blocks");
    if (batch.block_tokens != 0) continue;
    batch = attention_batch(kOp, given.block_offsets[static_cast<size_t>(group)], cu_query_lens,
                            seq_lens, tokens, units, block_tokens, true);
    arrays.slots[static_cast<size_t>(group)] =
        slot_rows(given.slots[static_cast<size_t>(group)], tokens, units, block_tokens);
  }
}

void read_rope_tables(const DecoderStack& stack, const std::vector<Tensor>& tables,
                      const int64_t* positions, int64_t tokens, StepArrays& arrays) {
  CHECK_ARG(static_cast<int64_t>(tables.size()) >= stack.num_rope_tables, kOp, ": ", tables.size(),
            " rope tables, the layers use ", stack.num_rope_tables);
  int64_t most = -1, least = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    most = std::max(most, positions[t]);
    least = std::min(least, positions[t]);
  }
  arrays.rope_tables.clear();
  for (const Tensor& table : tables) {
    check_tensor(kOp, "rope_tables", table, 2);
    check_dtype(kOp, "rope_tables", table, ScalarType::Float);
    check_contiguous(kOp, "rope_tables", table);
    CHECK_ARG(least >= 0 && most < table.size(0), kOp, ": positions run from ", least, " to ", most,
              ", a rope table has ", table.size(0), " rows");
    arrays.rope_tables.push_back(static_cast<const float*>(table.data_ptr()));
  }
  for (const DecoderLayer& layer : stack.layers) {
    if (layer.rope_table < 0) continue;
    check_size(kOp, "rope_tables", tables[static_cast<size_t>(layer.rope_table)], 1,
               layer.rotary_dim);
  }
}

void plan_heads(const DecoderStack& stack, StepArrays& arrays) {
  // Plans depend on lengths only, which all groups share; a group without a layer here is not read.
  const AttentionBatch& batch = arrays.batches[static_cast<size_t>(arrays.caches.front().group)];
  const size_t count = stack.head_shapes.size();
  if (arrays.plan_memories.size() < count) arrays.plan_memories.resize(count);
  arrays.plans.clear();
  int64_t partial_floats = 0;
  for (size_t i = 0; i < count; ++i) {
    const HeadShape& shape = stack.head_shapes[i];
    arrays.plans.push_back(plan_attention(arrays.plan_memories[i], batch, shape.num_heads,
                                          shape.num_kv_heads, shape.head_size,
                                          omp_get_max_threads()));
    partial_floats = std::max(partial_floats, arrays.plans.back().partial_floats);
  }
  float* partials = static_cast<float*>(
      thread_scratch(Scratch::kPartials, static_cast<size_t>(partial_floats) * sizeof(float)));
  for (AttentionPlan& plan : arrays.plans) plan.partials = partials;
}

void decoder_layers_op(const Tensor& hidden, const Tensor& handle, const Tensor& positions,
                       const Tensor& cu_query_lens, const Tensor& seq_lens,
                       const std::vector<Tensor>& block_offsets, const std::vector<Tensor>& slots,
                       const std::vector<Tensor>& key_caches,
                       const std::vector<Tensor>& value_caches,
                       const std::vector<int64_t>& cache_groups,
                       const std::vector<Tensor>& rope_tables) {
  const DecoderStack& stack = stack_of(handle);
  check_tensor(kOp, "hidden", hidden, 2);
  check_dtype(kOp, "hidden", hidden, stack.type);
  check_size(kOp, "hidden", hidden, 1, stack.hidden_size);
  const int64_t tokens = hidden.size(0);
  check_tensor(kOp, "positions", positions, 1);
  check_dtype(kOp, "positions", positions, ScalarType::Long);
  check_size(kOp, "positions", positions, 0, tokens);
  const int64_t* position = static_cast<const int64_t*>(positions.data_ptr());
  thread_local StepArrays arrays;
  read_caches(stack, CacheArgs{block_offsets, slots, key_caches, value_caches, cache_groups},
              cu_query_lens, seq_lens, tokens, arrays);
  read_rope_tables(stack, rope_tables, position, tokens, arrays);
  if (tokens == 0) return;
  plan_heads(stack, arrays);
  const DecoderArgs args{
      .layers = stack.layers.data(),
      .caches = arrays.caches.data(),
      .plans = arrays.plans.data(),
      .plan_of_layer = stack.shape_of_layer.data(),
      .num_layers = static_cast<int64_t>(stack.layers.size()),
      .batches = arrays.batches.data(),
      .slots = arrays.slots.data(),
      .rope_tables = arrays.rope_tables.data(),
      .positions = position,
      .final_norm = stack.final_norm,
      .hidden = hidden.data_ptr(),
      .tokens = tokens,
      .hidden_size = stack.hidden_size,
      .hidden_stride = hidden.stride(0),
      .epsilon = stack.epsilon,
      .element = element_of(hidden),
      .norm_element = stack.norm_type == ScalarType::Float ? Element::kFloat : Element::kBf16};
  VLLM_CALL_KERNEL(decoder_layers, args);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def(
      "make_decoder_stack(Tensor[] weights, int[] ints, float[] floats, int hidden_size, "
      "float epsilon, Tensor? final_norm) -> Tensor");
  m.def(
      "decoder_layers(Tensor! hidden, Tensor stack, Tensor positions, Tensor cu_query_lens, "
      "Tensor seq_lens, Tensor[] block_offsets, Tensor[] slots, Tensor(a!)[] key_caches, "
      "Tensor(b!)[] value_caches, int[] cache_groups, Tensor[] rope_tables) -> ()");
}

VLLM_OPS_IMPL(_C, CPU, m) {
  m.impl("make_decoder_stack", TORCH_BOX(&make_decoder_stack));
  m.impl("decoder_layers", TORCH_BOX(&decoder_layers_op));
}

}  // namespace vllm::cpu
