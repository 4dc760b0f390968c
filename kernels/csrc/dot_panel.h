// Matrix products of a panel by integer dot products.
#pragma once
#include "quantized_rows.h"

namespace midstream {

// A block of weights as integers q, in num_groups words per channel: a weight is scale * q + minimum. Each of num_scales parts of
// the block has its own scale.
template <int num_groups, int num_scales> struct DotTile {
  uint32_t words[num_groups][kPanel];
  float scale[num_scales][kPanel], minimum[kPanel];
};

constexpr int kDotTileBytes = 21 * 1024;  // fits in the L1 cache, along with the data of the rows that use it

inline bool has_dots(Format format, Input input) {
  bool is_float = format == Format::kF32 || format == Format::kBF16 || format == Format::kFp8;
  // The processor's byte dot products require unsigned weights. The offset is corrected by the sum of the inputs, which is known
  // per block but not per half of a block.
  bool has_byte_dots = format != Format::kQ6K && format != Format::kInt16 && (kHasByteDots || (has_nibbles(format) && format != Format::kMx4));
  return !is_float && (input == Input::kHalves || (input == Input::kBytes && has_byte_dots));
}

// Returns whether words of m rows of an input are multiplied in pairs, for which QuantizedRows::products is needed.
bool has_pair_products(Format format, Input input, int m);

// Returns how many of m rows are interleaved if they are split into high and low bytes; 0 if they are not split.
constexpr int kMostSplitRows = kLanes == 16 ? kSplitRows : 1;
inline int num_split_rows(Format format, Input input, int m) {
  bool has_bytes = format == Format::kQ8 || format == Format::kInt8;
  if (!kHasByteDots || input != Input::kHalves || !(has_bytes || has_nibbles(format))) return 0;
  if (kHasSignedDots) return m < kRowTile ? m : kRowTile;
  return m <= kMostSplitRows ? m : 0;
}

// sums [m, kPanel] = rows times panel. For int8, the scales of the channels are not applied. `tile` has kDotTileBytes bytes.
void sum_dots(Format format, const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, void* tile);

}  // namespace midstream
