// Converts rows of an embedding table to floats.
#pragma once
#include <bit>
#include <cstring>

#include "api.h"
#include "formats.h"

namespace midstream {

inline float half_to_float(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // A subnormal half becomes a subnormal float here, so the same multiplication corrects normal and subnormal numbers.
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(std::bit_cast<float>(rest << 13) * 0x1p112f));
}

// Returns whether embed_row supports the format.
inline bool can_embed(Format format) {
  return format == Format::kF32 || format == Format::kBF16 || format == Format::kQ4 || format == Format::kQ8;
}

// Writes row `id` of the table to out[width]. For the formats kQ4 and kQ8, width must be a multiple of kBlock.
inline void embed_row(const MidstreamEmbedding& table, int id, int width, float* out) {
  const uint8_t* row = static_cast<const uint8_t*>(table.rows) + id * table.row_bytes;
  auto half = [](const uint8_t* bytes) {
    uint16_t bits;
    std::memcpy(&bits, bytes, sizeof(bits));
    return half_to_float(bits);
  };
  switch (static_cast<Format>(table.format)) {
    case Format::kF32: std::memcpy(out, row, width * sizeof(float)); return;
    case Format::kBF16:
      for (int i = 0; i < width; ++i) out[i] = std::bit_cast<float>(static_cast<uint32_t>(row[2 * i] | row[2 * i + 1] << 8) << 16);
      return;
    case Format::kQ4:
      for (int b = 0; b < width; b += kBlock, row += 20) {
        float scale = half(row), minimum = half(row + 2);
        for (int i = 0; i < 16; ++i) {
          out[b + i] = scale * static_cast<float>(row[4 + i] & 15) + minimum;
          out[b + 16 + i] = scale * static_cast<float>(row[4 + i] >> 4) + minimum;
        }
      }
      return;
    case Format::kQ8:
      for (int b = 0; b < width; b += kBlock, row += 34) {
        float scale = half(row);
        for (int i = 0; i < kBlock; ++i) out[b + i] = scale * static_cast<float>(static_cast<int8_t>(row[2 + i]));
      }
      return;
    default: return;
  }
}

}  // namespace midstream
