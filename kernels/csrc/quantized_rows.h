// Rows of activations as signed bytes, for integer dot products; AVX2 in every build.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <vector>

#include "formats.h"

namespace midstream {

// Each block of kBlock numbers of a row has its own scale: the largest magnitude becomes 127. A word holds the four bytes
// that meet the four bytes of a weight word: in order, or for Q4 the bytes of k = 8 j + i in byte j of word i.
struct QuantizedRows {
  uint32_t* words;  // [m, num_blocks * 8]
  float* scales;    // [m, num_blocks]
  float* sums;      // [m, num_blocks]: the sum of a block's numbers as quantized
  int num_blocks;

  // Sets one row from num_blocks * kBlock numbers.
  void quantize(int index, const float* row, bool is_q4) const;
};

struct QuantizedScratch {
  std::vector<uint32_t> words;
  std::vector<float> scales, sums;

  void reserve(int m, int k) {
    size_t blocks = static_cast<size_t>(m) * (round_up(k, kBlock) / kBlock);
    if (scales.size() < blocks) words.resize(blocks * 8), scales.resize(blocks), sums.resize(blocks);
  }
  QuantizedRows rows(int k) { return {words.data(), scales.data(), sums.data(), round_up(k, kBlock) / kBlock}; }
};

}  // namespace midstream
