// Independent pieces of work, shared by the thread that was called and those of XLA's pool that have time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace ringjax {

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
  const long helpers = std::min<long>(count, pool.num_threads()) - 1;
  for (long i = 0; i < helpers; i++) pool.Schedule([shared] { shared->take_pieces(); });
  shared->take_pieces();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->changed.wait(lock, [&] { return shared->done == count; });
  if (shared->failure) std::rethrow_exception(shared->failure);
}

}  // namespace ringjax
