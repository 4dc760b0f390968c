// Vectors of 16 floats: the operations that differ between instruction sets, for AVX-512.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace midstream {
namespace avx512 {

using F = __m512;
using I = __m512i;
constexpr int kLanes = 16;

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// If b is NaN, the result is that NaN.
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F zero_where_less(F x, F bound, F y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), y);
}
inline F where_less(F x, F bound, F a, F b) { return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), a); }
// Bit i is set if lane i of x is at least that of the bound.
inline uint32_t reaching_lanes(F x, F bound) { return _mm512_cmp_ps_mask(x, bound, _CMP_GE_OQ); }
// Bit i is set if lane i of a or b is NaN.
inline uint32_t unordered_lanes(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
// Returns x times 2^n, for integer n such that the result is a normal number.
inline F times_power(F x, F n) { return _mm512_scalef_ps(x, n); }
inline F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F load_bf16(const uint16_t* p) {
  __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline F load_int16(const int16_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
inline F load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// Loads unsigned bytes.
inline I load_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline I set1_int(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline I load_int(const void* p) { return _mm512_loadu_si512(p); }
inline void store_int(void* p, I x) { _mm512_storeu_si512(p, x); }
inline I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
inline I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
inline I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
inline I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
inline I sub_int(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I add_halves(I a, I b) { return _mm512_add_epi16(a, b); }
template <int n> I shift_left(I a) { return _mm512_slli_epi32(a, n); }
template <int n> I shift_right(I a) { return _mm512_srli_epi32(a, n); }
// Makes the compiler keep a vector in a register instead of reading it again.
inline void keep(I& a) { asm("" : "+v"(a)); }
// Makes the compiler compute the vector before the following code.
inline void read_now(F& a) { asm volatile("" : "+v"(a)); }
template <int n> I shift_halves_right(I a) { return _mm512_srli_epi16(a, n); }
template <int n> I shift_right_signed(I a) { return _mm512_srai_epi32(a, n); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline I to_int(F a) { return _mm512_cvtps_epi32(a); }
inline F as_float(I a) { return _mm512_castsi512_ps(a); }
inline I as_int(F a) { return _mm512_castps_si512(a); }

// Adds the products of the four bytes of each lane to the lane of the sum; u is unsigned, x is signed.
constexpr bool kHasByteDots = true, kHasSignedDots = false;
inline I dot_bytes(I sum, I u, I x) { return _mm512_dpbusd_epi32(sum, u, x); }
inline I dot_nibbles(I sum, I u, I x) { return dot_bytes(sum, u, x); }
inline I finish_nibbles(I sum) { return sum; }
// Adds the products of the two signed halves of each lane to the lane of the sum.
inline I dot_halves(I sum, I w, I x) { return _mm512_dpwssd_epi32(sum, w, x); }
// Does the same with w in memory. In a loop that is not unrolled, GCC 12 copies and stores the sums of the intrinsic.
inline void add_dot_halves(I& sum, const uint8_t* w, I x) {
  asm("vpdpwssd %1, %2, %0" : "+v"(sum) : "m"(*reinterpret_cast<const __m512i_u*>(w)), "v"(x));
}
constexpr bool kHasHalfPairs = false;
// Returns the signed bytes 0 and 2, or 1 and 3, of each lane as its halves.
inline I even_bytes(I a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
inline I odd_bytes(I a) { return _mm512_srai_epi16(a, 8); }

// Converts the low four bits of each half to a bfloat16.
inline I nibbles_to_bf16(I a) {
  // The instruction uses five bits of an index, so the table is repeated.
  const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
  return _mm512_permutexvar_epi16(a, table);
}

// Converts the low four bits of each half, a float4 (E2M1), to a signed integer of twice its value.
inline I mx4_halves(I a) {
  const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
  return _mm512_permutexvar_epi16(a, table);
}
// Converts bytes less than 16 likewise, plus 12.
inline I mx4_bytes(I a) {
  const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  return _mm512_shuffle_epi8(table, a);
}
// Return the results of mx4_halves, and the same plus 12, as bfloat16.
inline I mx4_to_bf16(I a) {
  const __m512i table = _mm512_broadcast_i64x4(
      _mm256_setr_epi16(0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140, 0x0000, static_cast<short>(0xbf80), static_cast<short>(0xc000), static_cast<short>(0xc040),
                        static_cast<short>(0xc080), static_cast<short>(0xc0c0), static_cast<short>(0xc100), static_cast<short>(0xc140)));
  return _mm512_permutexvar_epi16(a, table);
}
inline I mx4_plus_12_to_bf16(I a) {
  const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(0x4140, 0x4150, 0x4160, 0x4170, 0x4180, 0x4190, 0x41a0, 0x41c0, 0x4140, 0x4130,
                                                                 0x4120, 0x4110, 0x4100, 0x40c0, 0x4080, 0x0000));
  return _mm512_permutexvar_epi16(a, table);
}

inline float sum_lanes(F x) { return _mm512_reduce_add_ps(x); }
inline float max_lanes(F x) { return _mm512_reduce_max_ps(x); }

// Vectors of half as many doubles.
using D = __m512d;
inline D zero_doubles() { return _mm512_setzero_pd(); }
inline D low_doubles(F x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
inline D high_doubles(F x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
inline D add(D a, D b) { return _mm512_add_pd(a, b); }
inline double sum_lanes(D x) { return _mm512_reduce_add_pd(x); }

}  // namespace avx512
}  // namespace midstream
