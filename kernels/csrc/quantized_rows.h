// Rows of activations as signed integers, for integer dot products; AVX2 in every build.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <new>
#include <vector>

#include "formats.h"

namespace midstream {

// What the input of a linear layer is rounded to; the numbers are those of kernels/cpu/linear.py.
enum class Input : int { kFloats = 0, kBytes = 1, kHalves = 2 };

constexpr int kSplitWords = kBlock / 2 + 2, kSplitRows = 2;
inline int words_of_block(Input input) { return input == Input::kHalves ? kBlock / 2 : kBlock / 4; }
constexpr int num_parts(Input input) { return input == Input::kFloats ? 3 : input == Input::kHalves ? 2 : 1; }

// Rows that meet the same weights in registers: their words lie side by side. Sums fill the registers, 4 x 2 vectors of 16
// with AVX2 (which needs others for products), 6 x 4 of 32 with AVX-512.
constexpr int kRowTile = kLanes == 16 ? 6 : 4;

// Each block of kBlock numbers of a row has its own scale: the largest magnitude becomes 127, or 32,767 as halves (16 bits).
// A word holds what meets a word of weights. Bytes: four in order, or for weights of four bits those of k = 8 j + i in byte j of word i.
// Halves: word 2 i + j has k = 4 i + j and the one after next, or for four bits word k has k and k + 16.
//
// A few rows of halves may be split into bytes instead, x = 256 high + low, which takes half as many instructions to unpack weights
// for: eight words of high bytes (signed) and eight of low ones (unsigned), as bytes lie, then the sums of both, [num_blocks, kSplitWords,
// num_split]. The sums of products are the same.
//
// For products of tiles, numbers are sums of one to three bfloat16s, in order or for four bits k beside k + 16: a byte itself, what a
// half is without its low byte and the low byte, and the three parts of a float that is not rounded.
struct QuantizedRows {
  uint32_t* words;  // [m / kRowTile, num_blocks, words_of_block, kRowTile]; tiles: [m / 16, num_blocks, num_parts, 16, kBlock / 2]
  float* scales;    // [m / kRowTile, num_blocks, kRowTile]; tiles: [m / 16, num_blocks, 16]
  float* sums;      // likewise: the sum of a block's numbers as quantized
  int num_blocks;
  Input input;
  bool has_tiles;
  int num_split = 0;

  // Those from a row on that is the first of a tile.
  QuantizedRows from(int row) const {
    int64_t blocks = static_cast<int64_t>(row) * num_blocks;
    int words_of_row = has_tiles ? num_parts(input) * kBlock / 2 : words_of_block(input);
    return {words + blocks * words_of_row, scales + blocks, sums + blocks, num_blocks, input, has_tiles, num_split};
  }

  // Sets one row from num_blocks * kBlock numbers.
  void quantize(int index, const float* row, bool has_nibbles) const;
};

// Vectors and rows of tiles that cross cache lines are read half as fast.
template <class T> struct AlignedAllocator {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{alignof(T) > 64 ? alignof(T) : 64};
  AlignedAllocator() = default;
  template <class U> AlignedAllocator(const AlignedAllocator<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kAlignment)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kAlignment); }
  bool operator==(const AlignedAllocator&) const { return true; }
};
template <class T> using AlignedVector = std::vector<T, AlignedAllocator<T>>;

struct QuantizedScratch {
  AlignedVector<uint32_t> words;
  std::vector<float> scales, sums;
  std::vector<float> ordered;  // rows of an input in the order of a weight's columns
  bool can_use_tiles = false, has_orders = false;

  void reserve(int m, int k) {
    size_t blocks = static_cast<size_t>(m + kMostTileRows) * (round_up(k, kBlock) / kBlock);
    if (has_orders && ordered.size() < blocks * kBlock) ordered.resize(blocks * kBlock);
    if (scales.size() < blocks) words.resize(blocks * (can_use_tiles ? 3 : 1) * kBlock / 2), scales.resize(blocks), sums.resize(blocks);
  }
  // Rows for a layer that has integer products with this input, or of floats for one that has not.
  QuantizedRows rows(int m, int k, Format format, Input input) {
    // Few rows of integers are faster with vectors, and have the same bits.
    int least = format == Format::kBF16 ? 1 : input == Input::kHalves ? 7 : 16;
    bool is_apt = format == Format::kBF16 || (has_nibbles(format) && input != Input::kFloats);
    bool has_tiles = can_use_tiles && is_apt && m >= least;
    return {words.data(), scales.data(), sums.data(), round_up(k, kBlock) / kBlock, input, has_tiles};
  }

 private:
  static constexpr int kMostTileRows = 16;  // the last tile of rows may not be full
};

}  // namespace midstream
