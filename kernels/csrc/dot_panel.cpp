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
  static constexpr int kGroups = kBlock / 4, kScales = 1;
  static constexpr bool kHasPairs = false;
  [[gnu::always_inline]] static I dot(I sum, I u, I x) { return dot_nibbles(sum, u, x); }
  static I finish(I sum) { return finish_nibbles(sum); }
};

struct ByteProducts {
  static constexpr int kGroups = kBlock / 4, kScales = 1;
  static constexpr bool kHasPairs = false;
  [[gnu::always_inline]] static I dot(I sum, I u, I x) { return dot_bytes(sum, u, x); }
  static I finish(I sum) { return sum; }
};

struct HalfProducts {
  static constexpr int kGroups = kBlock / 2, kScales = 1;
  static constexpr bool kHasPairs = kHasHalfPairs;
  [[gnu::always_inline]] static I dot(I sum, I w, I x) { return dot_halves(sum, w, x); }
  static I finish(I sum) { return sum; }
};

// The halves of a block have scales of their own.
struct SplitHalfProducts : HalfProducts {
  static constexpr int kScales = 2;
};

// Block b of some that share fields: words(group, vector), and scales and minimum of a vector. Where bytes must be unsigned, a number is added.

struct PanelBlock {
  const uint8_t* panel;
  int b;
};

template <class B> struct NibbleBytes : PanelBlock {
  using Block = B;
  using Products = NibbleProducts;
  I words(int group, int v) const {
    I word = load_int(Block::words(panel, b) + ((group % 4) * kPanel + v * kLanes) * 4);
    return bit_and(group < 4 ? word : shift_right<4>(word), set1_int(0x0f0f0f0fu));
  }
  F scale(int v, int) const { return Block::scale(panel, b, v); }
  F minimum(int v) const { return Block::minimum(panel, b, v); }
};

// A word shifted by nibbles holds weights k and k + 16 in its halves.
template <class Block> [[gnu::always_inline]] inline I shifted_word(const uint8_t* panel, int b, int group, int v) {
  I word = load_int(Block::words(panel, b) + ((group % 4) * kPanel + v * kLanes) * 4);
  switch (group / 4) {
    case 1: return shift_right<4>(word);
    case 2: return shift_right<8>(word);
    case 3: return shift_right<12>(word);
  }
  return word;
}

template <class B> struct NibbleHalves : NibbleBytes<B> {
  using Products = HalfProducts;
  [[gnu::always_inline]] I words(int group, int v) const {
    return bit_and(shifted_word<B>(this->panel, this->b, group, v), set1_int(0x000f000fu));
  }
};

struct Mx4Bytes : PanelBlock {
  using Block = Mx4Block;
  using Products = ByteProducts;
  I words(int group, int v) const { return mx4_bytes(NibbleBytes<Mx4Block>{{panel, b}}.words(group, v)); }
  F scale(int v, int) const { return Mx4Block::scale(panel, b, v); }
  F minimum(int v) const { return mul(scale(v, 0), set1(-12.0f)); }
};

struct Mx4Halves : Mx4Bytes {
  using Products = HalfProducts;
  [[gnu::always_inline]] I words(int group, int v) const { return mx4_halves(shifted_word<Mx4Block>(panel, b, group, v)); }
  F minimum(int) const { return zero(); }
};

// Word of bytes: k to k + 3.
template <class Block> [[gnu::always_inline]] inline I byte_word(const uint8_t* panel, int b, int group, int v) {
  return load_int(Block::words(panel, b) + (group * kPanel + v * kLanes) * 4);
}

// Bytes k and k + 2 of a word, or k + 1 and k + 3.
template <class Block> [[gnu::always_inline]] inline I byte_halves(const uint8_t* panel, int b, int group, int v) {
  I word = byte_word<Block>(panel, b, group / 2, v);
  return group % 2 ? odd_bytes(word) : even_bytes(word);
}

struct Q8Bytes : PanelBlock {
  using Block = Q8Block;
  using Products = ByteProducts;
  I words(int group, int v) const { return bit_xor(byte_word<Q8Block>(panel, b, group, v), set1_int(0x80808080u)); }
  F scale(int v, int) const { return Q8Block::scale(panel, b, v); }
  F minimum(int v) const { return mul(scale(v, 0), set1(-128.0f)); }
};

struct Q8Halves : Q8Bytes {
  using Products = HalfProducts;
  [[gnu::always_inline]] I words(int group, int v) const { return byte_halves<Q8Block>(panel, b, group, v); }
  F minimum(int) const { return zero(); }
};

struct Int8Bytes : PanelBlock {
  using Block = Int8Block;
  using Products = ByteProducts;
  I words(int group, int v) const { return bit_xor(byte_word<Int8Block>(panel, b, group, v), set1_int(0x80808080u)); }
  F scale(int, int) const { return set1(1.0f); }
  F minimum(int) const { return set1(-128.0f); }
};

struct Int8Halves : Int8Bytes {
  using Products = HalfProducts;
  [[gnu::always_inline]] I words(int group, int v) const { return byte_halves<Int8Block>(panel, b, group, v); }
  F minimum(int) const { return zero(); }
};

struct Affine8Bytes : PanelBlock {
  using Block = Affine8Block;
  using Products = ByteProducts;
  I words(int group, int v) const { return byte_word<Affine8Block>(panel, b, group, v); }
  F scale(int v, int) const { return Affine8Block::scale(panel, b, v); }
  F minimum(int v) const { return Affine8Block::minimum(panel, b, v); }
};

struct Affine8Halves : Affine8Bytes {
  using Products = HalfProducts;
  [[gnu::always_inline]] I words(int group, int v) const {
    I word = byte_word<Affine8Block>(panel, b, group / 2, v);
    return bit_and(group % 2 ? shift_right<8>(word) : word, set1_int(0x00ff00ffu));
  }
};

struct Q6KHalves : PanelBlock {
  using Block = Q6KBlock;
  using Products = SplitHalfProducts;
  [[gnu::always_inline]] I words(int group, int v) const { return byte_halves<Q6KBlock>(panel, b, group, v); }
  F scale(int v, int part) const { return Q6KBlock::scale(panel, b, v, part); }
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
  F scale(int v, int part) const { return dots.scale(first_vector + v, part); }
  F minimum(int v) const { return dots.minimum(first_vector + v); }
};

template <class P> struct TileDots {
  using Products = P;
  const float* channels;  // of the tile, at the first of these vectors
  I words(int group, int v) const { return load_int(channels + group * kPanel + v * kLanes); }
  F scale(int v, int part) const { return load(channels + (P::kGroups + part) * kPanel + v * kLanes); }
  F minimum(int v) const { return load(channels + (P::kGroups + P::kScales) * kPanel + v * kLanes); }
};

template <class P> using TileOf = DotTile<P::kGroups, P::kScales>;

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
  constexpr int kPartGroups = Products::kGroups / Products::kScales;
#pragma GCC unroll 2
  for (int part = 0; part < Products::kScales; ++part) {
    I dots[R][V];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) dots[r][v] = set1_int(0);
#pragma GCC unroll 16
    for (int group = part * kPartGroups; group < (part + 1) * kPartGroups; ++group) {
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
      F scale = weights.scale(v, part), minimum = weights.minimum(v);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        F product = to_float(Products::finish(dots[r][v]));
        sum[r][v] = fma(mul(scale, set1(rows.scales[r])), product, sum[r][v]);
        if (part == 0) sum[r][v] = fma(minimum, set1(rows.sums[r]), sum[r][v]);
      }
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
      add_block<R, V>(From<Dots>{{opaque(Dots::Block::shared(panel, b)), b % Dots::Block::kSharing}, i * V}, x, sum[i]);
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

template <class P> constexpr int kTileBlocks = kDotTileBytes / static_cast<int>(sizeof(TileOf<P>));

template <class P, int R>
[[gnu::noinline]] void sum_tile(const TileOf<P>* tile, BlockRange range, const QuantizedRows& rows, int row,
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
void sum_tile(int num_rows, const TileOf<P>* tile, BlockRange range, const QuantizedRows& rows, int row,
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
void unpack(const uint8_t* panel, BlockRange range, TileOf<typename Dots::Products>* tile) {
  for (int b = 0; b < range.end - range.first; ++b) {
    Dots weights{panel, range.first + b};
    for (int v = 0; v < kPanelVectors; ++v) {
#pragma GCC unroll 16
      for (int group = 0; group < Dots::Products::kGroups; ++group)
        store_int(&tile[b].words[group][v * kLanes], weights.words(group, v));
      for (int part = 0; part < Dots::Products::kScales; ++part)
        store(tile[b].scale[part] + v * kLanes, weights.scale(v, part));
      store(tile[b].minimum + v * kLanes, weights.minimum(v));
    }
  }
}

template <class Dots>
void sum_dots(const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, void* tile_bytes) {
  if (m <= kRowTile) return sum_direct<Dots>(m, panel, rows, sums);
  using Products = typename Dots::Products;
  auto* tile = static_cast<TileOf<Products>*>(tile_bytes);
  for (int first = 0; first < rows.num_blocks; first += kTileBlocks<Products>) {
    BlockRange range{first, std::min(first + kTileBlocks<Products>, rows.num_blocks)};
    unpack<Dots>(panel, range, tile);
    for (int row = 0; row < m; row += kRowTile)
      sum_tile<Products>(std::min(kRowTile, m - row), tile, range, rows, row, sums);
  }
}

}  // namespace

void sum_dots(Format format, const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, void* tile) {
  auto run = [&]<class Bytes, class Halves>() {
    (rows.input == Input::kHalves ? sum_dots<Halves> : sum_dots<Bytes>)(panel, m, rows, sums, tile);
  };
  switch (format) {
    case Format::kQ4: return run.template operator()<NibbleBytes<Q4Block>, NibbleHalves<Q4Block>>();
    case Format::kInt4: return run.template operator()<NibbleBytes<Int4Block>, NibbleHalves<Int4Block>>();
    case Format::kQ4K: return run.template operator()<NibbleBytes<Q4KBlock>, NibbleHalves<Q4KBlock>>();
    case Format::kMx4: return run.template operator()<Mx4Bytes, Mx4Halves>();
    case Format::kQ8: return run.template operator()<Q8Bytes, Q8Halves>();
    case Format::kInt8: return run.template operator()<Int8Bytes, Int8Halves>();
    case Format::kAffine8: return run.template operator()<Affine8Bytes, Affine8Halves>();
    case Format::kQ6K: return sum_dots<Q6KHalves>(panel, m, rows, sums, tile);
    case Format::kF32:
    case Format::kBF16:
    case Format::kFp8: return;
  }
}

}  // namespace midstream
