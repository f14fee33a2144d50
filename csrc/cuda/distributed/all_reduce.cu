// Op: _C::all_reduce_peers: the sum of a short tensor over the GPUs of one host, in one kernel.
//
// Every rank writes its numbers into the inboxes of all others, then waits for theirs in its own
// memory: one way over the link, where libraries go through several steps. All ranks add in the
// order of ranks, in float32, and round once: the same bits on each, and in any batch.
#include <algorithm>

#include "core/registration.h"
#include "cuda/distributed/inbox.cuh"
#include "cuda/launch.cuh"
#include "cuda/rows.cuh"

namespace vllm::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxPacks = int64_t{kInboxBlocks} * kBlockPacks;
constexpr int kPollsBetweenLooks = 4096;  // at the clock

struct SumArgs {
  const uint4* input;
  uint4* out;
  uint64_t inboxes[kMaxRanks];  // as this process sees them
  uint32_t* counts;             // messages of every block so far; behind them, one: lost messages
  uint32_t num_packs, block_packs;
  int rank;
  uint64_t patience_ns;
  bool is_trial;  // a message that does not come is counted; else it ends the work on the device
};

// Waits for a pack of another rank; gives up after the patience of the launch.
__device__ uint4 await_pack(const ulonglong2* lines, uint32_t number, const SumArgs& args) {
  ulonglong2 first = look_at_line(lines), second = look_at_line(lines + 1);
  uint64_t begin_ns = 0;
  for (int polls = 1; !has_come(first, number) || !has_come(second, number); ++polls) {
    if (polls % kPollsBetweenLooks == 0) {
      const uint64_t now_ns = read_clock_ns();
      if (begin_ns == 0) begin_ns = now_ns;
      if (now_ns - begin_ns > args.patience_ns) {
        atomicAdd(args.counts + kInboxBlocks, 1u);
        if (args.is_trial) break;
        __trap();
      }
    }
    first = look_at_line(lines);
    second = look_at_line(lines + 1);
  }
  return {static_cast<uint32_t>(first.x), static_cast<uint32_t>(first.y),
          static_cast<uint32_t>(second.x), static_cast<uint32_t>(second.y)};
}

template <typename T>
__device__ __forceinline__ void add_pack(float (&sum)[Pack<T>::kSize], const uint4& bits) {
  float x[Pack<T>::kSize];
  unpack(pack_of<T>(bits), x);
#pragma unroll
  for (int e = 0; e < Pack<T>::kSize; ++e) sum[e] += x[e];
}

// A block has up to `block_packs` packs, which lie together.
template <typename T, int kRanks>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ SumArgs args) {
  await_inputs();
  let_next_start();
  uint32_t number = __ldcg(args.counts + blockIdx.x) + 1;  // another processor may have counted
  if (number == 0) number = 2;  // zero is what an inbox holds at first; even follows odd
  const uint32_t begin = blockIdx.x * args.block_packs;
  const uint32_t count = min(args.block_packs, args.num_packs - begin);
  const uint4* input = args.input + begin;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const uint4 mine = input[i];
#pragma unroll
    for (int step = 1; step < kRanks; ++step) {  // ranks do not all write to one at once
      const int peer = (args.rank + step) % kRanks;
      ulonglong2* lines =
          kPackLines * i + find_lines(args.inboxes[peer], kRanks, args.rank, blockIdx.x, number);
      send_line(lines, mine.x, mine.y, number);
      send_line(lines + 1, mine.z, mine.w, number);
    }
  }
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    float sum[Pack<T>::kSize] = {};
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      const ulonglong2* lines =
          kPackLines * i + find_lines(args.inboxes[args.rank], kRanks, source, blockIdx.x, number);
      add_pack<T>(sum, source == args.rank ? input[i] : await_pack(lines, number, args));
    }
    const Pack<T> total = map_pairs<T>([&](int e) { return make_float2(sum[e], sum[e + 1]); });
    store_bits(args.out + begin + i, bits_of(total));
  }
  __syncthreads();
  if (threadIdx.x == 0) args.counts[blockIdx.x] = number;
}

template <typename T>
void launch_sum(const LaunchScope& scope, const SumArgs& args, int64_t num_ranks, unsigned blocks) {
  const auto launch = [&](auto kernel) {
    launch_overlapping(scope, kernel, dim3(blocks), dim3(kThreads), args);
  };
  switch (num_ranks) {
    case 2:
      return launch(sum_kernel<T, 2>);
    case 4:
      return launch(sum_kernel<T, 4>);
    case 6:
      return launch(sum_kernel<T, 6>);
    default:
      return launch(sum_kernel<T, 8>);
  }
}

void all_reduce_peers_op(const Tensor& out, const Tensor& input, const Tensor& counts,
                         const Tensor& inboxes, int64_t rank, int64_t patience_ms, bool is_trial) {
  constexpr char kOp[] = "all_reduce_peers";
  CHECK_ARG(input.is_cuda() && input.is_contiguous(), kOp, ": input must be contiguous on a GPU");
  check_float_dtype(kOp, "input", input);
  check_like(kOp, "out", out, input);
  CHECK_ARG(out.is_contiguous(), kOp, ": out must be contiguous");
  check_tensor(kOp, "counts", counts, 1);
  check_same_device(kOp, "counts", counts, input);
  check_dtype(kOp, "counts", counts, ScalarType::Int);
  check_size(kOp, "counts", counts, 0, kInboxBlocks + 1);
  vllm::check_tensor(kOp, "inboxes", inboxes, 1);
  check_dtype(kOp, "inboxes", inboxes, ScalarType::Long);
  const int64_t num_ranks = inboxes.size(0);
  CHECK_ARG(num_ranks == 2 || num_ranks == 4 || num_ranks == 6 || num_ranks == 8, kOp,
            ": there are ", num_ranks, " inboxes, allowed: 2, 4, 6, 8");
  CHECK_ARG(rank >= 0 && rank < num_ranks, kOp, ": rank is ", rank, ", allowed: 0 to ",
            num_ranks - 1);
  const int64_t bytes = input.numel() * static_cast<int64_t>(input.element_size());
  CHECK_ARG(bytes % kPackBytes == 0 && bytes / kPackBytes <= kMaxPacks, kOp, ": input has ", bytes,
            " bytes, allowed: multiples of ", kPackBytes, " up to ", kMaxPacks * kPackBytes);
  CHECK_ARG(is_pack_aligned(input.data_ptr()) && is_pack_aligned(out.data_ptr()), kOp,
            ": input and out must lie on ", kPackBytes, " bytes");
  if (bytes == 0) return;
  const int64_t packs = bytes / kPackBytes;
  const int64_t blocks = std::min<int64_t>(ceil_div(packs, kThreads), kInboxBlocks);
  SumArgs args{.input = static_cast<const uint4*>(input.data_ptr()),
               .out = static_cast<uint4*>(out.data_ptr()),
               .inboxes = {},
               .counts = static_cast<uint32_t*>(counts.data_ptr()),
               .num_packs = static_cast<uint32_t>(packs),
               .block_packs = static_cast<uint32_t>(ceil_div(packs, blocks)),
               .rank = static_cast<int>(rank),
               .patience_ns = static_cast<uint64_t>(patience_ms) * 1'000'000,
               .is_trial = is_trial};
  const int64_t* addresses = static_cast<const int64_t*>(inboxes.data_ptr());
  for (int64_t r = 0; r < num_ranks; ++r) args.inboxes[r] = static_cast<uint64_t>(addresses[r]);
  const unsigned grid = static_cast<unsigned>(ceil_div(packs, int64_t{args.block_packs}));
  const LaunchScope scope(input);
  dispatch_float(input.scalar_type(),
                 [&]<typename T>(TypeTag<T>) { launch_sum<T>(scope, args, num_ranks, grid); });
  scope.check(kOp);
}

int64_t get_inbox_bytes(int64_t num_ranks) { return inbox_bytes(num_ranks); }

}  // namespace

}  // namespace vllm::cuda

VLLM_OPS(_C, m) {
  m.def(
      "all_reduce_peers(Tensor! out, Tensor input, Tensor! counts, Tensor inboxes, int rank, "
      "int patience_ms, bool is_trial) -> ()");
  m.def("inbox_bytes(int num_ranks) -> int");
}

VLLM_OPS_IMPL(_C, CUDA, m) {
  m.impl("all_reduce_peers", TORCH_BOX(&vllm::cuda::all_reduce_peers_op));
}

VLLM_OPS_IMPL(_C, CompositeExplicitAutograd, m) {
  m.impl("inbox_bytes", TORCH_BOX(&vllm::cuda::get_inbox_bytes));
}
