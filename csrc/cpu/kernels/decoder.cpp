// Consecutive dense decoder layers in one parallel region.
#include "cpu/kernels/decoder.h"

#include <omp.h>

#include "cpu/decoder_phases.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

template <typename T, typename W>
void run_layer(const Step<T, W>& step, int64_t index) {
  const DecoderArgs& args = step.args;
  const StepMemory<T>& memory = step.memory;
  const DecoderLayer& layer = args.layers[index];
  const DecoderLayer* previous = index > 0 ? &args.layers[index - 1] : nullptr;
  const AttentionPlan& plan = args.plans[args.plan_of_layer[index]];

  norm_rows(step, previous != nullptr, previous == nullptr ? nullptr : previous->post_mlp_norm,
            layer.input_norm, memory.normed);
  if (!step.has_own_rows) step.team.wait();
  if (step.team.rank == 0) __atomic_store_n(plan.next_unit, 0, __ATOMIC_RELAXED);
  multiply(step, memory.normed, layer.qkv, memory.qkv, step.ahead(layer.out));
  step.team.wait();
  attend(step, layer, args.caches[index], plan);
  step.team.wait();
  multiply(step, memory.heads, layer.out, memory.delta, step.gate_ahead(layer));
  step.team.wait();
  norm_rows(step, true, layer.post_attention_norm, layer.mlp_norm, memory.normed);
  if (!step.has_own_rows) step.team.wait();
  if (has_split_blocks(layer)) {
    multiply_gated(step, layer, step.ahead(layer.down));
  } else {
    multiply_gated_whole(step, layer, step.ahead(layer.down));
  }
  step.team.wait();
  const Ahead next = index + 1 < args.num_layers ? step.ahead(args.layers[index + 1].qkv) : Ahead{};
  multiply(step, memory.inner, layer.down, memory.delta, next);
  step.team.wait();
}

template <typename T, typename W>
void run_step(const DecoderArgs& args, const StepMemory<T>& memory, const Team& team) {
  const Step<T, W> step{args, team, memory, args.tokens <= kOwnRows};
  const size_t row_bytes = static_cast<size_t>(args.hidden_size) * sizeof(T);
  const StepMatrix<T> hidden{static_cast<T*>(args.hidden), args.hidden_stride};
  if (step.has_own_rows) {
    for (int64_t i = 0; i < args.tokens; ++i) {
      std::memcpy(memory.residual.row(i), hidden.row(i), row_bytes);
    }
    team.wait();  // nobody writes `hidden` before all have read it
  }
  for (int64_t i = 0; i < args.num_layers; ++i) run_layer(step, i);
  if (step.has_own_rows && team.rank != 0) return;  // all have the same rows
  const DecoderLayer& last = args.layers[args.num_layers - 1];
  norm_rows(step, true, last.post_mlp_norm, args.final_norm, hidden);
  if (step.has_own_rows && args.final_norm == nullptr) {
    for (int64_t i = 0; i < args.tokens; ++i) {
      std::memcpy(hidden.row(i), memory.residual.row(i), row_bytes);
    }
  }
}

template <typename T, typename W>
void run_region(const DecoderArgs& args) {
  const int64_t threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  const StepSizes sizes = step_sizes(args);
  StepMemory<T> memory{};
  const int64_t bytes = lay_out_step<T>(args, sizes, nullptr, 0, threads, memory);
  constexpr int64_t kBarrierBytes = sizeof(Barrier);
  char* start = static_cast<char*>(
      thread_scratch(Scratch::kStep, static_cast<size_t>(bytes + kBarrierBytes)));
  std::memset(start, 0, kBarrierBytes);
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    const Team team{reinterpret_cast<Barrier*>(start), omp_get_thread_num(), omp_get_num_threads()};
    StepMemory<T> own{};
    lay_out_step<T>(args, sizes, start + kBarrierBytes, team.rank, team.size, own);
    run_step<T, W>(args, own, team);
  }
}

}  // namespace

void decoder_layers(const DecoderArgs& args) {
  if (args.element == Element::kFloat) return run_region<float, float>(args);
  if (args.norm_element == Element::kFloat) return run_region<bf16, float>(args);
  run_region<bf16, bf16>(args);
}

}  // namespace VLLM_KERNEL_NAMESPACE
