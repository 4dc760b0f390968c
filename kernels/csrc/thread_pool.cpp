#include "thread_pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

namespace midstream {
namespace {

// Waiting awake is shorter than sleep and waking; a longer wait means that the others' processor is busy elsewhere.
constexpr int kAwakeMicroseconds = 20;
constexpr uint32_t kInside = 0xffff, kOnePlace = kInside + 1;  // of the gate

// The phase that this thread is in; a thread is inside one team at a time.
thread_local uint32_t current_phase;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

void pin_this_thread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof(set), &set);
}

}  // namespace

void WaitWord::wait_while(uint32_t value, int most_awake) {
  auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(most_awake);
  do {
    for (int i = 0; i < 16; ++i) {
      if (load() != value) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  // Either this sees the new value, or who stores it sees that somebody is asleep.
  num_asleep_.fetch_add(1, std::memory_order_seq_cst);
  while (value_.load(std::memory_order_seq_cst) == value)
    syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  num_asleep_.fetch_sub(1, std::memory_order_relaxed);
}

void WaitWord::wake(int most) {
  if (num_asleep_.load(std::memory_order_seq_cst))
    syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
}

ThreadPool::ThreadPool(int num_threads, const int* cpus) : num_threads_(num_threads) {
  for (int i = 1; i < num_threads; ++i) {
    int cpu = cpus ? cpus[i - 1] : -1;
    threads_.emplace_back([this, i, cpu] {
      prctl(PR_SET_NAME, "compute");
      if (cpu >= 0) pin_this_thread(cpu);
      work(i);
    });
  }
}

ThreadPool::~ThreadPool() {
  is_stopping_ = true;
  num_runs_.store(num_runs_.load() + 1);
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
  current_phase = first_phase_ = phase_.load();
  gate_.value().store((num_active_ - 1) * kOnePlace, std::memory_order_release);
  num_runs_.value().fetch_add(1, std::memory_order_seq_cst);
  num_runs_.wake(num_active_ - 1);
  body(0);
  uint32_t inside = gate_.value().fetch_and(kInside, std::memory_order_acq_rel) & kInside;
  while (inside) {
    gate_.wait_while(inside, kAwakeMicroseconds);
    inside = gate_.load();
  }
}

bool ThreadPool::enter() {
  std::atomic<uint32_t>& gate = gate_.value();
  uint32_t inside = gate.load(std::memory_order_acquire);
  while (inside >= kOnePlace)
    if (gate.compare_exchange_weak(inside, inside - kOnePlace + 1, std::memory_order_acq_rel, std::memory_order_acquire)) return true;
  return false;
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    num_runs_.wait_while(seen, kAwakeMicroseconds);
    seen = num_runs_.load();
    if (is_stopping_) return;
    if (!enter()) continue;
    current_phase = first_phase_;
    (*body_)(thread);
    if (gate_.value().fetch_sub(1, std::memory_order_seq_cst) == 1) gate_.wake(1);
  }
}

uint32_t ThreadPool::next_phase() { return current_phase++; }

void ThreadPool::wait_for(uint32_t phase) { phase_.wait_while(phase, kAwakeMicroseconds); }

void ThreadPool::finish(uint32_t phase) {
  num_done_.store(0, std::memory_order_relaxed);
  ticket_.store(static_cast<uint64_t>(phase + 1) << 32, std::memory_order_release);
  phase_.store(phase + 1);
}

}  // namespace midstream
