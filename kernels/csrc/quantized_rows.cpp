#include "quantized_rows.h"

#include "vec_avx2.h"

namespace midstream {
namespace {

// Byte j of word i is number 8 j + i.
__m256i interleave(const __m256i* q) {
  __m256i byte = _mm256_set1_epi32(255);
  __m256i low = _mm256_or_si256(_mm256_and_si256(q[0], byte), _mm256_slli_epi32(_mm256_and_si256(q[1], byte), 8));
  __m256i high = _mm256_or_si256(_mm256_slli_epi32(_mm256_and_si256(q[2], byte), 16), _mm256_slli_epi32(q[3], 24));
  return _mm256_or_si256(low, high);
}

// Byte i is number i.
__m256i in_order(const __m256i* q) {
  __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

}  // namespace

void QuantizedRows::quantize(int index, const float* row, bool is_q4) const {
  int64_t first = static_cast<int64_t>(index) * num_blocks;
  __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  for (int b = 0; b < num_blocks; ++b) {
    __m256 x[4], most = _mm256_setzero_ps(), total = _mm256_setzero_ps();
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm256_loadu_ps(row + b * kBlock + i * 8);
      most = _mm256_max_ps(most, _mm256_and_ps(x[i], magnitude));
      total = _mm256_add_ps(total, x[i]);
    }
    float largest = avx2::max_lanes(most);
    __m256 inverse = _mm256_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
    __m256i q[4], sum = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
      q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], inverse));
      sum = _mm256_add_epi32(sum, q[i]);
    }
    __m256i packed = is_q4 ? interleave(q) : in_order(q);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(&words[(first + b) * 8]), packed);
    // The maximum overlooks a NaN, and bytes cannot hold one: the scale carries it on.
    float scale = largest / 127.0f + 0.0f * avx2::sum_lanes(total);
    scales[first + b] = scale;
    sums[first + b] = scale * avx2::sum_lanes(_mm256_cvtepi32_ps(sum));
  }
}

}  // namespace midstream
