// Rows of activations as signed integers, for integer dot products; AVX2 in every build.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <vector>

#include "formats.h"

namespace midstream {

// What the input of a linear layer is rounded to; the numbers are those of kernels/cpu/linear.py.
enum class Input : int { kFloats = 0, kBytes = 1, kHalves = 2 };

inline int words_of_block(Input input) { return input == Input::kHalves ? kBlock / 2 : kBlock / 4; }

// Rows that meet the same weights in registers: their words lie side by side. Sums fill the registers, 4 x 2 vectors of 16
// with AVX2 (which needs others for products), 6 x 4 of 32 with AVX-512.
constexpr int kRowTile = kLanes == 16 ? 6 : 4;

// Each block of kBlock numbers of a row has its own scale: the largest magnitude becomes 127, or 32,767 as halves (16 bits).
// A word holds what meets a word of weights. Bytes: four in order, or for Q4 those of k = 8 j + i in byte j of word i.
// Halves: word 2 i + j has k = 4 i + j and the one after next, or for Q4 word k has k and k + 16.
struct QuantizedRows {
  uint32_t* words;  // [m / kRowTile, num_blocks, words_of_block, kRowTile]
  float* scales;    // [m / kRowTile, num_blocks, kRowTile]
  float* sums;      // likewise: the sum of a block's numbers as quantized
  int num_blocks;
  Input input;

  // Sets one row from num_blocks * kBlock numbers.
  void quantize(int index, const float* row, bool is_q4) const;
};

struct QuantizedScratch {
  std::vector<uint32_t> words;
  std::vector<float> scales, sums;

  void reserve(int m, int k) {
    size_t blocks = static_cast<size_t>(round_up(m, kRowTile)) * (round_up(k, kBlock) / kBlock);
    if (scales.size() < blocks) words.resize(blocks * (kBlock / 2)), scales.resize(blocks), sums.resize(blocks);
  }
  QuantizedRows rows(int k, Input input) {
    return {words.data(), scales.data(), sums.data(), round_up(k, kBlock) / kBlock, input};
  }
};

}  // namespace midstream
