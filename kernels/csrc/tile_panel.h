// Sums of a panel by products of tiles. Those of four bits are for many rows: the same integers, and so the same bits, as dot_panel.h.
#pragma once
#include "quantized_rows.h"
#include "tiles.h"

namespace midstream {

constexpr int kTileChunk = 4;  // blocks whose weights and products stay in the first-level cache

// Scratch of one thread. A load waits for an earlier store that is a multiple of 4,096 bytes apart: weights and their products
// have the same place in a page, so that such a store is long past.
struct alignas(4096) TileScratch {
  uint32_t weights[kTileChunk][kPanelVectors][kBlock / 2][16];  // pairs of bfloat16 integers q with w = scale * q + minimum
  float products[kTileChunk][kPanelVectors][kTileRows][16];
  float scales[kTileChunk][kPanel], minimums[kTileChunk][kPanel];
};

inline int num_weight_tiles(Format format) { return format == Format::kBF16 ? 1 : 2; }

// sums [m rounded up to kTileRows, kPanel] = rows times a panel of BF16 or four bits; rows have the layout of tiles, and tiles are configured for
// m and the format.
void sum_tiles(Format format, const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, TileScratch& scratch);

}  // namespace midstream
