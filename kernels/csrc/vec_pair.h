// Vectors of 16 floats made of two AVX2 halves, so that the 16-lane code can be tested on any AVX2 machine.
#pragma once
#include "vec_avx2.h"

namespace midstream {
namespace pair {

struct F { __m256 a, b; };
struct I { __m256i a, b; };
constexpr int kLanes = 16;

inline F zero() { return {avx2::zero(), avx2::zero()}; }
inline F set1(float x) { return {avx2::set1(x), avx2::set1(x)}; }
inline F load(const float* p) { return {avx2::load(p), avx2::load(p + 8)}; }
inline void store(float* p, F x) { avx2::store(p, x.a); avx2::store(p + 8, x.b); }
inline F add(F x, F y) { return {avx2::add(x.a, y.a), avx2::add(x.b, y.b)}; }
inline F sub(F x, F y) { return {avx2::sub(x.a, y.a), avx2::sub(x.b, y.b)}; }
inline F mul(F x, F y) { return {avx2::mul(x.a, y.a), avx2::mul(x.b, y.b)}; }
inline F div(F x, F y) { return {avx2::div(x.a, y.a), avx2::div(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {avx2::fma(x.a, y.a, z.a), avx2::fma(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {avx2::max(x.a, y.a), avx2::max(x.b, y.b)}; }
inline F min(F x, F y) { return {avx2::min(x.a, y.a), avx2::min(x.b, y.b)}; }
inline F round(F x) { return {avx2::round(x.a), avx2::round(x.b)}; }
inline F zero_where_less(F x, F bound, F y) {
  return {avx2::zero_where_less(x.a, bound.a, y.a), avx2::zero_where_less(x.b, bound.b, y.b)};
}
inline F where_less(F x, F bound, F y, F z) {
  return {avx2::where_less(x.a, bound.a, y.a, z.a), avx2::where_less(x.b, bound.b, y.b, z.b)};
}
inline uint32_t reaching_lanes(F x, F bound) {
  return avx2::reaching_lanes(x.a, bound.a) | avx2::reaching_lanes(x.b, bound.b) << 8;
}
inline uint32_t unordered_lanes(F x, F y) {
  return avx2::unordered_lanes(x.a, y.a) | avx2::unordered_lanes(x.b, y.b) << 8;
}
inline F times_power(F x, F n) { return {avx2::times_power(x.a, n.a), avx2::times_power(x.b, n.b)}; }
inline F load_half(const uint16_t* p) { return {avx2::load_half(p), avx2::load_half(p + 8)}; }
inline F load_bf16(const uint16_t* p) { return {avx2::load_bf16(p), avx2::load_bf16(p + 8)}; }
inline F load_int16(const int16_t* p) { return {avx2::load_int16(p), avx2::load_int16(p + 8)}; }
inline F load_int8(const int8_t* p) { return {avx2::load_int8(p), avx2::load_int8(p + 8)}; }

inline I load_bytes(const uint8_t* p) { return {avx2::load_bytes(p), avx2::load_bytes(p + 8)}; }
inline I set1_int(uint32_t x) { return {avx2::set1_int(x), avx2::set1_int(x)}; }
inline I load_int(const void* p) { return {avx2::load_int(p), avx2::load_int(static_cast<const char*>(p) + 32)}; }
inline void store_int(void* p, I x) {
  avx2::store_int(p, x.a);
  avx2::store_int(static_cast<char*>(p) + 32, x.b);
}
inline I bit_and(I x, I y) { return {avx2::bit_and(x.a, y.a), avx2::bit_and(x.b, y.b)}; }
inline I bit_or(I x, I y) { return {avx2::bit_or(x.a, y.a), avx2::bit_or(x.b, y.b)}; }
inline I bit_xor(I x, I y) { return {avx2::bit_xor(x.a, y.a), avx2::bit_xor(x.b, y.b)}; }
inline I add_int(I x, I y) { return {avx2::add_int(x.a, y.a), avx2::add_int(x.b, y.b)}; }
inline I sub_int(I x, I y) { return {avx2::sub_int(x.a, y.a), avx2::sub_int(x.b, y.b)}; }
inline I add_halves(I x, I y) { return {avx2::add_halves(x.a, y.a), avx2::add_halves(x.b, y.b)}; }
template <int n> I shift_left(I x) { return {avx2::shift_left<n>(x.a), avx2::shift_left<n>(x.b)}; }
template <int n> I shift_right(I x) { return {avx2::shift_right<n>(x.a), avx2::shift_right<n>(x.b)}; }
inline void keep(I&) {}
// Makes the compiler compute the vector before the following code.
inline void read_now(F&) {}
template <int n> I shift_halves_right(I x) { return {avx2::shift_halves_right<n>(x.a), avx2::shift_halves_right<n>(x.b)}; }
template <int n> I shift_right_signed(I x) {
  return {avx2::shift_right_signed<n>(x.a), avx2::shift_right_signed<n>(x.b)};
}
inline F to_float(I x) { return {avx2::to_float(x.a), avx2::to_float(x.b)}; }
inline I to_int(F x) { return {avx2::to_int(x.a), avx2::to_int(x.b)}; }
inline F as_float(I x) { return {avx2::as_float(x.a), avx2::as_float(x.b)}; }
inline I as_int(F x) { return {avx2::as_int(x.a), avx2::as_int(x.b)}; }

inline I dot_nibbles(I s, I u, I x) { return {avx2::dot_nibbles(s.a, u.a, x.a), avx2::dot_nibbles(s.b, u.b, x.b)}; }
inline I finish_nibbles(I s) { return {avx2::finish_nibbles(s.a), avx2::finish_nibbles(s.b)}; }
inline I dot_halves(I s, I w, I x) { return {avx2::dot_halves(s.a, w.a, x.a), avx2::dot_halves(s.b, w.b, x.b)}; }
inline void add_dot_halves(I& sum, const uint8_t* w, I x) { sum = dot_halves(sum, load_int(w), x); }
constexpr bool kHasHalfPairs = false, kHasSignedDots = false;
inline I even_bytes(I x) { return {avx2::even_bytes(x.a), avx2::even_bytes(x.b)}; }
inline I odd_bytes(I x) { return {avx2::odd_bytes(x.a), avx2::odd_bytes(x.b)}; }
constexpr bool kHasByteDots = true;
inline __m256i dot_bytes(__m256i sum, __m256i u, __m256i x) {
  __m256i low = _mm256_set1_epi16(255), ones = _mm256_set1_epi16(1);
  __m256i even = _mm256_mullo_epi16(_mm256_and_si256(u, low), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  __m256i odd = _mm256_mullo_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(x, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, ones), _mm256_madd_epi16(odd, ones)));
}
inline I dot_bytes(I s, I u, I x) { return {dot_bytes(s.a, u.a, x.a), dot_bytes(s.b, u.b, x.b)}; }

inline __m256i nibbles_to_bf16(__m256i x) {
  auto half = [](__m256i q) { return _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_and_si256(q, _mm256_set1_epi32(15)))); };
  return _mm256_or_si256(_mm256_srli_epi32(half(x), 16), half(_mm256_srli_epi32(x, 16)));
}
inline I nibbles_to_bf16(I x) { return {nibbles_to_bf16(x.a), nibbles_to_bf16(x.b)}; }

inline I mx4_bytes(I x) { return {avx2::mx4_bytes(x.a), avx2::mx4_bytes(x.b)}; }
inline I mx4_halves(I x) { return {avx2::mx4_halves(x.a), avx2::mx4_halves(x.b)}; }
inline __m256i mx4_to_bf16(__m256i x, int added) {
  __m256i halves = _mm256_add_epi16(avx2::mx4_halves(x), _mm256_set1_epi16(static_cast<short>(added)));
  auto high = [](__m256i q) { return _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_srai_epi32(q, 16))); };
  return _mm256_or_si256(_mm256_srli_epi32(high(_mm256_slli_epi32(halves, 16)), 16), high(halves));
}
inline I mx4_to_bf16(I x) { return {mx4_to_bf16(x.a, 0), mx4_to_bf16(x.b, 0)}; }
inline I mx4_plus_12_to_bf16(I x) { return {mx4_to_bf16(x.a, 12), mx4_to_bf16(x.b, 12)}; }

inline float sum_lanes(F x) { return avx2::sum_lanes(avx2::add(x.a, x.b)); }
inline float max_lanes(F x) { return avx2::max_lanes(avx2::max(x.a, x.b)); }

struct D { __m256d a, b; };
inline D zero_doubles() { return {avx2::zero_doubles(), avx2::zero_doubles()}; }
inline D low_doubles(F x) { return {avx2::low_doubles(x.a), avx2::high_doubles(x.a)}; }
inline D high_doubles(F x) { return {avx2::low_doubles(x.b), avx2::high_doubles(x.b)}; }
inline D add(D x, D y) { return {avx2::add(x.a, y.a), avx2::add(x.b, y.b)}; }
inline double sum_lanes(D x) { return avx2::sum_lanes(avx2::add(x.a, x.b)); }

}  // namespace pair
}  // namespace midstream
