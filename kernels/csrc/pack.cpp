// Packing of row-major weights into panels (see formats.h). Done once, when a model is loaded.
#include <cstring>

#include "api.h"
#include "formats.h"
#include "row_ops.h"

namespace midstream {
namespace {

float largest(const float* row, int k) {
  float most = 0;
  for (int i = 0; i < k; ++i) most = std::fmax(most, std::fabs(row[i]));
  return most;
}

void pack_f32(const float* row, int count, int lane, uint8_t* block) {
  for (int k = 0; k < count; ++k) std::memcpy(block + (k * kPanel + lane) * 4, row + k, 4);
}

void pack_bf16(const float* row, int count, int lane, uint8_t* block) {
  for (int k = 0; k < count; ++k) {
    uint16_t half = to_bf16(row[k]);
    std::memcpy(block + ((k / 2) * kPanel + lane) * 4 + (k % 2) * 2, &half, 2);
  }
}

void pack_int8(const float* row, int count, int lane, float scale, uint8_t* block) {
  for (int k = 0; k < count; ++k)
    block[((k / 4) * kPanel + lane) * 4 + k % 4] = static_cast<uint8_t>(scale > 0 ? std::lrint(row[k] / scale) : 0);
}

// GGUF Q8_0: float16 scale, 32 signed bytes.
void pack_q8(const uint8_t* source, int lane, uint8_t* block) {
  std::memcpy(block + lane * 2, source, 2);
  uint8_t* words = block + kPanel * 2;
  for (int k = 0; k < kBlock; ++k) words[((k / 4) * kPanel + lane) * 4 + k % 4] = source[2 + k];
}

// GGUF Q4_1: float16 scale, float16 minimum, 16 bytes; the low nibble of byte i is weight i, the high one 16 + i.
void pack_q4(const uint8_t* source, int lane, uint8_t* block) {
  std::memcpy(block + lane * 2, source, 2);
  std::memcpy(block + (kPanel + lane) * 2, source + 2, 2);
  uint8_t* words = block + kPanel * 4;
  for (int i = 0; i < 4; ++i) {
    uint32_t word = 0;
    for (int j = 0; j < 8; ++j) {
      int k = 4 * j + i;
      uint32_t nibble = k < 16 ? source[4 + k] & 15 : source[4 + k - 16] >> 4;
      word |= nibble << (4 * j);
    }
    std::memcpy(words + (i * kPanel + lane) * 4, &word, 4);
  }
}

void pack_float_row(Format format, const float* row, int k, int lane, uint8_t* panel) {
  int bytes = block_bytes(format), blocks = round_up(k, kBlock) / kBlock;
  float scale = largest(row, k) / 127;
  for (int b = 0; b < blocks; ++b) {
    int count = k - b * kBlock < kBlock ? k - b * kBlock : kBlock;
    uint8_t* block = panel + static_cast<int64_t>(b) * bytes;
    const float* part = row + b * kBlock;
    if (format == Format::kF32) pack_f32(part, count, lane, block);
    if (format == Format::kBF16) pack_bf16(part, count, lane, block);
    if (format == Format::kInt8) pack_int8(part, count, lane, scale, block);
  }
  if (format == Format::kInt8) std::memcpy(panel + static_cast<int64_t>(blocks) * bytes + lane * 4, &scale, 4);
}

void pack_gguf_row(Format format, const uint8_t* row, int k, int lane, uint8_t* panel) {
  int bytes = block_bytes(format), source_bytes = format == Format::kQ4 ? 20 : 34;
  for (int b = 0; b < k / kBlock; ++b) {
    uint8_t* block = panel + static_cast<int64_t>(b) * bytes;
    const uint8_t* source = row + static_cast<int64_t>(b) * source_bytes;
    if (format == Format::kQ4) pack_q4(source, lane, block);
    if (format == Format::kQ8) pack_q8(source, lane, block);
  }
}

}  // namespace
}  // namespace midstream

using namespace midstream;

int64_t midstream_packed_bytes(int format, int n, int k) { return packed_bytes(static_cast<Format>(format), n, k); }

void midstream_pack(int format_number, const void* source, int n, int k, const int* row_order, void* packed) {
  Format format = static_cast<Format>(format_number);
  bool is_gguf = format == Format::kQ4 || format == Format::kQ8;
  int64_t gguf_bytes = format == Format::kQ4 ? 20 : 34;
  int64_t row_bytes = is_gguf ? k / kBlock * gguf_bytes : static_cast<int64_t>(k) * 4;
  std::memset(packed, 0, packed_bytes(format, n, k));
  for (int i = 0; i < n; ++i) {
    if (row_order[i] < 0) continue;  // a row of zeros
    const uint8_t* row = static_cast<const uint8_t*>(source) + row_order[i] * row_bytes;
    uint8_t* panel = static_cast<uint8_t*>(packed) + i / kPanel * panel_bytes(format, k);
    if (is_gguf) {
      pack_gguf_row(format, row, k, i % kPanel, panel);
    } else {
      pack_float_row(format, reinterpret_cast<const float*>(row), k, i % kPanel, panel);
    }
  }
}
