// Memory that a thread keeps from one piece of work to the next.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace ringjax {

// Hands out aligned pieces of blocks, all given back at once.
class Scratch {
 public:
  // The calling thread's own, with everything given back.
  static Scratch& fresh() {
    thread_local Scratch scratch;
    scratch.block_ = 0;
    scratch.used_ = 0;
    return scratch;
  }

  template <typename T>
  T* take(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    while (block_ < blocks_.size() && used_ + bytes > blocks_[block_].size) {
      block_++;
      used_ = 0;
    }
    if (block_ == blocks_.size()) {
      const size_t size = bytes > kBlock ? bytes : kBlock;
      void* memory = std::aligned_alloc(64, size);
      if (!memory) throw std::bad_alloc();
      blocks_.push_back({std::unique_ptr<char, decltype(&std::free)>(static_cast<char*>(memory), &std::free), size});
    }
    T* piece = reinterpret_cast<T*>(blocks_[block_].memory.get() + used_);
    used_ += bytes;
    return piece;
  }

  template <typename T>
  T* zeros(size_t count) {
    T* piece = take<T>(count);
    std::memset(piece, 0, count * sizeof(T));
    return piece;
  }

 private:
  static constexpr size_t kBlock = size_t{1} << 20;
  struct Block {
    std::unique_ptr<char, decltype(&std::free)> memory;
    size_t size;
  };
  std::vector<Block> blocks_;
  size_t block_ = 0, used_ = 0;
};

}  // namespace ringjax
