// Scratch memory, and ops _C::empty_huge: tensors packed side by side into 2 MiB pages, and
// _C::empty_recycled: large tensors that come and go with every step.
//
// Weights are read once a token from end to end. With 4 KiB pages a third of the memory bandwidth
// is lost to address translation, so packed weights live in large mappings that ask for huge pages;
// the order of allocation is the order in memory.
#include "cpu/memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>

#include <torch/csrc/stable/ops.h>

#include "cpu/op.h"

namespace vllm::cpu {

namespace {

constexpr size_t kLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{64} << 20;

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

struct ScratchBuffer {
  void* data = nullptr;
  size_t size = 0;

  ~ScratchBuffer() { std::free(data); }

  void* reserve(size_t bytes) {
    if (bytes > size) {
      std::free(data);
      size = round_up(bytes, 4096);
      data = std::aligned_alloc(4096, size);
      if (data == nullptr) {
        size = 0;
        throw std::bad_alloc();
      }
    }
    return data;
  }
};

// A mapping that starts on a huge page; unmapped with the last tensor that lies in it.
class Chunk {
 public:
  explicit Chunk(size_t bytes) : size_(round_up(bytes, kHugePage)) {
    const size_t mapped = size_ + kHugePage;
    void* start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
    start_ = start;
    const size_t address = reinterpret_cast<size_t>(start);
    data_ = reinterpret_cast<char*>(round_up(address, kHugePage));
    madvise(data_, size_, MADV_HUGEPAGE);  // a hint; without it everything still works
  }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;
  ~Chunk() { munmap(start_, size_ + kHugePage); }

  char* data() const { return data_; }
  size_t size() const { return size_; }
  bool has_room(size_t bytes) const { return used_ + bytes <= size_; }

  char* take(size_t bytes) {
    char* place = data_ + used_;
    used_ += round_up(bytes, kLine);
    return place;
  }

 private:
  void* start_;
  char* data_;
  size_t size_;
  size_t used_ = 0;
};

// Small requests share the current chunk, large ones get one of their own.
Tensor empty_huge(int64_t num_bytes) {
  static std::mutex mutex;
  static std::shared_ptr<Chunk> current;
  CHECK_ARG(num_bytes >= 0, "empty_huge: num_bytes is ", num_bytes, ", must not be negative");
  const size_t bytes = static_cast<size_t>(num_bytes);
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Chunk> chunk = current;
  if (bytes > kChunk / 4) {
    chunk = std::make_shared<Chunk>(bytes);
  } else if (chunk == nullptr || !chunk->has_room(bytes)) {
    chunk = current = std::make_shared<Chunk>(kChunk);
  }
  const int64_t size = num_bytes, stride = 1;
  return torch::stable::from_blob(chunk->take(bytes), {&size, 1}, {&stride, 1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Byte, [chunk](void*) mutable { chunk.reset(); });
}

// Mappings of tensors that have been freed, to be given out again. A mapping that goes back to the
// system costs a page fault for each page of the next one: 12 ms for the logits of 32 rows of
// 262,144.
class Recycler {
 public:
  std::unique_ptr<Chunk> take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (std::unique_ptr<Chunk>& chunk : kept_) {
      if (chunk != nullptr && chunk->size() >= bytes && chunk->size() <= 2 * bytes + kHugePage) {
        return std::move(chunk);
      }
    }
    return std::make_unique<Chunk>(bytes);
  }

  void give_back(std::unique_ptr<Chunk> chunk) {
    if (chunk->size() > kMostKept) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::swap(kept_[next_], chunk);
    next_ = (next_ + 1) % kNumKept;
  }

 private:
  static constexpr size_t kNumKept = 2;
  static constexpr size_t kMostKept = size_t{64} << 20;  // of one mapping

  std::mutex mutex_;
  std::unique_ptr<Chunk> kept_[kNumKept];
  size_t next_ = 0;
};

Tensor empty_recycled(int64_t num_bytes) {
  static Recycler* const recycler = new Recycler;  // outlives every tensor
  CHECK_ARG(num_bytes >= 0, "empty_recycled: num_bytes is ", num_bytes, ", must not be negative");
  std::unique_ptr<Chunk> chunk = recycler->take(static_cast<size_t>(num_bytes));
  char* data = chunk->data();
  const int64_t size = num_bytes, stride = 1;
  Chunk* owned = chunk.release();
  return torch::stable::from_blob(
      data, {&size, 1}, {&stride, 1}, torch::stable::Device(torch::headeronly::DeviceType::CPU),
      ScalarType::Byte, [owned](void*) { recycler->give_back(std::unique_ptr<Chunk>(owned)); });
}

}  // namespace

void* thread_scratch(Scratch use, size_t bytes) {
  thread_local ScratchBuffer buffers[static_cast<int>(Scratch::kCount)];
  return buffers[static_cast<int>(use)].reserve(bytes);
}

VLLM_OPS(_C, m) {
  m.def("empty_huge(int num_bytes) -> Tensor");
  m.def("empty_recycled(int num_bytes) -> Tensor");
}

VLLM_OPS_IMPL(_C, CompositeExplicitAutograd, m) {
  m.impl("empty_huge", TORCH_BOX(&empty_huge));
  m.impl("empty_recycled", TORCH_BOX(&empty_recycled));
}

}  // namespace vllm::cpu
