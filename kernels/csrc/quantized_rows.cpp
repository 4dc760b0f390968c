#include "quantized_rows.h"

#include "tiles.h"
#include "vec_avx2.h"

namespace midstream {
namespace {

// Byte j of word i is element 8 j + i.
__m256i interleave(const __m256i* q) {
  __m256i byte = _mm256_set1_epi32(255);
  __m256i low = _mm256_or_si256(_mm256_and_si256(q[0], byte), _mm256_slli_epi32(_mm256_and_si256(q[1], byte), 8));
  __m256i high = _mm256_or_si256(_mm256_slli_epi32(_mm256_and_si256(q[2], byte), 16), _mm256_slli_epi32(q[3], 24));
  return _mm256_or_si256(low, high);
}

// Byte i is element i.
__m256i in_order(const __m256i* q, bool is_signed) {
  __m256i low = _mm256_packs_epi32(q[0], q[1]), high = _mm256_packs_epi32(q[2], q[3]);
  __m256i bytes = is_signed ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

__m256i pair(__m256i low, __m256i high) {
  return _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(high, 16));
}

// Returns, in the low half of 128-bit lane i, two words: elements 4 i and 4 i + 2, then 4 i + 1 and 4 i + 3.
__m256i pair_alternate(__m256i q) { return pair(q, _mm256_shuffle_epi32(q, 0x0e)); }

void store_words(uint32_t* words, __m256i value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), value); }

void store_bytes(const __m256i* q, bool has_nibbles, uint32_t* words, bool is_signed = true) {
  store_words(words, has_nibbles ? interleave(q) : in_order(q, is_signed));
}

uint32_t sum_words(__m256i x) {
  uint32_t lanes[8], total = 0;
  store_words(lanes, x);
  for (uint32_t lane : lanes) total += lane;
  return total;
}

void store_split(const __m256i* q, bool has_nibbles, uint32_t* words) {
  __m256i high[4], low[4], high_sum = _mm256_setzero_si256(), low_sum = high_sum;
  for (int i = 0; i < 4; ++i) {
    high[i] = _mm256_srai_epi32(q[i], 8);
    low[i] = _mm256_and_si256(q[i], _mm256_set1_epi32(255));
    high_sum = _mm256_add_epi32(high_sum, high[i]);
    low_sum = _mm256_add_epi32(low_sum, low[i]);
  }
  store_bytes(high, has_nibbles, words);
  store_bytes(low, has_nibbles, words + kBlock / 4, false);
  words[kBlock / 2] = sum_words(high_sum);
  words[kBlock / 2 + 1] = sum_words(low_sum);
}

// Returns minus the sum of the products of a block's words 2 i and 2 i + 1, as pairs of halves, modulo 2^32.
uint32_t negative_products(const uint32_t* words) {
  __m256i sum = _mm256_setzero_si256();
  for (int i = 0; i < kBlock / 2; i += 8) {
    __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + i));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x, _mm256_srli_epi64(x, 32)));
  }
  return 0u - sum_words(_mm256_blend_epi32(_mm256_setzero_si256(), sum, 0x55));
}

void store_halves(const __m256i* q, bool has_nibbles, uint32_t* words) {
  for (int i = 0; i < 2; ++i) {
    __m256i near = _mm256_unpacklo_epi64(pair_alternate(q[2 * i]), pair_alternate(q[2 * i + 1]));
    store_words(words + i * 8, has_nibbles ? pair(q[i], q[i + 2]) : _mm256_permute4x64_epi64(near, 0xd8));
  }
}

// Stores the upper halves of floats.
void store_pairs(const __m256* x, bool has_nibbles, uint32_t* words) {
  for (int i = 0; i < 2; ++i) {
    __m256 low = has_nibbles ? x[i] : _mm256_shuffle_ps(x[2 * i], x[2 * i + 1], 0x88);
    __m256 high = has_nibbles ? x[i + 2] : _mm256_shuffle_ps(x[2 * i], x[2 * i + 1], 0xdd);
    __m256i words_of_low = _mm256_srli_epi32(_mm256_castps_si256(low), 16);
    __m256i pairs = _mm256_or_si256(words_of_low, _mm256_and_si256(_mm256_castps_si256(high), _mm256_set1_epi32(0xffff0000)));
    store_words(words + i * 8, has_nibbles ? pairs : _mm256_permute4x64_epi64(pairs, 0xd8));
  }
}

// Stores integers with at most eight significant bits as bfloat16.
void store_bf16(const __m256i* q, bool has_nibbles, uint32_t* words) {
  __m256 x[4];
  for (int i = 0; i < 4; ++i) x[i] = _mm256_cvtepi32_ps(q[i]);
  store_pairs(x, has_nibbles, words);
}

// Stores one row of a block of a tile; for halves, the low bytes are stored in the same row of the next tile.
void store_tile_row(const __m256i* q, Input input, bool has_nibbles, uint32_t* words) {
  if (input == Input::kBytes) return store_bf16(q, has_nibbles, words);
  __m256i high[4], low[4], byte = _mm256_set1_epi32(255);
  for (int i = 0; i < 4; ++i) {
    high[i] = _mm256_andnot_si256(byte, q[i]);
    low[i] = _mm256_and_si256(byte, q[i]);
  }
  store_bf16(high, has_nibbles, words);
  store_bf16(low, has_nibbles, words + kTileRows * kBlock / 2);
}

// Splits each float of a block into a sum of three bfloat16s, which is exact for its 24 bits.
void split_floats(const float* row, uint32_t* words) {
  __m256 x[4], upper = _mm256_castsi256_ps(_mm256_set1_epi32(0xffff0000));
  for (int i = 0; i < 4; ++i) x[i] = _mm256_loadu_ps(row + i * 8);
  for (int part = 0; part < num_parts(Input::kFloats); ++part) {
    __m256 parts[4];
    for (int i = 0; i < 4; ++i) {
      parts[i] = _mm256_and_ps(x[i], upper);
      x[i] = _mm256_sub_ps(x[i], parts[i]);
    }
    store_pairs(parts, false, words + part * kTileRows * kBlock / 2);
  }
}

}  // namespace

void QuantizedRows::quantize(int index, const float* row, Format format) const {
  if (input == Input::kFloats) {
    uint32_t* tile = words + static_cast<int64_t>(index / kTileRows) * num_blocks * num_parts(input) * kTileRows * kBlock / 2;
    for (int b = 0; b < num_blocks; ++b)
      split_floats(row + b * kBlock, tile + (b * num_parts(input) * kTileRows + index % kTileRows) * kBlock / 2);
    return;
  }
  int row_tile = has_tiles ? kTileRows : kRowTile;
  int64_t first = static_cast<int64_t>(index / row_tile) * num_blocks;
  int place = index % row_tile, num_words = words_of_block(input);
  bool has_halves = input == Input::kHalves, has_nibbles = midstream::has_nibbles(format);
  float most_level = has_halves ? most_half(format) : 127.0f;
  __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  for (int b = 0; b < num_blocks; ++b) {
    __m256 x[4], most = _mm256_setzero_ps(), total = _mm256_setzero_ps();
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm256_loadu_ps(row + b * kBlock + i * 8);
      most = _mm256_max_ps(most, _mm256_and_ps(x[i], magnitude));
      total = _mm256_add_ps(total, x[i]);
    }
    float largest = avx2::max_lanes(most);
    __m256 inverse = _mm256_set1_ps(largest > 0 ? most_level / largest : 0.0f);
    __m256i q[4], sum = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
      q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], inverse));
      sum = _mm256_add_epi32(sum, q[i]);
    }
    if (has_tiles) {
      int64_t tile_words = num_parts(input) * kTileRows * kBlock / 2;
      store_tile_row(q, input, has_nibbles, words + (first + b) * tile_words + place * kBlock / 2);
    } else if (num_split) {
      uint32_t block[kSplitWords], *out = words + b * kSplitWords * num_split + place;
      store_split(q, has_nibbles, block);
      for (int i = 0; i < kSplitWords; ++i) out[i * num_split] = block[i];
    } else {
      uint32_t block[kBlock / 2];
      has_halves ? store_halves(q, has_nibbles, block) : store_bytes(q, has_nibbles, block);
      uint32_t* out = words + (first + b) * num_words * kRowTile + place;
      for (int i = 0; i < num_words; ++i) out[i * kRowTile] = block[i];
      if (products) products[(first + b) * row_tile + place] = negative_products(block);
    }
    // The maximum ignores NaN, and integers cannot represent it, so the scale becomes NaN.
    float scale = largest / most_level + 0.0f * avx2::sum_lanes(total);
    scales[(first + b) * row_tile + place] = scale;
    sums[(first + b) * row_tile + place] = scale * avx2::sum_lanes(_mm256_cvtepi32_ps(sum));
  }
}

}  // namespace midstream
