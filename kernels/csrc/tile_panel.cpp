#include "tile_panel.h"

#include <algorithm>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace midstream {

#if defined(__AVX512F__)
bool request_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool request_tiles() { return kHasTiles; }
#endif

namespace {

// Conversions of blocks to tiles: pairs of nibbles become integers q as bfloat16; a weight is scale * q + minimum.

template <class Block> struct NibbleTiles {
  [[gnu::always_inline]] static I to_bf16(I word) { return nibbles_to_bf16(word); }
  static F scale(const uint8_t* panel, int b, int v) { return Block::scale(panel, b, v); }
  static F minimum(const uint8_t* panel, int b, int v) { return Block::minimum(panel, b, v); }
};

template <Input input> struct Mx4Tiles {
  static constexpr bool kIsSigned = input == Input::kHalves;  // as in dot_panel.cpp; sums of 32 products are less than 2^24
  [[gnu::always_inline]] static I to_bf16(I word) { return kIsSigned ? mx4_to_bf16(word) : mx4_plus_12_to_bf16(word); }
  static F scale(const uint8_t* panel, int b, int v) { return Mx4Block::scale(panel, b, v); }
  static F minimum(const uint8_t* panel, int b, int v) { return kIsSigned ? zero() : mul(scale(panel, b, v), set1(-12.0f)); }
};

template <class Block, class Tiles> void unpack(const uint8_t* panel, int b, int place, TileScratch& scratch) {
  const uint8_t* words = Block::words(panel, b);
  for (int v = 0; v < kPanelVectors; ++v) {
    auto& pairs = scratch.weights[place][v];
    for (int i = 0; i < 4; ++i) {
      I word = load_int(words + (i * kPanel + v * kLanes) * 4);
      // Pair i has weights i and i + 16.
      store_int(pairs[i], Tiles::to_bf16(word));
      store_int(pairs[4 + i], Tiles::to_bf16(shift_right<4>(word)));
      store_int(pairs[8 + i], Tiles::to_bf16(shift_right<8>(word)));
      store_int(pairs[12 + i], Tiles::to_bf16(shift_right<12>(word)));
    }
    store(scratch.scales[place] + v * kLanes, Tiles::scale(panel, b, v));
    store(scratch.minimums[place] + v * kLanes, Tiles::minimum(panel, b, v));
  }
}

template <Input input> void unpack(Format format, const uint8_t* panel, int b, int place, TileScratch& scratch) {
  if (format == Format::kQ4) unpack<Q4Block, NibbleTiles<Q4Block>>(panel, b, place, scratch);
  if (format == Format::kInt4) unpack<Int4Block, NibbleTiles<Int4Block>>(panel, b, place, scratch);
  if (format == Format::kQ4K) unpack<Q4KBlock, NibbleTiles<Q4KBlock>>(panel, b, place, scratch);
  if (format == Format::kMx4) unpack<Mx4Block, Mx4Tiles<input>>(panel, b, place, scratch);
}

// products = inputs [kTileRows, kBlock] times a block of weights.
template <Input input> [[gnu::always_inline]] inline void multiply_block(const uint32_t* inputs, int b, TileScratch& scratch) {
  constexpr bool kHasLow = input == Input::kHalves;
  load_tile<4>(inputs, 64);
  if constexpr (kHasLow) load_tile<5>(inputs + kTileBytes / 4, 64);
  auto multiply = [&]<int v>() __attribute__((always_inline)) {
    constexpr int kWeights = 6 + v % 2;
    load_tile<kWeights>(scratch.weights[b][v], 64);
    clear_tile<v>();
    multiply_tiles<v, 4, kWeights>();
    if constexpr (kHasLow) multiply_tiles<v, 5, kWeights>();
    store_tile<v>(scratch.products[b][v], 64);
  };
  multiply.template operator()<0>();
  multiply.template operator()<1>();
  multiply.template operator()<2>();
  multiply.template operator()<3>();
}

// A range of blocks of one tile of rows.
struct Chunk {
  int row, first_block, count;
};

// sums += scale * products + minimum * sum of inputs, for R rows from r0 on, and for two vectors of channels from v0 on.
template <int R>
[[gnu::noinline]] void add_products(const Chunk& chunk, const QuantizedRows& rows, const TileScratch& scratch, int r0, int v0,
                                    float* sums) {
  constexpr int V = 2;
  int64_t index = (static_cast<int64_t>(chunk.row / kTileRows) * rows.num_blocks + chunk.first_block) * kTileRows + r0;
  const float *scales = rows.scales + index, *row_sums = rows.sums + index;
  float* out = sums + (chunk.row + r0) * kPanel + v0 * kLanes;
  F sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) sum[r][v] = chunk.first_block ? load(out + r * kPanel + v * kLanes) : zero();
  for (int b = 0; b < chunk.count; ++b) {
    F scale[V], minimum[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      scale[v] = load(scratch.scales[b] + (v0 + v) * kLanes);
      minimum[v] = load(scratch.minimums[b] + (v0 + v) * kLanes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      F row_scale = set1(scales[b * kTileRows + r]), row_sum = set1(row_sums[b * kTileRows + r]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        sum[r][v] = fma(mul(scale[v], row_scale), load(scratch.products[b][v0 + v][r0 + r]), sum[r][v]);
        sum[r][v] = fma(minimum[v], row_sum, sum[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(out + r * kPanel + v * kLanes, sum[r][v]);
}

template <Input input>
void sum_tiles(Format format, const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, TileScratch& scratch) {
  constexpr int kWords = kTileBytes / 4 * num_parts(input);
  for (int first = 0; first < rows.num_blocks; first += kTileChunk) {
    int count = std::min(kTileChunk, rows.num_blocks - first);
    for (int b = 0; b < count; ++b) unpack<input>(format, panel, first + b, b, scratch);
    for (int row = 0; row < m; row += kTileRows) {
      int64_t index = static_cast<int64_t>(row / kTileRows) * rows.num_blocks + first;
      for (int b = 0; b < count; ++b) multiply_block<input>(rows.words + (index + b) * kWords, b, scratch);
      for (int v = 0; v < kPanelVectors; v += 2) {
        add_products<8>({row, first, count}, rows, scratch, 0, v, sums);
        if (m - row > 8) add_products<8>({row, first, count}, rows, scratch, 8, v, sums);
      }
    }
  }
}

// Adds the products of a block of BF16 weights, which have the layout of tiles in memory, with all parts of the inputs.
[[gnu::always_inline]] inline void add_bf16_block(const uint32_t* inputs, const uint8_t* block) {
  load_tile<4>(inputs, 64);
  load_tile<5>(inputs + kTileBytes / 4, 64);
  load_tile<6>(inputs + 2 * kTileBytes / 4, 64);
  auto add = [&]<int v>() __attribute__((always_inline)) {
    load_tile<7>(block + v * 64, kPanel * 4);
    multiply_tiles<v, 4, 7>();
    multiply_tiles<v, 5, 7>();
    multiply_tiles<v, 6, 7>();
  };
  add.template operator()<0>();
  add.template operator()<1>();
  add.template operator()<2>();
  add.template operator()<3>();
}

void sum_bf16_tiles(const uint8_t* panel, int m, const QuantizedRows& rows, float* sums) {
  constexpr int kChunk = 6, kWords = kTileBytes / 4 * num_parts(Input::kFloats);  // weights that fit in the L1 cache
  for (int first = 0; first < rows.num_blocks; first += kChunk)
    for (int row = 0; row < m; row += kTileRows) {
      float* out = sums + row * kPanel;
      if (first) {
        load_tile<0>(out, kPanel * 4);
        load_tile<1>(out + 16, kPanel * 4);
        load_tile<2>(out + 32, kPanel * 4);
        load_tile<3>(out + 48, kPanel * 4);
      } else {
        clear_tile<0>();
        clear_tile<1>();
        clear_tile<2>();
        clear_tile<3>();
      }
      int64_t index = static_cast<int64_t>(row / kTileRows) * rows.num_blocks;
      for (int b = first; b < std::min(first + kChunk, rows.num_blocks); ++b)
        add_bf16_block(rows.words + (index + b) * kWords, BF16Block::words(panel, b));
      store_tile<0>(out, kPanel * 4);
      store_tile<1>(out + 16, kPanel * 4);
      store_tile<2>(out + 32, kPanel * 4);
      store_tile<3>(out + 48, kPanel * 4);
    }
}

}  // namespace

void sum_tiles(Format format, const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, TileScratch& scratch) {
  if constexpr (kHasTiles) {
    if (format == Format::kBF16) return sum_bf16_tiles(panel, m, rows, sums);
    (rows.input == Input::kHalves ? sum_tiles<Input::kHalves> : sum_tiles<Input::kBytes>)(format, panel, m, rows, sums, scratch);
  }
}

}  // namespace midstream
