#include "thread_pool.h"

#include <immintrin.h>
#include <sched.h>

namespace midstream {
namespace {

// Between two calls of one step a thread spins, some tens of microseconds; then it sleeps or gives way.
constexpr int kSpins = 2000;

void pin_this_thread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof(set), &set);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, const int* cpus) : num_threads_(num_threads) {
  for (int i = 1; i < num_threads; ++i) {
    int cpu = cpus ? cpus[i - 1] : -1;
    threads_.emplace_back([this, i, cpu] {
      if (cpu >= 0) pin_this_thread(cpu);
      work(i);
    });
  }
}

ThreadPool::~ThreadPool() {
  stopping_ = true;
  started_.fetch_add(1, std::memory_order_release);
  started_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(int)>& body) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_threads_ == 1) return body(0);
  body_ = &body;
  started_.fetch_add(1, std::memory_order_release);
  started_.notify_all();
  body(0);
  barrier();
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    for (int i = 0; i < kSpins && started_.load(std::memory_order_acquire) == seen; ++i) _mm_pause();
    started_.wait(seen, std::memory_order_acquire);
    ++seen;
    if (stopping_) return;
    (*body_)(thread);
    barrier();
  }
}

void ThreadPool::barrier() {
  uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int i = 0; phase_.load(std::memory_order_acquire) == phase; ++i) {
    if (i < kSpins) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }
}

}  // namespace midstream
