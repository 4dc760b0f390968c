// Rows of activations as signed integers, for integer dot products. The conversion uses vectors of 8 lanes in every build.
#pragma once
#include <cstdint>
#include <new>
#include <vector>

#include "formats.h"

namespace midstream {

// The type to which the input of a linear layer is rounded, numbered as in kernels/cpu/linear.py.
enum class Input : int { kFloats = 0, kBytes = 1, kHalves = 2 };

constexpr int kSplitWords = kBlock / 2 + 2, kSplitRows = 2;
// Returns the largest magnitude of halves: the sum with a weight also fits in 16 bits (see PairTile in dot_panel.cpp).
constexpr int most_half(Format format) { return 32767 - (format == Format::kInt16 ? Int16Block::kMost : 255); }
inline int words_of_block(Input input) { return input == Input::kHalves ? kBlock / 2 : kBlock / 4; }
constexpr int num_parts(Input input) { return input == Input::kFloats ? 3 : input == Input::kHalves ? 2 : 1; }

// Number of rows that are multiplied by the same weights in registers; their words are adjacent. Sums occupy most registers:
// 4 x 2 of 16 with AVX2, which needs others for products, and 6 x 4 of 32 with AVX-512.
constexpr int kRowTile = kLanes == 16 ? 6 : 4;

// Each block of kBlock elements of a row has its own scale: the largest magnitude becomes 127, or most_half() for halves (16 bits). The
// order of elements in a word is that of the weights by which they are multiplied. Bytes: four elements in order, or for weights
// of four bits, k = 8 j + i in byte j of word i. Halves: word 2 i + j has k = 4 i + j and 4 i + j + 2, or for weights of four bits,
// word k has k and k + 16.
//
// Alternatively, a few rows of halves may be split into bytes, x = 256 high + low, for which unpacking the weights takes half as
// many instructions. They are stored as eight words of high bytes (signed), eight words of low bytes (unsigned, or signed if dot
// products are), both in the order of bytes, and the sums of each: [m / num_split, num_blocks, kSplitWords, num_split]. The dot
// products are the same. With signed dot products, any number of rows is split, because products of halves take longer.
//
// For tiles, elements are represented as sums of one to three bfloat16s, in order, or for weights of four bits, k next to k + 16.
// A byte has one part, a half two (the high and the low byte), and a float, which is not rounded, three.
struct QuantizedRows {
  uint32_t* words;  // [m / kRowTile, num_blocks, words_of_block, kRowTile]; tiles: [m / 16, num_blocks, num_parts, 16, kBlock / 2]
  float* scales;    // [m / kRowTile, num_blocks, kRowTile]; tiles: [m / 16, num_blocks, 16]
  float* sums;      // shape of scales: the sum of the quantized elements of a block, times the scale
  int num_blocks;
  Input input;
  bool has_tiles;
  int num_split = 0;
  uint32_t* products = nullptr;  // shape of scales: minus the sum of the products of words 2 i and 2 i + 1; null if not needed

  // Returns the number of rows whose words are interleaved.
  int row_tile() const;

  // Returns the rows from `row` on, which must be the first row of a tile.
  QuantizedRows from(int row) const {
    int64_t blocks = static_cast<int64_t>(row) * num_blocks;
    int words_of_row = has_tiles ? num_parts(input) * kBlock / 2 : num_split ? kSplitWords : words_of_block(input);
    return {words + blocks * words_of_row, scales + blocks, sums + blocks, num_blocks, input, has_tiles, num_split, products ? products + blocks : nullptr};
  }

  // Returns the rows from `row` on, if each group of rows may be split or not.
  QuantizedRows from_group(int row) const {
    QuantizedRows rows = *this;
    rows.num_split = kHasSignedDots && input == Input::kHalves ? kRowTile : 0;
    return rows.from(row);
  }

  // Quantizes one row of num_blocks * kBlock elements for weights of this format.
  void quantize(int index, const float* row, Format format) const;
};

// Aligned to cache lines: vectors and rows of tiles that cross one are read at half the speed.
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
  std::vector<uint32_t> products;
  std::vector<float> ordered;  // rows of an input, in the order of a weight's columns
  bool can_use_tiles = false, has_orders = false;

  void reserve(int m, int k) {
    size_t blocks = static_cast<size_t>(m + kMostTileRows) * (round_up(k, kBlock) / kBlock);
    if (has_orders && ordered.size() < blocks * kBlock) ordered.resize(blocks * kBlock);
    if (scales.size() < blocks) words.resize(blocks * (can_use_tiles ? 3 * kBlock / 2 : kSplitWords)), scales.resize(blocks), sums.resize(blocks), products.resize(blocks);
  }
  // Returns storage for m rows: quantized to `input` for a layer with integer products, or floats for another layer.
  QuantizedRows rows(int m, int k, Format format, Input input) {
    // For few rows of integers, vectors are faster than tiles, and give the same bits.
    int least = format == Format::kBF16 ? 1 : input == Input::kHalves ? 7 : 16;
    bool is_apt = format == Format::kBF16 || (has_nibbles(format) && input != Input::kFloats);
    bool has_tiles = can_use_tiles && is_apt && m >= least;
    return {words.data(), scales.data(), sums.data(), round_up(k, kBlock) / kBlock, input, has_tiles};
  }

 private:
  static constexpr int kMostTileRows = 16;  // the last tile of rows may not be full
};

}  // namespace midstream
