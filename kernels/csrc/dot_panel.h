// Sums of a panel by integer dot products with rows of bytes.
#pragma once
#include "quantized_rows.h"

namespace midstream {

// A block of weights as integers q with w = scale * q + minimum, in num_groups words for each channel; each of num_scales parts
// of the block has its own scale.
template <int num_groups, int num_scales> struct DotTile {
  uint32_t words[num_groups][kPanel];
  float scale[num_scales][kPanel], minimum[kPanel];
};

constexpr int kDotTileBytes = 21 * 1024;  // stays in the first-level cache while all rows pass over it

inline bool has_dots(Format format, Input input) {
  bool is_float = format == Format::kF32 || format == Format::kBF16 || format == Format::kFp8;
  // The processor's dots of bytes take unsigned weights, and make it up with the sum of the inputs: of a block, not of halves.
  bool has_byte_dots = format != Format::kQ6K && format != Format::kInt16 && (kHasByteDots || (has_nibbles(format) && format != Format::kMx4));
  return !is_float && (input == Input::kHalves || (input == Input::kBytes && has_byte_dots));
}

// The most rows that are multiplied as high and low bytes where there are no more.
constexpr int kMostSplitRows = kLanes == 16 ? kSplitRows : 1;
inline int most_split_rows(Format format, Input input) {
  bool has_bytes = format == Format::kQ8 || format == Format::kInt8;
  return kHasByteDots && input == Input::kHalves && (has_bytes || has_nibbles(format)) ? kMostSplitRows : 0;
}

// sums [m, kPanel] = rows times panel; for int8 the scales of the channels are yet to be applied. tile has kDotTileBytes.
void sum_dots(Format format, const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, void* tile);

}  // namespace midstream
