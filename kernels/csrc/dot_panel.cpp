#include "dot_panel.h"

#include <algorithm>

namespace midstream {
namespace {

#if defined(__AVX512F__)
constexpr int kDotRows = 6, kDotVectors = 2;
#else
constexpr int kDotRows = 4, kDotVectors = 2;
#endif

// Each block: words(group, vector), and scale and minimum of a vector. Signed bytes become unsigned by adding 128.

struct Q4Dots {
  static constexpr int kBytes = Q4Block::kBytes;
  static constexpr bool kAreNibbles = true;
  const uint8_t* block;
  I words(int group, int v) const {
    I word = load_int(block + kPanel * 4 + ((group % 4) * kPanel + v * kLanes) * 4);
    return bit_and(group < 4 ? word : shift_right<4>(word), set1_int(0x0f0f0f0fu));
  }
  F scale(int v) const { return load_half(reinterpret_cast<const uint16_t*>(block) + v * kLanes); }
  F minimum(int v) const { return load_half(reinterpret_cast<const uint16_t*>(block) + kPanel + v * kLanes); }
};

struct Q8Dots {
  static constexpr int kBytes = Q8Block::kBytes;
  static constexpr bool kAreNibbles = false;
  const uint8_t* block;
  I words(int group, int v) const {
    return bit_xor(load_int(block + kPanel * 2 + (group * kPanel + v * kLanes) * 4), set1_int(0x80808080u));
  }
  F scale(int v) const { return load_half(reinterpret_cast<const uint16_t*>(block) + v * kLanes); }
  F minimum(int v) const { return mul(scale(v), set1(-128.0f)); }
};

struct Int8Dots {
  static constexpr int kBytes = Int8Block::kBytes;
  static constexpr bool kAreNibbles = false;
  const uint8_t* block;
  I words(int group, int v) const {
    return bit_xor(load_int(block + (group * kPanel + v * kLanes) * 4), set1_int(0x80808080u));
  }
  F scale(int) const { return set1(1.0f); }
  F minimum(int) const { return set1(-128.0f); }
};

struct TileDots {
  const DotTile& tile;
  int first_vector;
  I words(int group, int v) const { return load_int(&tile.words[group][(first_vector + v) * kLanes]); }
  F scale(int v) const { return load(tile.scale + (first_vector + v) * kLanes); }
  F minimum(int v) const { return load(tile.minimum + (first_vector + v) * kLanes); }
};

template <bool are_nibbles> [[gnu::always_inline]] inline I dot(I sum, I u, I x) {
  return are_nibbles ? dot_nibbles(sum, u, x) : dot_bytes(sum, u, x);
}

// sum [R, V] += one block of R rows times V vectors of channels.
template <bool are_nibbles, int R, int V, class Dots>
[[gnu::always_inline]] inline void add_block(const Dots& weights, const QuantizedRows& rows, int64_t first, F (&sum)[R][V]) {
  I dots[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) dots[r][v] = set1_int(0);
#pragma GCC unroll 8
  for (int group = 0; group < kGroups; ++group) {
    I w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) w[v] = weights.words(group, v);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      I x = set1_int(rows.words[(first + r * rows.num_blocks) * kGroups + group]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) dots[r][v] = dot<are_nibbles>(dots[r][v], w[v], x);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    F scale = weights.scale(v), minimum = weights.minimum(v);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      int64_t block = first + r * rows.num_blocks;
      F product = to_float(are_nibbles ? finish_nibbles(dots[r][v]) : dots[r][v]);
      sum[r][v] = fma(mul(scale, set1(rows.scales[block])), product, sum[r][v]);
      sum[r][v] = fma(minimum, set1(rows.sums[block]), sum[r][v]);
    }
  }
}

template <int R, int V> [[gnu::always_inline]] inline void clear(F (&sum)[R][V]) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = zero();
}

template <int R, int V> [[gnu::always_inline]] inline void read(F (&sum)[R][V], const float* sums) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = load(sums + r * kPanel + v * kLanes);
}

template <int R, int V> [[gnu::always_inline]] inline void write(const F (&sum)[R][V], float* sums) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sums + r * kPanel + v * kLanes, sum[r][v]);
}

// One row: weights go from memory to registers and are gone.
template <class Dots> void sum_one(const uint8_t* panel, const QuantizedRows& rows, float* sums) {
  F sum[1][kPanelVectors];
  clear(sum);
  for (int b = 0; b < rows.num_blocks; ++b)
    add_block<Dots::kAreNibbles, 1, kPanelVectors>(Dots{panel + static_cast<int64_t>(b) * Dots::kBytes}, rows, b, sum);
  write(sum, sums);
}

// The blocks of a row from first to end; tile has those.
struct BlockRange {
  int first, end;
};

template <bool are_nibbles, int R>
[[gnu::noinline]] void sum_tile(const DotTile* tile, BlockRange range, const QuantizedRows& rows, int row, float* sums) {
  int64_t row_first = static_cast<int64_t>(row) * rows.num_blocks;
  for (int v = 0; v < kPanelVectors; v += kDotVectors) {
    F sum[R][kDotVectors];
    float* out = sums + row * kPanel + v * kLanes;
    if (range.first == 0) {
      clear(sum);
    } else {
      read(sum, out);
    }
    for (int b = range.first; b < range.end; ++b)
      add_block<are_nibbles, R, kDotVectors>(TileDots{tile[b - range.first], v}, rows, row_first + b, sum);
    write(sum, out);
  }
}

template <bool are_nibbles>
void sum_tile(int num_rows, const DotTile* tile, BlockRange range, const QuantizedRows& rows, int row, float* sums) {
  switch (num_rows) {
    case 1: return sum_tile<are_nibbles, 1>(tile, range, rows, row, sums);
    case 2: return sum_tile<are_nibbles, 2>(tile, range, rows, row, sums);
    case 3: return sum_tile<are_nibbles, 3>(tile, range, rows, row, sums);
    case 4: return sum_tile<are_nibbles, 4>(tile, range, rows, row, sums);
    case 5: return sum_tile<are_nibbles, std::min(5, kDotRows)>(tile, range, rows, row, sums);
    default: return sum_tile<are_nibbles, kDotRows>(tile, range, rows, row, sums);
  }
}

template <class Dots> void unpack(const uint8_t* panel, BlockRange range, DotTile* tile) {
  for (int b = 0; b < range.end - range.first; ++b) {
    Dots weights{panel + static_cast<int64_t>(range.first + b) * Dots::kBytes};
    for (int v = 0; v < kPanelVectors; ++v) {
      for (int group = 0; group < kGroups; ++group) store_int(&tile[b].words[group][v * kLanes], weights.words(group, v));
      store(tile[b].scale + v * kLanes, weights.scale(v));
      store(tile[b].minimum + v * kLanes, weights.minimum(v));
    }
  }
}

template <class Dots>
void sum_dots(const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, DotTile* tile) {
  if (m == 1) return sum_one<Dots>(panel, rows, sums);
  for (int first = 0; first < rows.num_blocks; first += kDotTileBlocks) {
    BlockRange range{first, std::min(first + kDotTileBlocks, rows.num_blocks)};
    unpack<Dots>(panel, range, tile);
    for (int row = 0; row < m; row += kDotRows)
      sum_tile<Dots::kAreNibbles>(std::min(kDotRows, m - row), tile, range, rows, row, sums);
  }
}

}  // namespace

void sum_dots(Format format, const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, DotTile* tile) {
  if (format == Format::kQ4) sum_dots<Q4Dots>(panel, m, rows, sums, tile);
  if (format == Format::kQ8) sum_dots<Q8Dots>(panel, m, rows, sums, tile);
  if (format == Format::kInt8) sum_dots<Int8Dots>(panel, m, rows, sums, tile);
}

}  // namespace midstream
