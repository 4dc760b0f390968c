#include "dot_panel.h"

#include <algorithm>

namespace midstream {
namespace {

constexpr int kDotVectors = 2;  // times kRowTile sums

// A pointer that GCC knows nothing of: else it keeps one for each word of a block, and spends more instructions on them than
// on the products.
template <class T> [[gnu::always_inline]] inline const T* opaque(const T* pointer) {
  asm("" : "+r"(pointer));
  return pointer;
}

// How the words of weights and input are multiplied and summed in a lane.

struct NibbleProducts {
  static constexpr int kGroups = kBlock / 4;
  static constexpr bool kHasPairs = false;
  [[gnu::always_inline]] static I dot(I sum, I u, I x) { return dot_nibbles(sum, u, x); }
  static I finish(I sum) { return finish_nibbles(sum); }
};

struct ByteProducts {
  static constexpr int kGroups = kBlock / 4;
  static constexpr bool kHasPairs = false;
  [[gnu::always_inline]] static I dot(I sum, I u, I x) { return dot_bytes(sum, u, x); }
  static I finish(I sum) { return sum; }
};

struct HalfProducts {
  static constexpr int kGroups = kBlock / 2;
  static constexpr bool kHasPairs = kHasHalfPairs;
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

// The same weights, vectors counted from a later one.
template <class Dots> struct From {
  using Products = typename Dots::Products;
  Dots dots;
  int first_vector;
  [[gnu::always_inline]] I words(int group, int v) const {
    // GCC would keep words for other vectors and groups, and has no registers for them.
    if (v == 0) asm volatile("" ::: "memory");
    return dots.words(group, first_vector + v);
  }
  F scale(int v) const { return dots.scale(first_vector + v); }
  F minimum(int v) const { return dots.minimum(first_vector + v); }
};

template <class P> struct TileDots {
  using Products = P;
  const float* channels;  // of the tile, at the first of these vectors
  I words(int group, int v) const { return load_int(channels + group * kPanel + v * kLanes); }
  F scale(int v) const { return load(channels + P::kGroups * kPanel + v * kLanes); }
  F minimum(int v) const { return load(channels + (P::kGroups + 1) * kPanel + v * kLanes); }
};

// One block of the rows of a tile.
struct RowBlock {
  const uint32_t* words;
  const float *scales, *sums;
};

template <class P> [[gnu::always_inline]] inline RowBlock row_block(const QuantizedRows& rows, int tile, int block) {
  int64_t index = (static_cast<int64_t>(tile) * rows.num_blocks + block) * kRowTile;
  return {opaque(rows.words + index * P::kGroups), opaque(rows.scales + index), opaque(rows.sums + index)};
}

// sum [R, V] += one block of the first R rows of a tile times V vectors of channels.
template <int R, int V, class Dots>
[[gnu::always_inline]] inline void add_block(const Dots& weights, const RowBlock& rows, F (&sum)[R][V]) {
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
    const uint32_t* x = rows.words + group * kRowTile;
    constexpr int kPaired = Products::kHasPairs && V == 2 ? R / 2 * 2 : 0;
    if constexpr (kPaired > 0)
#pragma GCC unroll 6
      for (int r = 0; r < kPaired; r += 2) dot_half_pairs(dots[r], dots[r + 1], w, set1_int(x[r]), set1_int(x[r + 1]));
#pragma GCC unroll 6
    for (int r = kPaired; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) dots[r][v] = Products::dot(dots[r][v], w[v], set1_int(x[r]));
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    F scale = weights.scale(v), minimum = weights.minimum(v);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      F product = to_float(Products::finish(dots[r][v]));
      sum[r][v] = fma(mul(scale, set1(rows.scales[r])), product, sum[r][v]);
      sum[r][v] = fma(minimum, set1(rows.sums[r]), sum[r][v]);
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

// Few rows: weights go from memory to registers and are gone.
template <class Dots, int R, int V> void sum_direct(const uint8_t* panel, const QuantizedRows& rows, float* sums) {
  F sum[kPanelVectors / V][R][V];
  for (auto& part : sum) clear(part);
  for (int b = 0; b < rows.num_blocks; ++b) {
    RowBlock x = row_block<typename Dots::Products>(rows, 0, b);
#pragma GCC unroll 4
    for (int i = 0; i < kPanelVectors / V; ++i)
      add_block<R, V>(From<Dots>{Dots{opaque(panel + static_cast<int64_t>(b) * Dots::kBytes)}, i * V}, x, sum[i]);
  }
  for (int i = 0; i < kPanelVectors / V; ++i) write(sum[i], sums + i * V * kLanes);
}

template <class Dots> void sum_direct(int m, const uint8_t* panel, const QuantizedRows& rows, float* sums) {
  switch (m) {
    case 1: return sum_direct<Dots, 1, kPanelVectors>(panel, rows, sums);
    case 2: return sum_direct<Dots, 2, kDotVectors>(panel, rows, sums);
    case 3: return sum_direct<Dots, 3, kDotVectors>(panel, rows, sums);
    case 4: return sum_direct<Dots, 4, kDotVectors>(panel, rows, sums);
    case 5: return sum_direct<Dots, std::min(5, kRowTile), kDotVectors>(panel, rows, sums);
    default: return sum_direct<Dots, kRowTile, kDotVectors>(panel, rows, sums);
  }
}

// The blocks of a row from first to end; tile has those.
struct BlockRange {
  int first, end;
};

template <class P> constexpr int kTileBlocks = kDotTileBytes / static_cast<int>(sizeof(DotTile<P::kGroups>));

template <class P, int R>
[[gnu::noinline]] void sum_tile(const DotTile<P::kGroups>* tile, BlockRange range, const QuantizedRows& rows, int row,
                                float* sums) {
  for (int v = 0; v < kPanelVectors; v += kDotVectors) {
    F sum[R][kDotVectors];
    float* out = sums + row * kPanel + v * kLanes;
    if (range.first == 0) {
      clear(sum);
    } else {
      read(sum, out);
    }
    for (int b = range.first; b < range.end; ++b)
      add_block<R, kDotVectors>(TileDots<P>{opaque(reinterpret_cast<const float*>(&tile[b - range.first]) + v * kLanes)}, row_block<P>(rows, row / kRowTile, b), sum);
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
    case 5: return sum_tile<P, std::min(5, kRowTile)>(tile, range, rows, row, sums);
    default: return sum_tile<P, kRowTile>(tile, range, rows, row, sums);
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
  if (m <= kRowTile) return sum_direct<Dots>(m, panel, rows, sums);
  using Products = typename Dots::Products;
  auto* tile = static_cast<DotTile<Products::kGroups>*>(tile_bytes);
  for (int first = 0; first < rows.num_blocks; first += kTileBlocks<Products>) {
    BlockRange range{first, std::min(first + kTileBlocks<Products>, rows.num_blocks)};
    unpack<Dots>(panel, range, tile);
    for (int row = 0; row < m; row += kRowTile)
      sum_tile<Products>(std::min(kRowTile, m - row), tile, range, rows, row, sums);
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
