// Independent pieces of work, shared by the thread that was called and those of XLA's pool that have time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ringjax {

// Turns to add to the same sums, which several pieces of work take tile by tile: one may be working on a tile while the
// next one already is on the tile before it. A piece may only wait for pieces that were begun earlier.
class Turn {
 public:
  using Tiles = std::atomic<long>;  // that a piece is done with

  // `before` = null: nobody is to be waited for.
  Turn(const Tiles* before, Tiles& mine) : before_(before), mine_(mine) {}
  ~Turn() { mine_.store(std::numeric_limits<long>::max(), std::memory_order_release); }
  Turn(const Turn&) = delete;

  void await(long tile) const {
    while (before_ && before_->load(std::memory_order_acquire) <= tile) std::this_thread::yield();
  }

  void done(long tile) { mine_.store(tile + 1, std::memory_order_release); }

 private:
  const Tiles* before_;
  Tiles& mine_;
};

// That can work at the same time: the pool of many devices on one machine may have more than there are cores.
inline long threads(const xla::ffi::ThreadPool& pool) {
  return std::min<long>(pool.num_threads(), std::max(1u, std::thread::hardware_concurrency()));
}

// Runs work(0) ... work(count - 1) and returns when all are done. Rethrows what the work throws.
//
// Several devices, and XLA's own operations, use one pool, so a helper may start late or after all is done. The caller
// therefore takes pieces itself until none is left and then waits only for pieces that another thread has begun:
// those finish, whatever else the pool has to do. Who does a piece has no influence on its result.
inline void run_all(xla::ffi::ThreadPool& pool, long count, std::function<void(long)> work) {
  struct Shared {
    std::function<void(long)> work;
    long count;
    std::atomic<long> next{0};
    std::mutex mutex;
    std::condition_variable changed;
    long done = 0;
    std::exception_ptr failure;

    void take_pieces() {
      for (long i = next++; i < count; i = next++) {
        std::exception_ptr failed;
        try {
          work(i);
        } catch (...) {
          failed = std::current_exception();
        }
        const std::lock_guard<std::mutex> lock(mutex);
        if (failed) failure = failed;
        if (++done == count) changed.notify_all();
      }
    }
  };
  const auto shared = std::make_shared<Shared>();
  shared->work = std::move(work);
  shared->count = count;
  const long helpers = std::min(count, threads(pool)) - 1;
  for (long i = 0; i < helpers; i++) pool.Schedule([shared] { shared->take_pieces(); });
  shared->take_pieces();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->changed.wait(lock, [&] { return shared->done == count; });
  if (shared->failure) std::rethrow_exception(shared->failure);
}

}  // namespace ringjax
