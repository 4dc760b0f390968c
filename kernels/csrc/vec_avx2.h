// Vectors of 8 floats: the operations that differ between instruction sets, for AVX2 + FMA + F16C.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace midstream {
namespace avx2 {

using F = __m256;
using I = __m256i;
constexpr int kLanes = 8;

inline F zero() { return _mm256_setzero_ps(); }
inline F set1(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
// If b is NaN, the result is that NaN.
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F zero_where_less(F x, F bound, F y) { return _mm256_andnot_ps(_mm256_cmp_ps(x, bound, _CMP_LT_OQ), y); }
inline F where_less(F x, F bound, F a, F b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, bound, _CMP_LT_OQ)); }
// Bit i is set if lane i of x is at least that of the bound.
inline uint32_t reaching_lanes(F x, F bound) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, bound, _CMP_GE_OQ)));
}
// Bit i is set if lane i of a or b is NaN.
inline uint32_t unordered_lanes(F a, F b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)));
}
// Returns x times 2^n, for integer n such that the result is a normal number.
inline F times_power(F x, F n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
inline F load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline F load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline F load_int16(const int16_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline F load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Loads unsigned bytes.
inline I load_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline I set1_int(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline I load_int(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_int(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
inline I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
inline I bit_xor(I a, I b) { return _mm256_xor_si256(a, b); }
inline I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
inline I sub_int(I a, I b) { return _mm256_sub_epi32(a, b); }
inline I add_halves(I a, I b) { return _mm256_add_epi16(a, b); }
template <int n> I shift_left(I a) { return _mm256_slli_epi32(a, n); }
template <int n> I shift_right(I a) { return _mm256_srli_epi32(a, n); }
// Makes the compiler keep a vector in a register instead of reading it again.
inline void keep(I&) {}
// Makes the compiler compute the vector before the following code.
inline void read_now(F& a) { asm volatile("" : "+x"(a)); }
template <int n> I shift_halves_right(I a) { return _mm256_srli_epi16(a, n); }
template <int n> I shift_right_signed(I a) { return _mm256_srai_epi32(a, n); }
inline F to_float(I a) { return _mm256_cvtepi32_ps(a); }
inline I to_int(F a) { return _mm256_cvtps_epi32(a); }
inline F as_float(I a) { return _mm256_castsi256_ps(a); }
inline I as_int(F a) { return _mm256_castps_si256(a); }

// Whether bytes are multiplied as signed ones only.
constexpr bool kHasSignedDots = false;
#ifdef __AVXVNNI__
// Adds the products of the four bytes of each lane to the lane of the sum; u is unsigned, x is signed.
constexpr bool kHasByteDots = true;
inline I dot_bytes(I sum, I u, I x) { return _mm256_dpbusd_avx_epi32(sum, u, x); }
inline I dot_nibbles(I sum, I u, I x) { return dot_bytes(sum, u, x); }
inline I finish_nibbles(I sum) { return sum; }
// Adds the products of the two signed halves of each lane to the lane of the sum.
inline I dot_halves(I sum, I w, I x) { return _mm256_dpwssd_avx_epi32(sum, w, x); }
constexpr bool kHasHalfPairs = false;
#else
// Adds the products of the four bytes of each lane to the 16-bit halves of the sum; u is unsigned and at most 15, x is signed.
// The halves cannot overflow in eight additions that start at zero; finish_nibbles then adds them up to the lane's 32-bit sum.
inline I dot_nibbles(I sum, I u, I x) {
  // If intrinsics were used, GCC would reorder them so that the sums of a block no longer fit in the registers.
  I products;
  asm("vpmaddubsw %2, %3, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(x), "x"(u));
  return sum;
}
inline I finish_nibbles(I sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
// Adds the products of the two signed halves of each lane to the lane of the sum.
inline I dot_halves(I sum, I w, I x) {
  I products;
  asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(x), "x"(w));
  return sum;
}
// Does the same for two rows, x and y, and two vectors w: four products, then four additions. If they alternated, additions would
// occupy the ports that products need.
constexpr bool kHasHalfPairs = true;
inline void dot_half_pairs(I (&x_sums)[2], I (&y_sums)[2], const I (&w)[2], I x, I y) {
  I a, b, c, d;
  asm("vpmaddwd %10, %8, %4\n\tvpmaddwd %10, %9, %5\n\tvpmaddwd %11, %8, %6\n\tvpmaddwd %11, %9, %7\n\t"
      "vpaddd %4, %0, %0\n\tvpaddd %5, %1, %1\n\tvpaddd %6, %2, %2\n\tvpaddd %7, %3, %3"
      : "+x"(x_sums[0]), "+x"(x_sums[1]), "+x"(y_sums[0]), "+x"(y_sums[1]), "=&x"(a), "=&x"(b), "=&x"(c), "=&x"(d)
      : "x"(w[0]), "x"(w[1]), "x"(x), "x"(y));
}
// Dot products of bytes with u up to 255 take too many instructions to be worthwhile here.
constexpr bool kHasByteDots = false;
inline I dot_bytes(I sum, I, I) { return sum; }
#endif
inline void add_dot_halves(I& sum, const uint8_t* w, I x) { sum = dot_halves(sum, load_int(w), x); }
// Returns the signed bytes 0 and 2, or 1 and 3, of each lane as its halves.
inline I even_bytes(I a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
inline I odd_bytes(I a) { return _mm256_srai_epi16(a, 8); }

// Converts bytes less than 16, each a float4 (E2M1), to integers of twice its value plus 12; bytes of at least 128 become 0.
inline I mx4_bytes(I a) {
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), a);
}
// Converts the low four bits of each half, a float4, to a signed integer of twice its value.
inline I mx4_halves(I a) {
  I codes = bit_or(bit_and(a, set1_int(0x000f000fu)), set1_int(0x80008000u));
  return _mm256_sub_epi16(mx4_bytes(codes), _mm256_set1_epi16(12));
}

// Used only in builds with tiles.
inline I nibbles_to_bf16(I a) { return a; }
inline I mx4_to_bf16(I a) { return a; }
inline I mx4_plus_12_to_bf16(I a) { return a; }

// Adds lane i to lane i + 4, then to i + 2, then to i + 1.
inline float sum_lanes(F x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float max_lanes(F x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

// Vectors of half as many doubles.
using D = __m256d;
inline D zero_doubles() { return _mm256_setzero_pd(); }
inline D low_doubles(F x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
inline D high_doubles(F x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
inline D add(D a, D b) { return _mm256_add_pd(a, b); }
inline double sum_lanes(D x) {
  __m128d s = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
  return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
}

}  // namespace avx2
}  // namespace midstream
