#include "quantized_rows.h"

#include <algorithm>

#include "tiles.h"
#if defined(__aarch64__)
#include "vec_neon.h"
#else
#include "vec_avx2.h"
#endif

namespace midstream {
namespace {

#if defined(__aarch64__)
namespace eight = neon;  // vectors of 8 lanes, in every build
#else
namespace eight = avx2;
#endif

uint32_t sum_words(eight::I x) {
  uint32_t lanes[8], total = 0;
  eight::store_int(lanes, x);
  for (uint32_t lane : lanes) total += lane;
  return total;
}

#if defined(__aarch64__)

// The elements of a block.
struct Elements {
  int32_t values[kBlock];
  explicit Elements(const eight::I* q) {
    for (int i = 0; i < 4; ++i) eight::store_int(values + i * 8, q[i]);
  }
  int32_t operator[](int i) const { return values[i]; }
};

uint32_t pair(int32_t low, int32_t high) { return (static_cast<uint32_t>(low) & 0xffffu) | static_cast<uint32_t>(high) << 16; }

// Byte j of word i is element 8 j + i, or, without nibbles, 4 i + j.
void store_bytes(const eight::I* q, bool has_nibbles, uint32_t* words) {
  Elements elements(q);
  for (int i = 0; i < kBlock / 4; ++i) {
    words[i] = 0;
    for (int j = 0; j < 4; ++j) words[i] |= (static_cast<uint32_t>(elements[has_nibbles ? 8 * j + i : 4 * i + j]) & 255u) << 8 * j;
  }
}

void store_unsigned_bytes(const eight::I* q, bool has_nibbles, uint32_t* words) { store_bytes(q, has_nibbles, words); }

void store_halves(const eight::I* q, bool has_nibbles, uint32_t* words) {
  Elements elements(q);
  for (int i = 0; i < kBlock / 2; ++i) {
    int first = has_nibbles ? i : i / 2 * 4 + i % 2;
    words[i] = pair(elements[first], elements[first + (has_nibbles ? 16 : 2)]);
  }
}

// Words are not multiplied in pairs, and there are no tiles.
uint32_t negative_products(const uint32_t*) { return 0; }
void store_tile_row(const eight::I*, Input, bool, uint32_t*) {}
void split_floats(const float*, uint32_t*) {}

#else

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

void store_bytes(const __m256i* q, bool has_nibbles, uint32_t* words) {
  store_words(words, has_nibbles ? interleave(q) : in_order(q, true));
}

void store_unsigned_bytes(const __m256i* q, bool has_nibbles, uint32_t* words) {
  store_words(words, has_nibbles ? interleave(q) : in_order(q, false));
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

#endif

void store_split(const eight::I* q, bool has_nibbles, uint32_t* words) {
  eight::I high[4], low[4], high_sum = eight::set1_int(0), low_sum = high_sum;
  for (int i = 0; i < 4; ++i) {
    low[i] = kHasSignedDots ? eight::shift_right_signed<24>(eight::shift_left<24>(q[i])) : eight::bit_and(q[i], eight::set1_int(255));
    high[i] = eight::shift_right_signed<8>(kHasSignedDots ? eight::sub_int(q[i], low[i]) : q[i]);
    high_sum = eight::add_int(high_sum, high[i]);
    low_sum = eight::add_int(low_sum, low[i]);
  }
  store_bytes(high, has_nibbles, words);
  store_unsigned_bytes(low, has_nibbles, words + kBlock / 4);
  words[kBlock / 2] = sum_words(high_sum);
  words[kBlock / 2 + 1] = sum_words(low_sum);
}

#if defined(__AVX512F__) && !defined(MIDSTREAM_PAIR)

// Combines all lanes; the result is in every lane.
template <class Combine> __m512i combine_lanes(__m512i x, Combine combine) {
  x = combine(x, _mm512_shuffle_i64x2(x, x, 0x4e));
  x = combine(x, _mm512_shuffle_i64x2(x, x, 0xb1));
  x = combine(x, _mm512_shuffle_epi32(x, _MM_PERM_BADC));
  return combine(x, _mm512_shuffle_epi32(x, _MM_PERM_CDAB));
}
__m512i sum_of_lanes(__m512i x) { return combine_lanes(x, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }); }
__m512i highest_lane(__m512i x) { return combine_lanes(x, [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }); }

// Quantizes a row to halves for weights of four bits, like QuantizedRows::quantize, but a block at a time.
void quantize_halves(const QuantizedRows& rows, int index, const float* row, float most_level) {
  static_assert(kRowTile == 6);
  constexpr int kNumVectors = kBlock / 2 * kRowTile / 16;
  // Word w of the row goes to place w * kRowTile + place of the block's vectors.
  __m512i sources[kNumVectors];
  __mmask16 lanes[kNumVectors];
  int64_t first = static_cast<int64_t>(index / kRowTile) * rows.num_blocks;
  int place = index % kRowTile;
  auto lane = [](int i) { return static_cast<__mmask16>(1u << i); };
  for (int i = 0; i < kNumVectors; ++i) {
    alignas(64) int32_t words[16];
    lanes[i] = 0;
    for (int lane = 0; lane < 16; ++lane) {
      words[lane] = (i * 16 + lane) / kRowTile;
      lanes[i] |= static_cast<__mmask16>((i * 16 + lane) % kRowTile == place) << lane;
    }
    sources[i] = _mm512_load_si512(words);
  }
  // The scales of 16 blocks at a time.
  for (int start = 0; start < rows.num_blocks; start += 16) {
    int count = std::min(16, rows.num_blocks - start);
    __m512i largest_bits = _mm512_setzero_si512(), totals = largest_bits, products = largest_bits;
    alignas(64) float inverses[16];
    for (int b = 0; b < count; ++b) {
      const float* x = row + (start + b) * kBlock;
      // As integers, because then NaN is larger than any number.
      __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
      __m512i low = _mm512_and_si512(_mm512_loadu_si512(x), magnitude), high = _mm512_and_si512(_mm512_loadu_si512(x + 16), magnitude);
      largest_bits = _mm512_mask_mov_epi32(largest_bits, lane(b), highest_lane(_mm512_max_epi32(low, high)));
    }
    __m512 largest = _mm512_castsi512_ps(largest_bits), level = _mm512_set1_ps(most_level);
    __mmask16 is_positive = _mm512_cmp_ps_mask(largest, _mm512_setzero_ps(), _CMP_GT_OQ);
    _mm512_store_ps(inverses, _mm512_maskz_div_ps(is_positive, level, largest));
    // Integers cannot represent NaN and infinity, so the scale becomes NaN.
    __m512 scale = _mm512_add_ps(_mm512_div_ps(largest, level), _mm512_mul_ps(_mm512_setzero_ps(), largest));
    for (int b = 0; b < count; ++b) {
      const float* x = row + (start + b) * kBlock;
      __m512 inverse = _mm512_set1_ps(inverses[b]);
      __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), inverse));
      __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), inverse));
      __m512i words = _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16));
      uint32_t* out = rows.words + (first + start + b) * (kBlock / 2) * kRowTile;
      for (int i = 0; i < kNumVectors; ++i)
        _mm512_mask_storeu_epi32(out + i * 16, lanes[i], _mm512_permutexvar_epi32(sources[i], words));
      totals = _mm512_mask_mov_epi32(totals, lane(b), sum_of_lanes(_mm512_add_epi32(low, high)));
      if (rows.products) {
        __m512i both = _mm512_maskz_madd_epi16(0x5555, words, _mm512_srli_epi64(words, 32));
        products = _mm512_mask_sub_epi32(products, lane(b), products, sum_of_lanes(both));
      }
    }
    __mmask16 blocks = static_cast<__mmask16>((1u << count) - 1);
    __m512i places = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(kRowTile));
    int64_t at = (first + start) * kRowTile + place;
    _mm512_mask_i32scatter_ps(rows.scales + at, blocks, places, scale, 4);
    _mm512_mask_i32scatter_ps(rows.sums + at, blocks, places, _mm512_mul_ps(scale, _mm512_cvtepi32_ps(totals)), 4);
    if (rows.products) _mm512_mask_i32scatter_epi32(rows.products + at, blocks, places, products, 4);
  }
}

#endif

}  // namespace

int QuantizedRows::row_tile() const { return has_tiles ? kTileRows : kRowTile; }

void QuantizedRows::quantize(int index, const float* row, Format format) const {
  if (input == Input::kFloats) {
    uint32_t* tile = words + static_cast<int64_t>(index / kTileRows) * num_blocks * num_parts(input) * kTileRows * kBlock / 2;
    for (int b = 0; b < num_blocks; ++b)
      split_floats(row + b * kBlock, tile + (b * num_parts(input) * kTileRows + index % kTileRows) * kBlock / 2);
    return;
  }
  int row_tile = this->row_tile();
  int64_t first = static_cast<int64_t>(index / row_tile) * num_blocks;
  int place = index % row_tile, num_words = words_of_block(input);
  bool has_halves = input == Input::kHalves, has_nibbles = midstream::has_nibbles(format);
  float most_level = has_halves ? most_half(format) : 127.0f;
#if defined(__AVX512F__) && !defined(MIDSTREAM_PAIR)
  if (has_halves && has_nibbles && !has_tiles && !num_split) return quantize_halves(*this, index, row, most_level);
#endif
  eight::I magnitude = eight::set1_int(0x7fffffff);
  for (int b = 0; b < num_blocks; ++b) {
    eight::F x[4], most = eight::zero(), total = eight::zero();
    for (int i = 0; i < 4; ++i) {
      x[i] = eight::load(row + b * kBlock + i * 8);
      most = eight::max(most, eight::as_float(eight::bit_and(eight::as_int(x[i]), magnitude)));
      total = eight::add(total, x[i]);
    }
    float largest = eight::max_lanes(most);
    eight::F inverse = eight::set1(largest > 0 ? most_level / largest : 0.0f);
    eight::I q[4], sum = eight::set1_int(0);
    for (int i = 0; i < 4; ++i) {
      q[i] = eight::to_int(eight::mul(x[i], inverse));
      sum = eight::add_int(sum, q[i]);
    }
    if (has_tiles) {
      int64_t tile_words = num_parts(input) * kTileRows * kBlock / 2;
      store_tile_row(q, input, has_nibbles, words + (first + b) * tile_words + place * kBlock / 2);
    } else if (num_split) {
      int64_t tile = index / num_split;
      uint32_t block[kSplitWords], *out = words + (tile * num_blocks + b) * kSplitWords * num_split + index % num_split;
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
    float scale = largest / most_level + 0.0f * eight::sum_lanes(total);
    scales[(first + b) * row_tile + place] = scale;
    sums[(first + b) * row_tile + place] = scale * eight::sum_lanes(eight::to_float(sum));
  }
}

}  // namespace midstream
