#include "dot_panel.h"

#include <algorithm>

namespace midstream {
namespace {

#if defined(__AVX512F__)
constexpr int kDotRows = 4, kDotVectors = 2;
#else
constexpr int kDotRows = 4, kDotVectors = 2;
#endif

// How the words of weights and input are multiplied and summed in a lane.

struct NibbleProducts {
  static constexpr int kGroups = kBlock / 4;
  [[gnu::always_inline]] static I dot(I sum, I u, I x) { return dot_nibbles(sum, u, x); }
  static I finish(I sum) { return finish_nibbles(sum); }
};

struct ByteProducts {
  static constexpr int kGroups = kBlock / 4;
  [[gnu::always_inline]] static I dot(I sum, I u, I x) { return dot_bytes(sum, u, x); }
  static I finish(I sum) { return sum; }
};

struct HalfProducts {
  static constexpr int kGroups = kBlock / 2;
  [[gnu::always_inline]] static I dot(I sum, I w, I x) { return dot_halves(sum, w, x); }
  static I finish(I sum) { return sum; }
};

// Each block: words(group, vector), and scale and minimum of a vector. Where bytes must be unsigned, 128 is added.

struct Q4Dots {
  using Products = NibbleProducts;
  static constexpr int kBytes = Q4Block::kBytes;
  const uint8_t* block;
  I words(int group, int v) const {
    I word = load_int(block + kPanel * 4 + ((group % 4) * kPanel + v * kLanes) * 4);
    return bit_and(group < 4 ? word : shift_right<4>(word), set1_int(0x0f0f0f0fu));
  }
  F scale(int v) const { return load_half(reinterpret_cast<const uint16_t*>(block) + v * kLanes); }
  F minimum(int v) const { return load_half(reinterpret_cast<const uint16_t*>(block) + kPanel + v * kLanes); }
};

// A word shifted by nibbles holds weights k and k + 16 in its halves.
struct Q4Halves : Q4Dots {
  using Products = HalfProducts;
  [[gnu::always_inline]] I words(int group, int v) const {
    I word = load_int(block + kPanel * 4 + ((group % 4) * kPanel + v * kLanes) * 4);
    switch (group / 4) {
      case 1: word = shift_right<4>(word); break;
      case 2: word = shift_right<8>(word); break;
      case 3: word = shift_right<12>(word); break;
    }
    return bit_and(word, set1_int(0x000f000fu));
  }
};

struct Q8Dots {
  using Products = ByteProducts;
  static constexpr int kBytes = Q8Block::kBytes;
  const uint8_t* block;
  I words(int group, int v) const {
    return bit_xor(load_int(block + kPanel * 2 + (group * kPanel + v * kLanes) * 4), set1_int(0x80808080u));
  }
  F scale(int v) const { return load_half(reinterpret_cast<const uint16_t*>(block) + v * kLanes); }
  F minimum(int v) const { return mul(scale(v), set1(-128.0f)); }
};

// Bytes k and k + 2 of a word, or k + 1 and k + 3.
[[gnu::always_inline]] inline I byte_halves(const uint8_t* words, int group, int v) {
  I word = load_int(words + (group / 2 * kPanel + v * kLanes) * 4);
  return group % 2 ? odd_bytes(word) : even_bytes(word);
}

struct Q8Halves : Q8Dots {
  using Products = HalfProducts;
  [[gnu::always_inline]] I words(int group, int v) const { return byte_halves(block + kPanel * 2, group, v); }
  F minimum(int) const { return zero(); }
};

struct Int8Dots {
  using Products = ByteProducts;
  static constexpr int kBytes = Int8Block::kBytes;
  const uint8_t* block;
  I words(int group, int v) const {
    return bit_xor(load_int(block + (group * kPanel + v * kLanes) * 4), set1_int(0x80808080u));
  }
  F scale(int) const { return set1(1.0f); }
  F minimum(int) const { return set1(-128.0f); }
};

struct Int8Halves : Int8Dots {
  using Products = HalfProducts;
  [[gnu::always_inline]] I words(int group, int v) const { return byte_halves(block, group, v); }
  F minimum(int) const { return zero(); }
};

template <class P> struct TileDots {
  using Products = P;
  const DotTile<P::kGroups>& tile;
  int first_vector;
  I words(int group, int v) const { return load_int(&tile.words[group][(first_vector + v) * kLanes]); }
  F scale(int v) const { return load(tile.scale + (first_vector + v) * kLanes); }
  F minimum(int v) const { return load(tile.minimum + (first_vector + v) * kLanes); }
};

// sum [R, V] += one block of R rows times V vectors of channels.
template <int R, int V, class Dots>
[[gnu::always_inline]] inline void add_block(const Dots& weights, const QuantizedRows& rows, int64_t first, F (&sum)[R][V]) {
  using Products = typename Dots::Products;
  I dots[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) dots[r][v] = set1_int(0);
#pragma GCC unroll 16
  for (int group = 0; group < Products::kGroups; ++group) {
    I w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) w[v] = weights.words(group, v);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      I x = set1_int(rows.words[(first + r * rows.num_blocks) * Products::kGroups + group]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) dots[r][v] = Products::dot(dots[r][v], w[v], x);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    F scale = weights.scale(v), minimum = weights.minimum(v);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      int64_t block = first + r * rows.num_blocks;
      F product = to_float(Products::finish(dots[r][v]));
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
    add_block<1, kPanelVectors>(Dots{panel + static_cast<int64_t>(b) * Dots::kBytes}, rows, b, sum);
  write(sum, sums);
}

// The blocks of a row from first to end; tile has those.
struct BlockRange {
  int first, end;
};

template <class P> constexpr int kTileBlocks = kDotTileBytes / static_cast<int>(sizeof(DotTile<P::kGroups>));

template <class P, int R>
[[gnu::noinline]] void sum_tile(const DotTile<P::kGroups>* tile, BlockRange range, const QuantizedRows& rows, int row,
                                float* sums) {
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
      add_block<R, kDotVectors>(TileDots<P>{tile[b - range.first], v}, rows, row_first + b, sum);
    write(sum, out);
  }
}

template <class P>
void sum_tile(int num_rows, const DotTile<P::kGroups>* tile, BlockRange range, const QuantizedRows& rows, int row,
              float* sums) {
  switch (num_rows) {
    case 1: return sum_tile<P, 1>(tile, range, rows, row, sums);
    case 2: return sum_tile<P, 2>(tile, range, rows, row, sums);
    case 3: return sum_tile<P, 3>(tile, range, rows, row, sums);
    case 4: return sum_tile<P, 4>(tile, range, rows, row, sums);
    case 5: return sum_tile<P, std::min(5, kDotRows)>(tile, range, rows, row, sums);
    default: return sum_tile<P, kDotRows>(tile, range, rows, row, sums);
  }
}

template <class Dots>
void unpack(const uint8_t* panel, BlockRange range, DotTile<Dots::Products::kGroups>* tile) {
  for (int b = 0; b < range.end - range.first; ++b) {
    Dots weights{panel + static_cast<int64_t>(range.first + b) * Dots::kBytes};
    for (int v = 0; v < kPanelVectors; ++v) {
#pragma GCC unroll 16
      for (int group = 0; group < Dots::Products::kGroups; ++group)
        store_int(&tile[b].words[group][v * kLanes], weights.words(group, v));
      store(tile[b].scale + v * kLanes, weights.scale(v));
      store(tile[b].minimum + v * kLanes, weights.minimum(v));
    }
  }
}

template <class Dots>
void sum_dots(const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, void* tile_bytes) {
  if (m == 1) return sum_one<Dots>(panel, rows, sums);
  using Products = typename Dots::Products;
  auto* tile = static_cast<DotTile<Products::kGroups>*>(tile_bytes);
  for (int first = 0; first < rows.num_blocks; first += kTileBlocks<Products>) {
    BlockRange range{first, std::min(first + kTileBlocks<Products>, rows.num_blocks)};
    unpack<Dots>(panel, range, tile);
    for (int row = 0; row < m; row += kDotRows)
      sum_tile<Products>(std::min(kDotRows, m - row), tile, range, rows, row, sums);
  }
}

}  // namespace

void sum_dots(Format format, const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, void* tile) {
  bool has_halves = rows.input == Input::kHalves;
  if (format == Format::kQ4) (has_halves ? sum_dots<Q4Halves> : sum_dots<Q4Dots>)(panel, m, rows, sums, tile);
  if (format == Format::kQ8) (has_halves ? sum_dots<Q8Halves> : sum_dots<Q8Dots>)(panel, m, rows, sums, tile);
  if (format == Format::kInt8) (has_halves ? sum_dots<Int8Halves> : sum_dots<Int8Dots>)(panel, m, rows, sums, tile);
}

}  // namespace midstream
