// Print the peak rates of a processor's multiply instructions on one thread, and its rate of reading memory.
//
// g++ -std=c++20 -O2 -march=native -pthread benchmarks/processor_limits.cpp -o /tmp/limits && /tmp/limits
//
// Each figure is the best of many short runs. Operands are in registers; multiplications and additions both count.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

constexpr int kRounds = 20000;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Body> double best_seconds(double seconds, Body&& body) {
  double best = 1e9;
  for (double end = now() + seconds; now() < end;) {
    double started = now();
    body();
    best = std::min(best, now() - started);
  }
  return best;
}

template <class Body> void print_rate(const char* name, int operations, Body&& body) {
  double seconds = best_seconds(0.3, [&] {
    for (int i = 0; i < kRounds; ++i) body();
  });
  std::printf("%-20s %6.0f GFLOP/s\n", name, 1e-9 * kRounds * operations / seconds);
}

#define TWELVE(op, a, b, r)                                                                                             \
  op " " a "," b "," r "0\n" op " " a "," b "," r "1\n" op " " a "," b "," r "2\n" op " " a "," b "," r "3\n"           \
  op " " a "," b "," r "4\n" op " " a "," b "," r "5\n" op " " a "," b "," r "6\n" op " " a "," b "," r "7\n"           \
  op " " a "," b "," r "8\n" op " " a "," b "," r "9\n" op " " a "," b "," r "10\n" op " " a "," b "," r "11\n"
#define CLOBBERS                                                                                                        \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11"
#define WIDE(op) [] { asm volatile(TWELVE(op, "%%zmm31", "%%zmm30", "%%zmm") ::: CLOBBERS); }
#define NARROW(op) [] { asm volatile(TWELVE(op, "%%ymm15", "%%ymm14", "%%ymm") ::: CLOBBERS); }
#define TILES(op)                                                                                                       \
  [] {                                                                                                                  \
    asm volatile(op " %%tmm5,%%tmm4,%%tmm0\n" op " %%tmm7,%%tmm4,%%tmm1\n" op " %%tmm5,%%tmm6,%%tmm2\n"                \
                 op " %%tmm7,%%tmm6,%%tmm3\n" ::);                                                                      \
  }

void print_instructions() {
  print_rate("vfmadd231ps ymm", 12 * 16, NARROW("vfmadd231ps"));
  print_rate("vpmaddwd ymm", 12 * 32, NARROW("vpmaddwd"));
#ifdef __AVXVNNI__
  print_rate("vpdpwssd ymm", 12 * 32, NARROW("%{vex%} vpdpwssd"));
  print_rate("vpdpbusd ymm", 12 * 64, NARROW("%{vex%} vpdpbusd"));
#endif
#ifdef __AVX512VNNI__
  print_rate("vfmadd231ps zmm", 12 * 32, WIDE("vfmadd231ps"));
  print_rate("vpdpwssd zmm", 12 * 64, WIDE("vpdpwssd"));
  print_rate("vpdpbusd zmm", 12 * 128, WIDE("vpdpbusd"));
#endif
#ifdef __AVX512BF16__
  print_rate("vdpbf16ps zmm", 12 * 64, WIDE("vdpbf16ps"));
#endif
#ifdef __AMX_INT8__
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return;
  alignas(64) uint8_t config[64] = {1};
  for (int i = 0; i < 8; ++i) config[16 + 2 * i] = 64, config[48 + i] = 16;
  asm volatile("ldtilecfg %0" ::"m"(config));
  print_rate("tdpbf16ps", 4 * 16 * 16 * 64, TILES("tdpbf16ps"));
  print_rate("tdpbssd", 4 * 16 * 16 * 128, TILES("tdpbssd"));
  asm volatile("tilerelease");
#endif
}

#ifdef __AVX512F__
using Vector = __m512i;
Vector combine(Vector a, Vector b) { return _mm512_or_si512(a, b); }
#else
using Vector = __m256i;
Vector combine(Vector a, Vector b) { return _mm256_or_si256(a, b); }
#endif

void read_all(const char* bytes, size_t size) {
  constexpr int kStreams = 8;
  Vector sums[kStreams] = {};
  for (size_t i = 0; i < size; i += sizeof(sums))
    for (int j = 0; j < kStreams; ++j)
      sums[j] = combine(sums[j], *reinterpret_cast<const Vector*>(bytes + i + j * sizeof(Vector)));
  asm volatile("" ::"m"(sums));
}

void print_memory() {
  for (size_t kib : {16, 1 << 10, 8 << 10, 100 << 10, 1 << 20}) {
    size_t size = kib << 10, repeats = std::max<size_t>(1, (64u << 20) / size);
    char* bytes = static_cast<char*>(std::aligned_alloc(2 << 20, std::max<size_t>(size, 2 << 20)));
    std::memset(bytes, 1, size);
    double one = best_seconds(0.5, [&] {
      for (size_t i = 0; i < repeats; ++i) read_all(bytes, size);
    });
    double two = best_seconds(0.5, [&] {
      std::atomic<int> ready{0};
      auto read_half = [&](int half) {
        for (++ready; ready < 2;) {}
        for (size_t i = 0; i < repeats; ++i) read_all(bytes + half * size / 2, size / 2);
      };
      std::thread other(read_half, 1);
      read_half(0);
      other.join();
    });
    double gigabytes = 1e-9 * static_cast<double>(size * repeats);
    std::printf("reading %7zu KiB: %5.1f GB/s with one thread, %5.1f with two\n", kib, gigabytes / one, gigabytes / two);
    std::free(bytes);
  }
}

}  // namespace

int main() {
  print_instructions();
  print_memory();
}
