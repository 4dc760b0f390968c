// Sums of a panel by integer dot products with rows of bytes.
#pragma once
#include "quantized_rows.h"

namespace midstream {

constexpr int kGroups = kBlock / 4;  // words of a block

// A block of weights as unsigned bytes q with w = scale * q + minimum.
struct DotTile {
  uint32_t words[kGroups][kPanel];
  float scale[kPanel], minimum[kPanel];
};

constexpr int kDotTileBlocks = 24;  // stay in the first-level cache while all rows pass over them

inline bool has_dots(Format format) {
  return format == Format::kQ4 || (kHasByteDots && (format == Format::kQ8 || format == Format::kInt8));
}

// sums [m, kPanel] = rows times panel; for int8 the scales of the channels are yet to be applied. tile has kDotTileBlocks.
void sum_dots(Format format, const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, DotTile* tile);

}  // namespace midstream
