// A small team of threads that run one function together.
#pragma once
#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace midstream {

class ThreadPool {
 public:
  // The caller of run is thread 0; cpus, where given, has one processor for each of the other threads.
  ThreadPool(int num_threads, const int* cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }

  // Calls body(thread) on every thread of the team, and returns when all have ended. One caller at a time.
  void run(const std::function<void(int)>& body);

  // Inside run, called by every thread: body(i) once for each i in 0..count-1 by whichever thread is free, grain at a
  // time; returns when all are done. Which thread it is must not change what is computed.
  template <class Body> void for_each(int count, int grain, Body&& body) {
    if (num_threads_ == 1) {
      for (int i = 0; i < count; ++i) body(i);
      return;
    }
    for (;;) {
      int begin = next_.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) break;
      int end = begin + grain < count ? begin + grain : count;
      for (int i = begin; i < end; ++i) body(i);
    }
    barrier();
  }

  // Pieces of a loop of this length such that threads seldom meet at the counter and still end together.
  int grain(int count) const { return count / (8 * num_threads_) + 1; }

 private:
  void barrier();
  void work(int thread);

  const int num_threads_;
  std::mutex mutex_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* body_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<uint32_t> started_{0};
};

}  // namespace midstream
