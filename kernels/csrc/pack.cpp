// Packs row-major weights into panels (see formats.h), once, when a model is loaded.
#include <algorithm>
#include <cstring>
#include <vector>

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

// Quantizes to multiples of a scale that is a power of two. bfloat16 weights of at least 128 times the scale are exact.
void pack_int16(const float* row, int count, int lane, uint8_t* block, uint8_t* words) {
  double sum = 0, most = 0;
  for (int k = 0; k < count; ++k) sum += std::fabs(row[k]), most = std::fmax(most, std::fabs(row[k]));
  if (!(sum > 0)) {
    block[lane] = sum == 0 ? 0 : 255;  // in case of NaN the scale is infinite, which makes the products with the zeros NaN
    return;
  }
  int exponent = 0;
  std::frexp(std::fmax(sum / Int16Block::kMostSum, most / Int16Block::kMost), &exponent);  // less than 2^exponent
  block[lane] = static_cast<uint8_t>(std::clamp(exponent + 127, 1, 255));
  if (block[lane] == 255) return;
  for (int k = 0; k < count; ++k) {
    auto level = static_cast<int16_t>(std::lrint(std::ldexp(row[k], 127 - block[lane])));
    int word = k / 4 * 2 + k % 2;
    std::memcpy(words + (word * kPanel + lane) * 4 + k % 4 / 2 * 2, &level, 2);
  }
}

void pack_float_row(Format format, const float* row, int k, int lane, uint8_t* panel) {
  int blocks = round_up(k, kBlock) / kBlock;
  float scale = largest(row, k) / 127;
  for (int b = 0; b < blocks; ++b) {
    int count = k - b * kBlock < kBlock ? k - b * kBlock : kBlock;
    auto block = [&](auto type) { return const_cast<uint8_t*>(type.words(panel, b)); };
    const float* part = row + b * kBlock;
    if (format == Format::kF32) pack_f32(part, count, lane, block(F32Block{}));
    if (format == Format::kBF16) pack_bf16(part, count, lane, block(BF16Block{}));
    if (format == Format::kInt8) pack_int8(part, count, lane, scale, block(Int8Block{}));
    if (format == Format::kInt16) pack_int16(part, count, lane, const_cast<uint8_t*>(Int16Block::fields(panel, b)), block(Int16Block{}));
  }
  if (format == Format::kInt8) std::memcpy(panel + panel_bytes(format, k) - (kPanel - lane) * 4, &scale, 4);
}

// The source has 16 bytes: the low nibble of byte i is weight i, and the high nibble is weight 16 + i.
void pack_nibbles(const uint8_t* source, int lane, uint8_t* words) {
  for (int i = 0; i < 4; ++i) {
    uint32_t word = 0;
    for (int j = 0; j < 8; ++j) {
      int k = 4 * j + i;
      uint32_t nibble = k < 16 ? source[k] & 15 : source[k - 16] >> 4;
      word |= nibble << (4 * j);
    }
    std::memcpy(words + (i * kPanel + lane) * 4, &word, 4);
  }
}

void pack_bytes(const uint8_t* source, int lane, uint8_t* words) {
  for (int k = 0; k < kBlock; ++k) words[((k / 4) * kPanel + lane) * 4 + k % 4] = source[k];
}

// Returns the sizes of a block's fields in bytes, in order, beginning with shared fields.
std::vector<int> field_sizes(Format format) {
  switch (format) {
    case Format::kQ4: return {2, 2};
    case Format::kQ8: return {2};
    case Format::kInt4: return {4};
    case Format::kQ4K: return {2, 2, 1, 1};
    case Format::kMx4: return {1};
    case Format::kAffine8: return {4, 4};
    case Format::kQ6K: return {2, 1, 1};
    case Format::kFp8: return {4};
    default: return {};
  }
}

int block_bytes(Format format) {
  int bytes = has_nibbles(format) ? kBlock / 2 : kBlock;
  for (int size : field_sizes(format)) bytes += size;
  return bytes;
}

// In the source, each block of a row has its fields before its weights. In the format int8, the scale is at the end of the row.
void pack_block_row(Format format, const uint8_t* row, int k, int lane, uint8_t* panel) {
  std::vector<int> sizes = field_sizes(format);
  int num_blocks = round_up(k, kBlock) / kBlock;
  for (int b = 0; b < num_blocks; ++b) {
    with_block(format, [&](auto block) {
      auto* shared = const_cast<uint8_t*>(block.shared(panel, b));
      auto* field = block.kSharedBytes ? shared : const_cast<uint8_t*>(block.fields(panel, b));
      for (int size : sizes) {
        if (field == shared + block.kSharedBytes) field = const_cast<uint8_t*>(block.fields(panel, b));
        std::memcpy(field + lane * size, row, size);
        field += kPanel * size;
        row += size;
      }
      // The kernels add minimums, whereas Q4_K subtracts them.
      if (format == Format::kQ4K) shared[(kPanel + lane) * 2 + 1] ^= 0x80;
      auto* words = const_cast<uint8_t*>(block.words(panel, b));
      has_nibbles(format) ? pack_nibbles(row, lane, words) : pack_bytes(row, lane, words);
      row += has_nibbles(format) ? kBlock / 2 : kBlock;
    });
  }
  if (format == Format::kInt8) std::memcpy(panel + panel_bytes(format, k) - (kPanel - lane) * 4, row, 4);
}

}  // namespace
}  // namespace midstream

using namespace midstream;

int64_t midstream_packed_bytes(int format, int n, int k) { return packed_bytes(static_cast<Format>(format), n, k); }

int64_t midstream_row_bytes(int format_number, int k) {
  Format format = static_cast<Format>(format_number);
  return static_cast<int64_t>(round_up(k, kBlock) / kBlock) * block_bytes(format) + (format == Format::kInt8 ? 4 : 0);
}

void midstream_pack(int format_number, bool has_blocks, const void* source, int n, int k, const int* row_order, void* packed) {
  Format format = static_cast<Format>(format_number);
  int64_t row_bytes = has_blocks ? midstream_row_bytes(format_number, k) : static_cast<int64_t>(k) * 4;
  std::memset(packed, 0, packed_bytes(format, n, k));
  for (int i = 0; i < n; ++i) {
    if (row_order[i] < 0) continue;  // the row stays zero
    const uint8_t* row = static_cast<const uint8_t*>(source) + row_order[i] * row_bytes;
    uint8_t* panel = static_cast<uint8_t*>(packed) + i / kPanel * panel_bytes(format, k);
    if (has_blocks) {
      pack_block_row(format, row, k, i % kPanel, panel);
    } else {
      pack_float_row(format, reinterpret_cast<const float*>(row), k, i % kPanel, panel);
    }
  }
}
