// Inboxes: memory of every rank into which the others write what they have to say.
//
// A line of 16 bytes has 8 of payload, each half followed by the number of the message, so that who
// reads needs no other sign that a line has come: a store of 8 bytes arrives whole. (The idea is
// that of NCCL's protocol LL; Hu et al., "Demystifying NCCL", 2025, section III, describe it.)
// A block of threads has its own part of an inbox and numbers its messages itself. Messages of odd
// and of even numbers lie apart: a rank writes message m only after it has read all of m - 1, whose
// senders had then ended the kernel that read m - 2.
#pragma once

#include <cstdint>

namespace vllm::cuda {

inline constexpr int kMaxRanks = 8;
inline constexpr int kInboxBlocks = 64;
inline constexpr int kBlockPacks = 1024;  // of 16 bytes, in a message of one block
inline constexpr int kLineBytes = 16;
inline constexpr int kPackLines = 2;  // a pack of 16 bytes of payload

inline constexpr int64_t inbox_bytes(int64_t num_ranks) {
  return 2 * num_ranks * kInboxBlocks * kBlockPacks * kPackLines * kLineBytes;
}

// Where block `block` of rank `source` leaves message `number` in an inbox: packs of two lines.
__device__ __forceinline__ ulonglong2* find_lines(uint64_t inbox, int num_ranks, int source,
                                                  uint32_t block, uint32_t number) {
  const int64_t part = (int64_t{number & 1} * num_ranks + source) * kInboxBlocks + block;
  return reinterpret_cast<ulonglong2*>(inbox) + part * kBlockPacks * kPackLines;
}

__device__ __forceinline__ uint64_t mark(uint32_t payload, uint32_t number) {
  return uint64_t{number} << 32 | payload;
}

// Both halves of a line are whole at any time; which is first does not matter.
__device__ __forceinline__ void send_line(ulonglong2* line, uint32_t x, uint32_t y,
                                          uint32_t number) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(line), "l"(mark(x, number)),
               "l"(mark(y, number))
               : "memory");
}

__device__ __forceinline__ ulonglong2 look_at_line(const ulonglong2* line) {
  ulonglong2 found;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(found.x), "=l"(found.y)
               : "l"(line)
               : "memory");
  return found;
}

__device__ __forceinline__ bool has_come(const ulonglong2& line, uint32_t number) {
  return static_cast<uint32_t>(line.x >> 32) == number &&
         static_cast<uint32_t>(line.y >> 32) == number;
}

__device__ __forceinline__ uint64_t read_clock_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

}  // namespace vllm::cuda
