// Matrix products of a panel with tiles, for BF16 weights, and for many rows with weights of four bits. The latter use the same
// integers as dot_panel.h, and therefore give the same bits.
#pragma once
#include "quantized_rows.h"
#include "tiles.h"

namespace midstream {

constexpr int kTileChunk = 4;  // number of blocks whose weights and products fit in the L1 cache

// Scratch memory of one thread. A load waits for a preceding store at a distance of a multiple of 4,096 bytes (4K aliasing).
// Weights and their products have the same offset in a page, so that such a store has completed long before.
struct alignas(4096) TileScratch {
  uint32_t weights[kTileChunk][kPanelVectors][kBlock / 2][16];  // pairs of integers q as bfloat16, for scale * q + minimum
  float products[kTileChunk][kPanelVectors][kTileRows][16];
  float scales[kTileChunk][kPanel], minimums[kTileChunk][kPanel];
};

inline int num_weight_tiles(Format format) { return format == Format::kBF16 ? 1 : 2; }

// sums [m rounded up to kTileRows, kPanel] = rows times a panel of BF16 or four-bit weights. The rows have the layout of tiles,
// and tiles are configured for m and the format.
void sum_tiles(Format format, const uint8_t* panel, int m, const QuantizedRows& rows, float* sums, TileScratch& scratch);

}  // namespace midstream
