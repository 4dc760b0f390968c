#include "thread_pool.h"

#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

namespace midstream {
namespace {

constexpr uint32_t kInside = 0xffff, kOnePlace = kInside + 1;  // the two halves of the gate

// The phase of this thread, which works for one pool at a time.
thread_local uint32_t current_phase;

}  // namespace

int64_t Waiters::now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Waiters::relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

void Waiters::sleep(uint32_t seen) { syscall(SYS_futex, &num_calls_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }

void Waiters::call(int most) {
  num_calls_.fetch_add(1);
  syscall(SYS_futex, &num_calls_, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  for (int i = 1; i < num_threads; ++i) {
    threads_.emplace_back([this, i] {
      prctl(PR_SET_NAME, "compute");
      work(i);
    });
  }
}

ThreadPool::~ThreadPool() {
  is_stopping_ = true;
  num_runs_.fetch_add(1);
  of_run_.wake(INT32_MAX);
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(int num_threads, const std::function<void(int)>& body) {
  std::lock_guard<std::mutex> lock(mutex_);
  num_active_ = num_threads < num_threads_ ? num_threads : num_threads_;
  if (num_active_ <= 1) {
    num_active_ = 1;
    return body(0);
  }
  body_ = &body;
  current_phase = first_phase_ = static_cast<uint32_t>(ticket_.load() >> 32);
  gate_.store((num_active_ - 1) * kOnePlace);
  num_runs_.fetch_add(1);
  of_run_.wake(num_active_ - 1);
  body(0);
  if (gate_.fetch_and(kInside) & kInside) of_gate_.wait([&] { return gate_.load() == 0; });
}

bool ThreadPool::enter() {
  uint32_t inside = gate_.load();
  while (inside >= kOnePlace)
    if (gate_.compare_exchange_weak(inside, inside - kOnePlace + 1)) return true;
  return false;
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    of_run_.wait([&] { return num_runs_.load() != seen; });
    seen = num_runs_.load();
    if (is_stopping_) return;
    if (!enter()) continue;
    current_phase = first_phase_;
    (*body_)(thread);
    if (gate_.fetch_sub(1) == 1) of_gate_.wake(1);
  }
}

uint32_t ThreadPool::next_phase() { return current_phase++; }

void ThreadPool::wait_for(uint32_t phase) {
  of_phase_.wait([&] { return ticket_.load() >> 32 != phase; });
}

void ThreadPool::finish(uint32_t phase) {
  num_done_.store(0, std::memory_order_relaxed);
  ticket_.store(static_cast<uint64_t>(phase + 1) << 32);
  of_phase_.wake(INT32_MAX);
}

}  // namespace midstream
