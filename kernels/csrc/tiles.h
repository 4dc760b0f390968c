// AMX tile registers. A thread has eight, each with 16 rows of 64 bytes. The first ones contain sums and inputs, the last ones
// weights.
#pragma once
#include <cstdint>
#include <cstring>

#include "vec.h"

namespace midstream {

constexpr int kTileRows = 16;
constexpr int kTileBytes = kTileRows * 64;

#if defined(__AVX512F__) || defined(MIDSTREAM_PAIR)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

// Requests permission to use tiles for all threads of the process; returns false if the system or the processor does not support
// them.
bool request_tiles();

#if defined(__AVX512F__)

// Sets the number of rows of sums and inputs; weights have kTileRows rows.
inline void configure_tiles(int rows, int num_weights) {
  alignas(64) uint8_t config[64] = {1};
  for (int i = 0; i < 8; ++i) {
    config[16 + 2 * i] = 64;
    config[48 + i] = static_cast<uint8_t>(i < 8 - num_weights ? rows : kTileRows);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}
// Releases the tiles, so that a context switch need not save them.
inline void release_tiles() { asm volatile("tilerelease"); }

template <int tile> inline void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }
template <int tile> inline void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}
template <int tile> inline void store_tile(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}
// Adds to sum[r][c], for all i: left[r][2 i] * right[i][2 c] + left[r][2 i + 1] * right[i][2 c + 1]. Factors are bfloat16, sums
// float32.
template <int sum, int left, int right> inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(left), "i"(right));
}

#else

// A slow emulation in plain C++, so that code that uses tiles can be tested on any machine.
struct Tile {
  uint8_t bytes[kTileRows][64];
};
inline thread_local Tile tiles[8];

inline void configure_tiles(int, int) {}
inline void release_tiles() {}
template <int tile> inline void clear_tile() { tiles[tile] = {}; }
template <int tile> inline void load_tile(const void* p, int64_t stride) {
  for (int i = 0; i < kTileRows; ++i) std::memcpy(tiles[tile].bytes[i], static_cast<const uint8_t*>(p) + i * stride, 64);
}
template <int tile> inline void store_tile(void* p, int64_t stride) {
  for (int i = 0; i < kTileRows; ++i) std::memcpy(static_cast<uint8_t*>(p) + i * stride, tiles[tile].bytes[i], 64);
}
template <int sum, int left, int right> inline void multiply_tiles() {
  auto number = [](const Tile& tile, int row, int i) {
    float x = 0;
    std::memcpy(reinterpret_cast<uint8_t*>(&x) + 2, tile.bytes[row] + 2 * i, 2);
    return x;
  };
  for (int r = 0; r < kTileRows; ++r)
    for (int c = 0; c < 16; ++c) {
      float before, products = 0;
      for (int i = 0; i < 32; ++i) products += number(tiles[left], r, i) * number(tiles[right], i / 2, 2 * c + i % 2);
      std::memcpy(&before, tiles[sum].bytes[r] + 4 * c, 4);
      float after = before + products;
      std::memcpy(tiles[sum].bytes[r] + 4 * c, &after, 4);
    }
}

#endif

}  // namespace midstream
