// A pool of threads that run one function together.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace midstream {

// Threads that wait for a change of an atomic: they spin for some microseconds and then sleep, so that other programs can use
// the processor.
class Waiters {
 public:
  // Returns when is_over() is true. is_over() must read the atomic in sequentially consistent order.
  template <class IsOver> void wait(IsOver&& is_over) {
    if (stays_awake(is_over)) return;
    // Either this thread sees the change, or the thread that made it sees that this one is asleep.
    num_asleep_.fetch_add(1);
    for (;;) {
      uint32_t seen = num_calls_.load();
      if (is_over()) break;
      sleep(seen);
    }
    num_asleep_.fetch_sub(1);
  }
  // Wakes up to `most` threads. Called after a sequentially consistent change.
  void wake(int most) {
    if (num_asleep_.load()) call(most);
  }

 private:
  template <class IsOver> bool stays_awake(IsOver&& is_over) {
    int64_t end = now() + kAwake;
    do {
      for (int i = 0; i < 16; ++i) {
        if (is_over()) return true;
        relax();
      }
    } while (now() < end);
    return false;
  }

  // Nanoseconds to spin: less than falling asleep and waking up take. If a wait is longer, other programs are using the
  // processors of the other threads.
  static constexpr int64_t kAwake = 20000;
  static int64_t now();
  static void relax();
  void sleep(uint32_t seen);
  void call(int most);

  std::atomic<uint32_t> num_calls_{0};
  std::atomic<int> num_asleep_{0};
};

class ThreadPool {
 public:
  // The caller of run() is thread 0.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }

  // Calls body(0) in this thread, and body(thread) in up to num_threads - 1 others. All threads must make the same calls of
  // for_each in the same order. A thread that starts late skips the calls that the others have completed, and one that does not
  // start at all is not waited for, so all work must be inside for_each. Must not be called concurrently.
  void run(int num_threads, const std::function<void(int)>& body);
  void run(const std::function<void(int)>& body) { run(num_threads_, body); }

  // Calls body(i) once for each i in 0..count-1, distributed over the threads in pieces of `grain`; returns when all calls have
  // returned. Called by every thread inside run(). The result must not depend on which thread runs a piece.
  template <class Body> void for_each(int count, int grain, Body&& body) {
    if (count <= 0) return;
    if (num_active_ == 1) {
      for (int i = 0; i < count; ++i) body(i);
      return;
    }
    uint32_t phase = next_phase();
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket >> 32 == phase) {
      int begin = static_cast<int>(ticket & UINT32_MAX);
      if (begin >= count) return wait_for(phase);
      int end = count - begin > grain ? begin + grain : count;
      uint64_t taken = ticket + static_cast<uint64_t>(end - begin);
      if (!ticket_.compare_exchange_weak(ticket, taken, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      for (int i = begin; i < end; ++i) body(i);
      if (num_done_.fetch_add(end - begin, std::memory_order_acq_rel) + end - begin == count) return finish(phase);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  // Returns a piece size for a loop of this length that keeps contention for the counter low, but lets all threads finish at
  // about the same time.
  int grain(int count) const { return count / (8 * num_active_) + 1; }

 private:
  static uint32_t next_phase();
  void wait_for(uint32_t phase);
  void finish(uint32_t phase);
  void work(int thread);
  bool enter();

  const int num_threads_;
  std::mutex mutex_;
  std::vector<std::thread> threads_;
  // Changed only while no other thread is inside: the function to run, the number of threads, and the first phase.
  const std::function<void(int)>* body_ = nullptr;
  int num_active_ = 1;
  uint32_t first_phase_ = 0;
  // Each call of for_each is a phase. The high half of the ticket is the phase, the low half the first index not yet taken.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> num_done_{0};
  alignas(64) std::atomic<uint32_t> num_runs_{0};
  alignas(64) std::atomic<uint32_t> gate_{0};  // low half: number of other threads inside; high half: how many more may enter
  alignas(64) Waiters of_phase_, of_run_, of_gate_;
  std::atomic<bool> is_stopping_{false};
};

}  // namespace midstream
