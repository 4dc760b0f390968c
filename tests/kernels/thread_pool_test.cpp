// Runs a thread team through many short phases, each of which reads what the previous phase wrote.
#include "thread_pool.h"

#include <cstdio>
#include <ctime>

using namespace midstream;

static int fail(const char* what) {
  std::puts(what);
  return 1;
}

// Computes numbers in phases: each phase reads the number at the opposite end from the previous phase and adds its own.
static bool runs_phases(ThreadPool& pool, int num_threads, int count, int num_phases) {
  std::vector<long> rows[2] = {std::vector<long>(count, 0), std::vector<long>(count, 0)};
  std::vector<int> visits(count, 0);
  pool.run(num_threads, [&](int) {
    for (int phase = 0; phase < num_phases; ++phase)
      pool.for_each(count, 1 + phase % 3, [&, phase](int i) {
        rows[(phase + 1) % 2][i] = rows[phase % 2][count - 1 - i] + phase;
        ++visits[i];
      });
  });
  long expected = static_cast<long>(num_phases) * (num_phases - 1) / 2;
  for (int i = 0; i < count; ++i)
    if (rows[num_phases % 2][i] != expected || visits[i] != num_phases) return false;
  return true;
}

int main() {
  for (int size = 1; size <= 5; ++size) {
    ThreadPool pool(size);
    for (int repeat = 0; repeat < 20; ++repeat)
      for (int count : {0, 1, 2, 7, 40})
        for (int num_threads : {1, 2, size, 9})
          if (!runs_phases(pool, num_threads, count, 30)) return fail("a phase did not see the one before");
    // Threads that have had time to fall asleep wake up again.
    timespec pause{0, 2000000};
    nanosleep(&pause, nullptr);
    if (!runs_phases(pool, size, 40, 30)) return fail("a phase after sleep did not see the one before");
  }
  // Phases of another team on the same thread are not counted.
  ThreadPool first(3), second(2);
  for (int repeat = 0; repeat < 50; ++repeat)
    if (!runs_phases(first, 3, 9, 5) || !runs_phases(second, 2, 4, 8)) return fail("two teams got mixed up");
  // One pool ends while its threads sleep; the threads of another pool were never needed.
  ThreadPool idle(4);
  std::puts("done");
  return 0;
}
