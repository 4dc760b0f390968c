// A small team of threads that run one function together.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace midstream {

// Threads that wait for a change of some atomic: awake for some microseconds, then asleep, so that other programs get the
// processor.
class Waiters {
 public:
  // Returns when is_over(), which reads that atomic in sequentially consistent order.
  template <class IsOver> void wait(IsOver&& is_over) {
    if (stays_awake(is_over)) return;
    // Either this sees the change, or who made it sees that somebody is asleep.
    num_asleep_.fetch_add(1);
    for (;;) {
      uint32_t seen = num_calls_.load();
      if (is_over()) break;
      sleep(seen);
    }
    num_asleep_.fetch_sub(1);
  }
  // After a sequentially consistent change.
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

  // In nanoseconds: less than sleep and waking take. A longer wait means that the others' processor is busy elsewhere.
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
  // The caller of run is thread 0; cpus, where given, has one processor for each of the other threads.
  ThreadPool(int num_threads, const int* cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }

  // Calls body(0) here and body(thread) on up to num_threads - 1 others, all of which go through the same calls of
  // for_each in the same order. A thread that comes late skips what the others have done meanwhile, and one that does not
  // come at all is not waited for, so body must do its work inside for_each. One caller at a time.
  void run(int num_threads, const std::function<void(int)>& body);
  void run(const std::function<void(int)>& body) { run(num_threads_, body); }

  // Inside run, called by every thread: body(i) once for each i in 0..count-1 by whichever thread is free, grain at a
  // time; returns when all are done. Which thread it is must not change what is computed.
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

  // Pieces of a loop of this length such that threads seldom meet at the counter and still end together.
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
  // Set while nobody is inside: what the team runs, on how many threads, from which phase on.
  const std::function<void(int)>* body_ = nullptr;
  int num_active_ = 1;
  uint32_t first_phase_ = 0;
  // Each call of for_each is a phase. The ticket is the phase, and in the low half the first piece nobody has taken.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> num_done_{0};
  alignas(64) std::atomic<uint32_t> num_runs_{0};
  alignas(64) std::atomic<uint32_t> gate_{0};  // how many others are inside; in the high half how many more may enter
  alignas(64) Waiters of_phase_, of_run_, of_gate_;
  std::atomic<bool> is_stopping_{false};
};

}  // namespace midstream
