// Sums of a panel by integer dot products with rows of bytes.
#pragma once
#include "quantized_rows.h"

namespace midstream {

// A block of weights as integers q with w = scale * q + minimum, in num_groups words for each channel.
template <int num_groups> struct DotTile {
  uint32_t words[num_groups][kPanel];
  float scale[kPanel], minimum[kPanel];
};

constexpr int kDotTileBytes = 21 * 1024;  // stays in the first-level cache while all rows pass over it

inline bool has_dots(Format format, Input input) {
  bool is_quantized = format == Format::kQ4 || format == Format::kQ8 || format == Format::kInt8;
  return is_quantized && (input == Input::kHalves || (input == Input::kBytes && (kHasByteDots || format == Format::kQ4)));
}

// sums [m, kPanel] = rows times panel; for int8 the scales of the channels are yet to be applied. tile has kDotTileBytes.
void sum_dots(Format format, const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, void* tile);

}  // namespace midstream
