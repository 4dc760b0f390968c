#include "dot_panel.h"

#include <algorithm>
#include <type_traits>

namespace midstream {
namespace {

constexpr int kDotVectors = 2;  // with kRowTile rows, the sums fit in registers
constexpr int kRegisters = kLanes == 16 ? 32 : 16;
constexpr int kResidentBytes = 16 * 1024;

// Hides the origin of a pointer from GCC, which would otherwise keep a pointer for each word of a block, and use more
// instructions for these than for the products.
template <class T> [[gnu::always_inline]] inline const T* opaque(const T* pointer) {
  asm("" : "+r"(pointer));
  return pointer;
}

// The following types define how words of weights and of the input are multiplied and summed in a lane.

struct NibbleProducts {
  static constexpr int kGroups = kBlock / 4, kScales = 1;
  static constexpr bool kHasPairs = false, kHasMinimum = true;
  [[gnu::always_inline]] static I dot(I sum, I u, I x) { return dot_nibbles(sum, u, x); }
  static I finish(I sum) { return finish_nibbles(sum); }
};

struct ByteProducts {
  static constexpr int kGroups = kBlock / 4, kScales = 1;
  static constexpr bool kHasPairs = false, kHasMinimum = true;
  [[gnu::always_inline]] static I dot(I sum, I u, I x) { return dot_bytes(sum, u, x); }
  static I finish(I sum) { return sum; }
};

struct HalfProducts {
  static constexpr int kGroups = kBlock / 2, kScales = 1;
  static constexpr bool kHasPairs = kHasHalfPairs, kHasMinimum = true;
  [[gnu::always_inline]] static I dot(I sum, I w, I x) { return dot_halves(sum, w, x); }
  static I finish(I sum) { return sum; }
};

// For weights without a minimum.
struct SignedHalfProducts : HalfProducts {
  static constexpr bool kHasMinimum = false;
};

// For blocks whose halves have their own scales.
struct SplitHalfProducts : SignedHalfProducts {
  static constexpr int kScales = 2;
};

// The following types give access to block b of a group of blocks that share fields: to its words in memory, each of which
// contains kParts words for products, and to the scales and minimum of a vector of channels. Part p of word i is multiplied by
// group(i, p) of the input. If bytes must be unsigned, kAdded is added to them; to_signed leaves kSignedAdded of it.

struct PanelBlock {
  const uint8_t* panel;
  int b;
};

// Each word contains weights of all parts, as nibbles.
template <class B> struct NibbleWords : PanelBlock {
  using Block = B;
  static constexpr int group(int word, int part) { return part * (kBlock / 8) + word; }
  [[gnu::always_inline]] I word(int i, int v) const { return load_int(Block::words(panel, b) + (i * kPanel + v * kLanes) * 4); }
  F scale(int v, int) const { return Block::scale(panel, b, v); }
  F minimum(int v) const { return Block::minimum(panel, b, v); }
};

template <class B> struct NibbleBytes : NibbleWords<B> {
  using Products = NibbleProducts;
  static constexpr int kParts = 2, kAdded = 0, kSignedAdded = 0;
  template <int part> [[gnu::always_inline]] static I take(I word) {
    return bit_and(part ? shift_right<4>(word) : word, set1_int(0x0f0f0f0fu));
  }
  [[gnu::always_inline]] static I to_signed(I bytes) { return bytes; }
};

template <class B> struct NibbleHalves : NibbleWords<B> {
  using Products = HalfProducts;
  static constexpr int kParts = 4;
  // Takes the nibbles k and k + 16 of a block.
  template <int part> [[gnu::always_inline]] static I take(I word) {
    if (part == 3) return shift_halves_right<12>(word);
    return bit_and(part ? shift_halves_right<4 * part>(word) : word, set1_int(0x000f000fu));
  }
};

struct Mx4Bytes : NibbleWords<Mx4Block> {
  using Products = ByteProducts;
  static constexpr int kParts = 2, kAdded = 12, kSignedAdded = 12;
  template <int part> [[gnu::always_inline]] static I take(I word) { return mx4_bytes(NibbleBytes<Mx4Block>::take<part>(word)); }
  [[gnu::always_inline]] static I to_signed(I bytes) { return bytes; }
  F minimum(int v) const { return mul(scale(v, 0), set1(-12.0f)); }
};

struct Mx4Halves : NibbleWords<Mx4Block> {
  using Products = SignedHalfProducts;
  static constexpr int kParts = 4;
  template <int part> [[gnu::always_inline]] static I take(I word) { return mx4_halves(shift_halves_right<4 * part>(word)); }
  F minimum(int) const { return zero(); }
};

// Each word contains the bytes k to k + 3.
template <class B> struct ByteWords : PanelBlock {
  using Block = B;
  using Products = ByteProducts;
  static constexpr int kParts = 1;
  static constexpr int group(int word, int) { return word; }
  [[gnu::always_inline]] I word(int i, int v) const { return load_int(Block::words(panel, b) + (i * kPanel + v * kLanes) * 4); }
};

template <class B> struct SignedBytes : ByteWords<B> {
  static constexpr int kAdded = 128, kSignedAdded = 0;
  template <int> [[gnu::always_inline]] static I take(I word) { return bit_xor(word, set1_int(0x80808080u)); }
  [[gnu::always_inline]] static I to_signed(I bytes) { return bit_xor(bytes, set1_int(0x80808080u)); }
};

// Takes the bytes k and k + 2 of a word first, then k + 1 and k + 3.
template <class B> struct ByteHalves : ByteWords<B> {
  using Products = SignedHalfProducts;
  static constexpr int kParts = 2;
  static constexpr int group(int word, int part) { return 2 * word + part; }
  template <int part> [[gnu::always_inline]] static I take(I word) { return part ? odd_bytes(word) : even_bytes(word); }
  F minimum(int) const { return zero(); }
};

struct Q8Bytes : SignedBytes<Q8Block> {
  F scale(int v, int) const { return Q8Block::scale(panel, b, v); }
  F minimum(int v) const { return mul(scale(v, 0), set1(-128.0f)); }
};

struct Q8Halves : ByteHalves<Q8Block> {
  F scale(int v, int) const { return Q8Block::scale(panel, b, v); }
};

struct Int8Bytes : SignedBytes<Int8Block> {
  F scale(int, int) const { return set1(1.0f); }
  F minimum(int) const { return set1(-128.0f); }
};

struct Int8Halves : ByteHalves<Int8Block> {
  F scale(int, int) const { return set1(1.0f); }
};

struct Affine8Bytes : ByteWords<Affine8Block> {
  template <int> [[gnu::always_inline]] static I take(I word) { return word; }
  F scale(int v, int) const { return Affine8Block::scale(panel, b, v); }
  F minimum(int v) const { return Affine8Block::minimum(panel, b, v); }
};

struct Affine8Halves : ByteHalves<Affine8Block> {
  using Products = HalfProducts;
  template <int part> [[gnu::always_inline]] static I take(I word) {
    return part ? shift_halves_right<8>(word) : bit_and(word, set1_int(0x00ff00ffu));
  }
  F scale(int v, int) const { return Affine8Block::scale(panel, b, v); }
  F minimum(int v) const { return Affine8Block::minimum(panel, b, v); }
};

struct Q6KHalves : ByteHalves<Q6KBlock> {
  using Products = SplitHalfProducts;
  F scale(int v, int part) const { return Q6KBlock::scale(panel, b, v, part); }
};

// Words are used for products as they are.
struct Int16Halves : PanelBlock {
  using Block = Int16Block;
  using Products = SignedHalfProducts;
  static constexpr int kParts = 1;
  static constexpr int group(int word, int) { return word; }
  template <int> [[gnu::always_inline]] static I take(I word) { return word; }
  [[gnu::always_inline]] I word(int i, int v) const { return load_int(Block::words(panel, b) + (i * kPanel + v * kLanes) * 4); }
  F scale(int v, int) const { return Block::scale(panel, b, v); }
  F minimum(int) const { return zero(); }
};

// Calls body(group, words of V vectors) for the words first..end-1 of a block, and for all parts of each word in order. A word is
// read once for all parts if may_keep, which requires free registers. A block has at most 16 words: in a loop that is not
// unrolled, GCC 12 copies and stores each sum.
template <int V, bool may_keep, class Dots, class Body>
[[gnu::always_inline]] inline void for_each_group(const Dots& weights, int first_vector, int first, int end, Body&& body) {
#pragma GCC unroll 16
  for (int i = first; i < end; ++i) {
    I words[V];
    auto read = [&]() __attribute__((always_inline)) {
      // Otherwise GCC would keep words for other vectors and parts, for which there are no registers.
      asm volatile("" ::: "memory");
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        words[v] = weights.word(i, first_vector + v);
        if (may_keep) keep(words[v]);
      }
    };
    auto take = [&]<int part>() __attribute__((always_inline)) {
      if constexpr (part < Dots::kParts) {
        if (part == 0 || !may_keep) read();
        I taken[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) taken[v] = Dots::template take<part>(words[v]);
        body(Dots::group(i, part), taken);
      }
    };
    take.template operator()<0>();
    take.template operator()<1>();
    take.template operator()<2>();
    take.template operator()<3>();
  }
}

// The same weights, with vectors counted from first_vector.
template <class Dots> struct From {
  using Products = typename Dots::Products;
  Dots dots;
  int first_vector;
  [[gnu::always_inline]] I words(int group, int v) const {
    // Otherwise GCC would keep words for other vectors and groups, for which there are no registers.
    if (v == 0) asm volatile("" ::: "memory");
    return dots.words(group, first_vector + v);
  }
  F scale(int v, int part) const { return dots.scale(first_vector + v, part); }
  F minimum(int v) const { return dots.minimum(first_vector + v); }
};

// Weights that were unpacked into a tile.
template <class P> struct TileDots {
  using Products = P;
  static constexpr int kParts = 1;
  const float* channels;  // the first of the tile's channels to use
  static constexpr int group(int word, int) { return word; }
  template <int> [[gnu::always_inline]] static I take(I word) { return word; }
  I word(int i, int v) const { return load_int(channels + i * kPanel + v * kLanes); }
  F scale(int v, int part) const { return load(channels + (P::kGroups + part) * kPanel + v * kLanes); }
  F minimum(int v) const { return load(channels + (P::kGroups + P::kScales) * kPanel + v * kLanes); }
};

template <class P> using TileOf = DotTile<P::kGroups, P::kScales>;

// A block of weights whose words are multiplied in pairs, with Winograd's inner product:
//   x0 w0 + x1 w1 = (x0 + w1) (x1 + w0) - x0 x1 - w0 w1
// x0 x1 is computed once per row and w0 w1 once per tile, so there are half as many multiplies, and two adds for each. This is
// faster on processors with more units for adds than for multiplies. All sums are exact modulo 2^32, and the result fits in 32
// bits, so the bits are those of the other methods.
template <class P> struct PairTile : TileOf<P> {
  uint32_t products[kPanel];  // the sum of w0 w1
};

// Weights that were unpacked into such a tile.
template <class P> struct PairDots : TileDots<P> {
  I products(int v) const { return load_int(this->channels + (P::kGroups + P::kScales + 1) * kPanel + v * kLanes); }
};

// One block of a tile of rows.
struct RowBlock {
  const uint32_t* words;
  const float *scales, *sums;
  const uint32_t* products = nullptr;
};

template <class P> [[gnu::always_inline]] inline RowBlock row_block(const QuantizedRows& rows, int tile, int block) {
  int64_t index = (static_cast<int64_t>(tile) * rows.num_blocks + block) * kRowTile;
  return {opaque(rows.words + index * P::kGroups), opaque(rows.scales + index), opaque(rows.sums + index)};
}

// Moves on to the next block of the same rows. Calling row_block for each block is slower on Intel's processors.
template <class P> [[gnu::always_inline]] inline void advance(RowBlock& x) {
  x.words = opaque(x.words + P::kGroups * kRowTile);
  x.scales = opaque(x.scales + kRowTile);
  x.sums = opaque(x.sums + kRowTile);
}

// dots [R, V] = dot products of the first R rows of a tile with V vectors of channels, over a block.
template <int R, int V, class P>
[[gnu::always_inline]] inline void multiply_block(const PairDots<P>& weights, int first_vector, int, const RowBlock& rows, I (&dots)[R][V]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) dots[r][v] = sub_int(set1_int(rows.products[r]), weights.products(first_vector + v));
#pragma GCC unroll 8
  for (int i = 0; i < P::kGroups; i += 2) {
    // Otherwise GCC would keep words for other groups, for which there are no registers.
    asm volatile("" ::: "memory");
    I first[V], second[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      first[v] = weights.word(i, first_vector + v);
      second[v] = weights.word(i + 1, first_vector + v);
      keep(first[v]);
      keep(second[v]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      I x = set1_int(rows.words[i * kRowTile + r]), y = set1_int(rows.words[(i + 1) * kRowTile + r]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) dots[r][v] = dot_halves(dots[r][v], add_halves(x, second[v]), add_halves(y, first[v]));
    }
  }
}

template <int R, int V> [[gnu::always_inline]] inline void clear(I (&dots)[R][V]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) dots[r][v] = set1_int(0);
}

template <class Dots> constexpr int kWordsOfPart = Dots::Products::kGroups / Dots::kParts / Dots::Products::kScales;

// Adds to dots [R, V] the products of the first R rows of a tile with V vectors of channels, over the words first..end-1 of a block.
template <int R, int V, class Dots>
[[gnu::always_inline]] inline void multiply_words(const Dots& weights, int first_vector, int first, int end, const RowBlock& rows, I (&dots)[R][V]) {
  using Products = typename Dots::Products;
  constexpr bool kMayKeep = R * V + 2 * V + 2 <= kRegisters;
  for_each_group<V, kMayKeep>(weights, first_vector, first, end, [&](int group, const I (&w)[V]) __attribute__((always_inline)) {
    const uint32_t* x = rows.words + group * kRowTile;
    constexpr int kPaired = Products::kHasPairs && V == 2 ? R / 2 * 2 : 0;
    if constexpr (kPaired > 0)
#pragma GCC unroll 6
      for (int r = 0; r < kPaired; r += 2) dot_half_pairs(dots[r], dots[r + 1], w, set1_int(x[r]), set1_int(x[r + 1]));
#pragma GCC unroll 6
    for (int r = kPaired; r < R; ++r) {
      I input = set1_int(x[r]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) dots[r][v] = Products::dot(dots[r][v], w[v], input);
    }
  });
}

// dots [R, V] = dot products of the first R rows of a tile with V vectors of channels, over one part of a block (with one scale).
template <int R, int V, class Dots>
[[gnu::always_inline]] inline void multiply_block(const Dots& weights, int first_vector, int part, const RowBlock& rows, I (&dots)[R][V]) {
  clear(dots);
  multiply_words(weights, first_vector, part * kWordsOfPart<Dots>, (part + 1) * kWordsOfPart<Dots>, rows, dots);
}

// Calls sum(r, f) for all rows, where f adds the scaled dot products of one part of a block with a vector to its argument.
template <int R, int V, class Dots, class Sum>
[[gnu::always_inline]] inline void add_vector(const Dots& weights, int vector, int part, const RowBlock& rows, const I (&dots)[R][V], int v,
                                              Sum&& sum) {
  F scale = weights.scale(vector, part), minimum = weights.minimum(vector);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    F product = to_float(Dots::Products::finish(dots[r][v]));
    sum(r, [&](F total) __attribute__((always_inline)) {
      total = fma(mul(scale, set1(rows.scales[r])), product, total);
      return Dots::Products::kHasMinimum && part == 0 ? fma(minimum, set1(rows.sums[r]), total) : total;
    });
  }
}

// Calls sum(r, v, f) for all rows and vectors.
template <int R, int V, class Dots, class Sum>
[[gnu::always_inline]] inline void add_dots(const Dots& weights, int first_vector, int part, const RowBlock& rows, const I (&dots)[R][V],
                                            Sum&& sum) {
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v)
    add_vector(weights, first_vector + v, part, rows, dots, v, [&](int r, auto&& add) __attribute__((always_inline)) { sum(r, v, add); });
}

// Calls sum(r, v, f) for the first R rows of a tile and V vectors of channels, where f adds the products of one part of a block.
template <int R, int V, class Dots, class Sum>
[[gnu::always_inline]] inline void add_block(const Dots& weights, int first_vector, const RowBlock& rows, Sum&& sum) {
  using Products = typename Dots::Products;
#pragma GCC unroll 2
  for (int part = 0; part < Products::kScales; ++part) {
    I dots[R][V];
    multiply_block(weights, first_vector, part, rows, dots);
    add_dots(weights, first_vector, part, rows, dots, sum);
  }
}

// The same, but the last word is multiplied by one vector after the other: the float operations of a vector, which depend on
// each other, then overlap with the products of the next one.
template <int R, int V, class Dots, class Sum>
[[gnu::always_inline]] inline void add_block_in_turn(const Dots& weights, int first_vector, const RowBlock& rows, Sum&& sum) {
#pragma GCC unroll 2
  for (int part = 0; part < Dots::Products::kScales; ++part) {
    int end = (part + 1) * kWordsOfPart<Dots>;
    I dots[R][V];
    clear(dots);
    multiply_words(weights, first_vector, part * kWordsOfPart<Dots>, end - 1, rows, dots);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      for_each_group<1, true>(weights, first_vector + v, end - 1, end, [&](int group, const I (&w)[1]) __attribute__((always_inline)) {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) dots[r][v] = Dots::Products::dot(dots[r][v], w[0], set1_int(rows.words[group * kRowTile + r]));
      });
      add_vector(weights, first_vector + v, part, rows, dots, v, [&](int r, auto&& add) __attribute__((always_inline)) { sum(r, v, add); });
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

// Keeps sums in registers.
template <int R, int V> [[gnu::always_inline]] inline auto in(F (&sum)[R][V]) {
  return [&sum](int r, int v, auto&& add) __attribute__((always_inline)) { sum[r][v] = add(sum[r][v]); };
}

// Keeps sums in memory.
[[gnu::always_inline]] inline auto in_memory(float* sums) {
  return [sums](int r, int v, auto&& add) __attribute__((always_inline)) {
    float* sum = sums + r * kPanel + v * kLanes;
    store(sum, add(load(sum)));
  };
}

// Calls body<R>() for the number of rows in a tile.
template <class Body> void with_row_count(int num_rows, Body&& body) {
  switch (num_rows) {
    case 1: return body.template operator()<1>();
    case 2: return body.template operator()<2>();
    case 3: return body.template operator()<3>();
    case 4: return body.template operator()<4>();
    case 5: return body.template operator()<std::min(5, kRowTile)>();
    default: return body.template operator()<kRowTile>();
  }
}

template <class Dots> [[gnu::always_inline]] inline Dots block_of(const uint8_t* panel, int b) {
  Dots dots;
  dots.panel = opaque(Dots::Block::shared(panel, b));
  dots.b = b % Dots::Block::kSharing;
  return dots;
}

// For few rows: weights are loaded into registers, and are not stored.
template <class Dots, int R, int V> void sum_direct(const uint8_t* panel, const QuantizedRows& rows, float* sums) {
  F sum[kPanelVectors / V][R][V];
  for (auto& part : sum) clear(part);
  for (int b = 0; b < rows.num_blocks; ++b) {
    RowBlock x = row_block<typename Dots::Products>(rows, 0, b);
#pragma GCC unroll 4
    for (int i = 0; i < kPanelVectors / V; ++i) add_block<R, V>(block_of<Dots>(panel, b), i * V, x, in(sum[i]));
  }
  for (int i = 0; i < kPanelVectors / V; ++i) write(sum[i], sums + i * V * kLanes);
}

// For one row, and weights whose words are used for products as they are. This is limited only by memory bandwidth, so the loop
// is kept small, which helps prefetching, and scales are read before the words, since they precede them in memory.
template <class Block> void sum_ready_row(const uint8_t* panel, const QuantizedRows& rows, float* sums) {
  F sum[kPanelVectors];
  for (F& total : sum) total = zero();
  for (int b = 0; b < rows.num_blocks; ++b) {
    RowBlock x = row_block<SignedHalfProducts>(rows, 0, b);
    const uint8_t* words = Block::words(panel, b);
    F scales[kPanelVectors];
    I dots[kPanelVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      scales[v] = mul(Block::scale(panel, b, v), set1(x.scales[0]));
      read_now(scales[v]);
      dots[v] = set1_int(0);
    }
#pragma GCC unroll 1
    for (int i = 0; i < kBlock / 2; ++i, words += kPanel * 4) {
      I input = set1_int(x.words[i * kRowTile]);
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) add_dot_halves(dots[v], words + v * kLanes * 4, input);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) sum[v] = fma(scales[v], to_float(dots[v]), sum[v]);
  }
  for (int v = 0; v < kPanelVectors; ++v) store(sums + v * kLanes, sum[v]);
}

template <class Dots> void sum_direct(int m, const uint8_t* panel, const QuantizedRows& rows, float* sums) {
  if constexpr (kRegisters == 32 && std::is_same_v<Dots, Int16Halves>)
    if (m == 1) return sum_ready_row<typename Dots::Block>(panel, rows, sums);
  switch (m) {
    case 1: return sum_direct<Dots, 1, kPanelVectors>(panel, rows, sums);
    case 2: return sum_direct<Dots, 2, kDotVectors>(panel, rows, sums);
    case 3: return sum_direct<Dots, 3, kDotVectors>(panel, rows, sums);
    case 4: return sum_direct<Dots, 4, kDotVectors>(panel, rows, sums);
    case 5: return sum_direct<Dots, std::min(5, kRowTile), kDotVectors>(panel, rows, sums);
    default: return sum_direct<Dots, kRowTile, kDotVectors>(panel, rows, sums);
  }
}

constexpr int kLineBytes = 64;

// Prefetches into the L2 cache.
template <int kBytes> void prefetch(const uint8_t* bytes) {
#pragma GCC unroll 64
  for (int i = 0; i < kBytes; i += kLineBytes) __builtin_prefetch(bytes + i, 0, 2);
}

// The processor's own prefetching leaves part of the memory's bandwidth unused, except with one row, which takes so little
// time for a block that these instructions would make it slower.
constexpr int kBlocksAhead = 4;

template <class Block> void prefetch_ahead(const uint8_t* panel, int b) {
  prefetch<Block::kBytes>(panel + static_cast<int64_t>(b + kBlocksAhead) * Block::kBytes);
}

// Adds the products of V vectors of weights with the high bytes of R rows, and those with their low bytes.
template <class Bytes, int R, int V>
[[gnu::always_inline]] inline void add_split_dots(const I (&weights)[V], const uint32_t* high, const uint32_t* low, I (&highs)[R][V], I (&lows)[R][V]) {
#if defined(__aarch64__)
  I w[V];
  for (int v = 0; v < V; ++v) w[v] = Bytes::to_signed(weights[v]);
  if constexpr (R == 4) {
    int32x4_t x = vld1q_s32(reinterpret_cast<const int32_t*>(high)), y = vld1q_s32(reinterpret_cast<const int32_t*>(low));
    auto add_row = [&]<int r>() __attribute__((always_inline)) {
      for (int v = 0; v < V; ++v) {
        highs[r][v] = dot_signed_bytes<r>(highs[r][v], w[v], x);
        lows[r][v] = dot_signed_bytes<r>(lows[r][v], w[v], y);
      }
    };
    add_row.template operator()<0>();
    add_row.template operator()<1>();
    add_row.template operator()<2>();
    add_row.template operator()<3>();
    return;
  }
  for (int r = 0; r < R; ++r) {
    I x = set1_int(high[r]), y = set1_int(low[r]);
    for (int v = 0; v < V; ++v) {
      highs[r][v] = dot_signed_bytes(highs[r][v], w[v], x);
      lows[r][v] = dot_signed_bytes(lows[r][v], w[v], y);
    }
  }
#else
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    I high_bytes = set1_int(high[r]), low_bytes = set1_int(low[r]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      highs[r][v] = dot_bytes(highs[r][v], weights[v], high_bytes);
      lows[r][v] = dot_bytes(lows[r][v], low_bytes, Bytes::to_signed(weights[v]));
    }
  }
#endif
}

// For a tile of rows that are split into bytes. If there are several rows, their float sums are kept in memory.
template <class Bytes, class Halves, int R> void sum_split(const uint8_t* panel, const QuantizedRows& rows, int tile, float* sums) {
  constexpr int V = kRegisters == 32 ? kPanelVectors : R > 2 ? 1 : 2, kWords = ByteProducts::kGroups / Bytes::kParts;
  const int stride = kHasSignedDots ? rows.num_split : R;
  F sum[kPanelVectors / V][R][V];
  if (R == 1) {
    for (auto& part : sum) clear(part);
  } else {
    std::fill_n(sums, R * kPanel, 0.0f);
  }
  for (int b = 0; b < rows.num_blocks; ++b) {
    if constexpr (R > 1) prefetch_ahead<typename Bytes::Block>(panel, b);
    int64_t block = static_cast<int64_t>(tile) * rows.num_blocks + b;
    const uint32_t* high = opaque(rows.words + block * kSplitWords * stride);
    const uint32_t *low = high + kBlock / 4 * stride, *totals = low + kBlock / 4 * stride;
    RowBlock x{high, opaque(rows.scales + block * kRowTile), opaque(rows.sums + block * kRowTile)};
#pragma GCC unroll 2
    for (int i = 0; i < kPanelVectors / V; ++i) {
      I highs[R][V], dots[R][V];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        constexpr int kAdded = kHasSignedDots ? Bytes::kSignedAdded : Bytes::kAdded;
        uint32_t start = 0u - 256 * kAdded * totals[r] - Bytes::kSignedAdded * totals[stride + r];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) highs[r][v] = set1_int(0), dots[r][v] = set1_int(start);
      }
      for_each_group<V, true>(block_of<Bytes>(panel, b), i * V, 0, kWords, [&](int group, const I (&w)[V]) __attribute__((always_inline)) {
        add_split_dots<Bytes, R, V>(w, high + group * stride, low + group * stride, highs, dots);
      });
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) dots[r][v] = add_int(dots[r][v], shift_left<8>(highs[r][v]));
      add_dots(block_of<Halves>(panel, b), i * V, 0, x, dots, [&](int r, int v, auto&& add) __attribute__((always_inline)) {
        if constexpr (R == 1) {
          sum[i][r][v] = add(sum[i][r][v]);
        } else {
          float* total = sums + r * kPanel + (i * V + v) * kLanes;
          store(total, add(load(total)));
        }
      });
    }
  }
  if (R > 1) return;
  for (int i = 0; i < kPanelVectors / V; ++i) write(sum[i], sums + i * V * kLanes);
}

template <class Bytes, class Halves> void sum_split(int m, const uint8_t* panel, const QuantizedRows& rows, float* sums) {
  if constexpr (kHasSignedDots) {
    for (int row = 0; row < m; row += kRowTile)
      with_row_count(m - row, [&]<int R>() { sum_split<Bytes, Halves, R>(panel, rows, row / kRowTile, sums + row * kPanel); });
    return;
  }
  if constexpr (kMostSplitRows > 1)
    if (m == 2) return sum_split<Bytes, Halves, 2>(panel, rows, 0, sums);
  sum_split<Bytes, Halves, 1>(panel, rows, 0, sums);
}

// The blocks first..end-1 of a row, which are those of a tile.
struct BlockRange {
  int first, end;
};

template <class Tile> constexpr int kTileBlocks = kDotTileBytes / static_cast<int>(sizeof(Tile));

template <class P> TileDots<P> dots_of(const TileOf<P>& tile, int v) {
  return {opaque(reinterpret_cast<const float*>(&tile) + v * kLanes)};
}
template <class P> PairDots<P> dots_of(const PairTile<P>& tile, int v) {
  return {{opaque(reinterpret_cast<const float*>(&tile) + v * kLanes)}};
}

template <class P, int R, class Tile>
[[gnu::noinline]] void sum_tile(const Tile* tile, BlockRange range, const QuantizedRows& rows, int row, float* sums) {
  for (int v = 0; v < kPanelVectors; v += kDotVectors) {
    F sum[R][kDotVectors];
    float* out = sums + row * kPanel + v * kLanes;
    if (range.first == 0) {
      clear(sum);
    } else {
      read(sum, out);
    }
    RowBlock x = row_block<P>(rows, row / kRowTile, range.first);
    if constexpr (std::is_same_v<Tile, PairTile<P>>)
      x.products = opaque(rows.products + (static_cast<int64_t>(row) / kRowTile * rows.num_blocks + range.first) * kRowTile);
    for (int b = range.first; b < range.end; ++b) {
      add_block<R, kDotVectors>(dots_of<P>(tile[b - range.first], v), 0, x, in(sum));
      advance<P>(x);
      if constexpr (std::is_same_v<Tile, PairTile<P>>) x.products = opaque(x.products + kRowTile);
    }
    write(sum, out);
  }
}

template <class Dots, class Tile> void unpack(const uint8_t* panel, BlockRange range, Tile* tile) {
  using Products = typename Dots::Products;
  for (int b = 0; b < range.end - range.first; ++b) {
    Dots weights;
    weights.panel = panel;
    weights.b = range.first + b;
    for (int v = 0; v < kPanelVectors; ++v) {
      for_each_group<1, true>(weights, v, 0, Products::kGroups / Dots::kParts, [&](int group, const I (&words)[1]) __attribute__((always_inline)) {
        store_int(&tile[b].words[group][v * kLanes], words[0]);
      });
      for (int part = 0; part < Products::kScales; ++part)
        store(tile[b].scale[part] + v * kLanes, weights.scale(v, part));
      store(tile[b].minimum + v * kLanes, weights.minimum(v));
      if constexpr (std::is_same_v<Tile, PairTile<Products>>) {
        I sum = set1_int(0);
#pragma GCC unroll 8
        for (int i = 0; i < Products::kGroups; i += 2)
          sum = dot_halves(sum, load_int(&tile[b].words[i][v * kLanes]), load_int(&tile[b].words[i + 1][v * kLanes]));
        store_int(&tile[b].products[v * kLanes], sum);
      }
    }
  }
}

// Prefetched before each tile of rows. More lines at once would wait for one another.
constexpr int kPrefetchedBytes = 512;

// Unpacks a panel's weights into tiles that all rows use. The weights unpacked next, perhaps those of the next panel, are
// prefetched meanwhile.
template <class Dots, class Tile>
void sum_unpacked(const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, void* tile_bytes) {
  auto* tile = static_cast<Tile*>(tile_bytes);
  for (int first = 0; first < rows.num_blocks; first += kTileBlocks<Tile>) {
    BlockRange range{first, std::min(first + kTileBlocks<Tile>, rows.num_blocks)};
    unpack<Dots>(panel, range, tile);
    const uint8_t* next = panel + static_cast<int64_t>(range.end) * Dots::Block::kBytes;
    const uint8_t* end = next + kTileBlocks<Tile> * Dots::Block::kBytes;
    for (int row = 0; row < m; row += kRowTile) {
      if (next < end) prefetch<kPrefetchedBytes>(next);
      next += kPrefetchedBytes;
      with_row_count(m - row, [&]<int R>() { sum_tile<typename Dots::Products, R>(tile, range, rows, row, sums); });
    }
  }
}

// The weights to be unpacked next. For each block, some are prefetched, `step` bytes after those of the block before.
struct Ahead {
  const uint8_t* bytes;
  int64_t step;
};

// The fewer rows, the more must be prefetched for each block.
constexpr int kAheadRows = 4 * kRowTile, kMostAheadBytes = 704, kLeastAheadBytes = 192;

// With 32 registers, the integer sums of a whole panel fit, so each input is read once. Float sums are in memory.
template <class P, int R, int kAheadBytes>
[[gnu::noinline]] void sum_panel_tile(const TileOf<P>* tile, BlockRange range, const QuantizedRows& rows, int row, float* sums, Ahead ahead) {
  sums += row * kPanel;
  if (range.first == 0) std::fill_n(sums, R * kPanel, 0.0f);
  for (int b = range.first; b < range.end; ++b, ahead.bytes += ahead.step) {
    prefetch<kAheadBytes>(ahead.bytes);
    add_block<R, kPanelVectors>(dots_of<P>(tile[b - range.first], 0), 0, row_block<P>(rows, row / kRowTile, b), in_memory(sums));
  }
}

// Does the same as sum_unpacked.
template <class Dots, int kAheadBytes>
void sum_unpacked_panel(const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, void* tile_bytes) {
  using Products = typename Dots::Products;
  using Tile = TileOf<Products>;
  auto* tile = static_cast<Tile*>(tile_bytes);
  int num_row_tiles = (m + kRowTile - 1) / kRowTile;
  int64_t step = round_up((Dots::Block::kBytes + num_row_tiles - 1) / num_row_tiles, kLineBytes);
  for (int first = 0; first < rows.num_blocks; first += kTileBlocks<Tile>) {
    BlockRange range{first, std::min(first + kTileBlocks<Tile>, rows.num_blocks)};
    unpack<Dots>(panel, range, tile);
    Ahead ahead{panel + static_cast<int64_t>(range.end) * Dots::Block::kBytes, step};
    for (int row = 0; row < m; row += kRowTile) {
      with_row_count(m - row, [&]<int R>() { sum_panel_tile<Products, R, kAheadBytes>(tile, range, rows, row, sums, ahead); });
      ahead.bytes += step * (range.end - range.first);
    }
  }
}

template <class Dots>
constexpr bool kHasPairProducts = kRegisters == 32 && Dots::Products::kGroups == kBlock / 2 && Dots::Products::kScales == 1;

// AMD's processors multiply in two of their four vector units and execute other operations in all, so pairs are faster, and
// unpacking costs little. Intel's do everything in the same two, so weights are unpacked once for all rows.
#if defined(MIDSTREAM_PAIR)
const bool kIsPairFaster = true, kIsTileFaster = true;  // for tests
#elif defined(__aarch64__)
const bool kIsPairFaster = false, kIsTileFaster = true;
#else
const bool kIsPairFaster = __builtin_cpu_is("amd"), kIsTileFaster = !kIsPairFaster;
#endif
// The more parts a word has, the longer unpacking takes, and the fewer rows make up for copying the result into tiles.
template <class Dots> constexpr int kFewestTileRows = 32 / Dots::kParts;

// With fewer rows, copying the weights into tiles takes longer than is saved. Zen 4, the only processor of family 19h with
// AVX-512, takes two cycles for a multiply and saves more.
#if defined(__aarch64__)
const int kFewestUnpackedPairRows = 24;
#else
const int kFewestUnpackedPairRows = __builtin_cpu_is("amdfam19h") ? 16 : 24;
#endif
int fewest_pair_rows(bool is_unpacked) { return is_unpacked ? kFewestUnpackedPairRows : 48; }

// Number of blocks of a panel that fit in the L1 cache while all rows use them.
template <class Dots> constexpr int kResidentBlocks = std::max(1, kResidentBytes / Dots::Block::kBytes);

// Adds blocks to the sums of the first R rows of a tile. The integer sums of a block are in registers, float sums in memory.
template <class Dots, int R>
[[gnu::noinline]] void sum_registers(const uint8_t* panel, BlockRange range, const QuantizedRows& rows, int tile, float* sums) {
  if (range.first == 0) std::fill_n(sums, R * kPanel, 0.0f);
  for (int b = range.first; b < range.end; ++b) {
    RowBlock x = row_block<typename Dots::Products>(rows, tile, b);
    prefetch_ahead<typename Dots::Block>(panel, b);
    if constexpr (R < 4 || Dots::kParts == 1) {
      // With two vectors, fewer rows have too few sums to hide the latency of products. Words that need no unpacking are operands
      // in memory, of which Intel's processors would read too many.
      add_block<R, kPanelVectors>(block_of<Dots>(panel, b), 0, x, in_memory(sums));
    } else {
#pragma GCC unroll 2
      for (int i = 0; i < kPanelVectors; i += 2)
        add_block_in_turn<R, 2>(block_of<Dots>(panel, b), i, x, in_memory(sums + i * kLanes));
    }
  }
}

template <class Dots>
void sum_dots(const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, void* tile) {
  if (m <= 2) return sum_direct<Dots>(m, panel, rows, sums);
  using Products = typename Dots::Products;
  if constexpr (kRegisters == 32) {
    if constexpr (kHasPairProducts<Dots>)
      if (rows.products && m >= fewest_pair_rows(Dots::kParts > 1)) return sum_unpacked<Dots, PairTile<Products>>(panel, m, rows, sums, tile);
    if (kIsTileFaster && m >= kFewestTileRows<Dots>)
      return (m <= kAheadRows ? sum_unpacked_panel<Dots, kMostAheadBytes> : sum_unpacked_panel<Dots, kLeastAheadBytes>)(panel, m, rows, sums, tile);
    for (int first = 0; first < rows.num_blocks; first += kResidentBlocks<Dots>) {
      BlockRange range{first, std::min(first + kResidentBlocks<Dots>, rows.num_blocks)};
      for (int row = 0; row < m; row += kRowTile)
        with_row_count(m - row, [&]<int R>() { sum_registers<Dots, R>(panel, range, rows, row / kRowTile, sums + row * kPanel); });
    }
    return;
  }
  if (m <= kRowTile) return sum_direct<Dots>(m, panel, rows, sums);
  sum_unpacked<Dots, TileOf<Products>>(panel, m, rows, sums, tile);
}

}  // namespace

bool has_pair_products(Format format, Input input, int m) {
  return kRegisters == 32 && kIsPairFaster && m >= fewest_pair_rows(format != Format::kInt16) && input == Input::kHalves && has_dots(format, input) &&
         format != Format::kQ6K;
}

void sum_dots(Format format, const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, void* tile) {
  auto run = [&]<class Bytes, class Halves>() {
    if constexpr (kHasByteDots && requires(I bytes) { Bytes::to_signed(bytes); })
      if (rows.num_split) return sum_split<Bytes, Halves>(m, panel, rows, sums);
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
    case Format::kInt16: return sum_dots<Int16Halves>(panel, m, rows, sums, tile);
    case Format::kF32:
    case Format::kBF16:
    case Format::kFp8: return;
  }
}

}  // namespace midstream
