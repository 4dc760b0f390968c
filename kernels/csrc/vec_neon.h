// Vectors of 8 floats made of two NEON halves, for ARMv8.2 with dot products; results are bit-identical to those of the
// AVX2 build.
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace midstream {
namespace neon {

struct F { float32x4_t a, b; };
struct I { int32x4_t a, b; };
constexpr int kLanes = 8;

inline F zero() { return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }
inline F set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, F x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
}
inline F add(F x, F y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline F sub(F x, F y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
inline F mul(F x, F y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline F div(F x, F y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }

struct Mask { uint32x4_t a, b; };
inline Mask less(F x, F y) { return {vcltq_f32(x.a, y.a), vcltq_f32(x.b, y.b)}; }
inline F select(Mask mask, F x, F y) { return {vbslq_f32(mask.a, x.a, y.a), vbslq_f32(mask.b, x.b, y.b)}; }
inline uint32_t bits(Mask mask) {
  const uint32x4_t lanes = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(mask.a, lanes)) | vaddvq_u32(vandq_u32(mask.b, lanes)) << 4;
}

// If y is NaN, the result is that NaN; FMAX would return any NaN.
inline F max(F x, F y) { return select(less(y, x), x, y); }
inline F min(F x, F y) { return select(less(x, y), x, y); }
inline F round(F x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b)}; }
inline F zero_where_less(F x, F bound, F y) { return select(less(x, bound), zero(), y); }
inline F where_less(F x, F bound, F y, F z) { return select(less(x, bound), y, z); }
// Bit i is set if lane i of x is at least that of the bound.
inline uint32_t reaching_lanes(F x, F bound) { return bits({vcgeq_f32(x.a, bound.a), vcgeq_f32(x.b, bound.b)}); }
// Bit i is set if lane i of x or y is NaN.
inline uint32_t unordered_lanes(F x, F y) {
  auto ordered = [](float32x4_t x, float32x4_t y) { return vandq_u32(vceqq_f32(x, x), vceqq_f32(y, y)); };
  return bits({vmvnq_u32(ordered(x.a, y.a)), vmvnq_u32(ordered(x.b, y.b))});
}

inline I load_int(const void* p) {
  return {vld1q_s32(static_cast<const int32_t*>(p)), vld1q_s32(static_cast<const int32_t*>(p) + 4)};
}
inline void store_int(void* p, I x) {
  vst1q_s32(static_cast<int32_t*>(p), x.a);
  vst1q_s32(static_cast<int32_t*>(p) + 4, x.b);
}
inline I set1_int(uint32_t x) { return {vdupq_n_s32(static_cast<int32_t>(x)), vdupq_n_s32(static_cast<int32_t>(x))}; }
inline I bit_and(I x, I y) { return {vandq_s32(x.a, y.a), vandq_s32(x.b, y.b)}; }
inline I bit_or(I x, I y) { return {vorrq_s32(x.a, y.a), vorrq_s32(x.b, y.b)}; }
inline I bit_xor(I x, I y) { return {veorq_s32(x.a, y.a), veorq_s32(x.b, y.b)}; }
inline I add_int(I x, I y) { return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b)}; }
inline I sub_int(I x, I y) { return {vsubq_s32(x.a, y.a), vsubq_s32(x.b, y.b)}; }
inline int16x8_t halves(int32x4_t x) { return vreinterpretq_s16_s32(x); }
inline int8x16_t bytes(int32x4_t x) { return vreinterpretq_s8_s32(x); }
inline int32x4_t words(int16x8_t x) { return vreinterpretq_s32_s16(x); }
inline int32x4_t words(int8x16_t x) { return vreinterpretq_s32_s8(x); }
inline int32x4_t words(uint32x4_t x) { return vreinterpretq_s32_u32(x); }
inline I add_halves(I x, I y) { return {words(vaddq_s16(halves(x.a), halves(y.a))), words(vaddq_s16(halves(x.b), halves(y.b)))}; }
template <int n> I shift_left(I x) { return {vshlq_n_s32(x.a, n), vshlq_n_s32(x.b, n)}; }
template <int n> int32x4_t shift_right(int32x4_t x) { return words(vshrq_n_u32(vreinterpretq_u32_s32(x), n)); }
template <int n> I shift_right(I x) { return {shift_right<n>(x.a), shift_right<n>(x.b)}; }
template <int n> int32x4_t shift_halves_right(int32x4_t x) {
  return vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(x), n));
}
template <int n> I shift_halves_right(I x) { return {shift_halves_right<n>(x.a), shift_halves_right<n>(x.b)}; }
template <int n> I shift_right_signed(I x) { return {vshrq_n_s32(x.a, n), vshrq_n_s32(x.b, n)}; }
// Makes the compiler keep a vector in a register instead of reading it again.
inline void keep(I&) {}
// Makes the compiler compute the vector before the following code.
inline void read_now(F&) {}
inline F to_float(I x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)}; }
inline I to_int(F x) { return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b)}; }
inline F as_float(I x) { return {vreinterpretq_f32_s32(x.a), vreinterpretq_f32_s32(x.b)}; }
inline I as_int(F x) { return {vreinterpretq_s32_f32(x.a), vreinterpretq_s32_f32(x.b)}; }
// Returns x times 2^n, for integer n such that the result is a normal number.
inline F times_power(F x, F n) { return as_float(add_int(as_int(x), shift_left<23>(to_int(n)))); }

inline F load_half(const uint16_t* p) {
  uint16x8_t x = vld1q_u16(p);
  auto convert = [](uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); };
  return {convert(vget_low_u16(x)), convert(vget_high_u16(x))};
}
inline F load_bf16(const uint16_t* p) {
  uint16x8_t x = vld1q_u16(p);
  auto convert = [](uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); };
  return {convert(vget_low_u16(x)), convert(vget_high_u16(x))};
}
inline F load_int16(const int16_t* p) {
  int16x8_t x = vld1q_s16(p);
  return to_float({vmovl_s16(vget_low_s16(x)), vmovl_s16(vget_high_s16(x))});
}
inline F load_int8(const int8_t* p) {
  int16x8_t x = vmovl_s8(vld1_s8(p));
  return to_float({vmovl_s16(vget_low_s16(x)), vmovl_s16(vget_high_s16(x))});
}
// Loads unsigned bytes.
inline I load_bytes(const uint8_t* p) {
  uint16x8_t x = vmovl_u8(vld1_u8(p));
  return {words(vmovl_u16(vget_low_u16(x))), words(vmovl_u16(vget_high_u16(x)))};
}

// Adds the products of the four bytes of each lane to the lane of the sum; u is unsigned, x is signed.
constexpr bool kHasByteDots = true;
inline int32x4_t dot_bytes(int32x4_t sum, int32x4_t u, int32x4_t x) {
  // u is 128 more than a signed byte, and 128 is twice 64.
  const int8x16_t half = vdupq_n_s8(64);
  sum = vdotq_s32(sum, veorq_s8(bytes(u), vdupq_n_s8(-128)), bytes(x));
  return vdotq_s32(vdotq_s32(sum, half, bytes(x)), half, bytes(x));
}
inline I dot_bytes(I sum, I u, I x) { return {dot_bytes(sum.a, u.a, x.a), dot_bytes(sum.b, u.b, x.b)}; }
// The same for signed bytes.
constexpr bool kHasSignedDots = true;
inline I dot_signed_bytes(I sum, I w, I x) {
  return {vdotq_s32(sum.a, bytes(w.a), bytes(x.a)), vdotq_s32(sum.b, bytes(w.b), bytes(x.b))};
}
// The same with the bytes of one word of x.
template <int word> I dot_signed_bytes(I sum, I w, int32x4_t x) {
  return {vdotq_laneq_s32(sum.a, bytes(w.a), bytes(x), word), vdotq_laneq_s32(sum.b, bytes(w.b), bytes(x), word)};
}
// The same for u of at most 15.
inline I dot_nibbles(I sum, I u, I x) { return dot_signed_bytes(sum, u, x); }
inline I finish_nibbles(I sum) { return sum; }
// Adds the products of the two signed halves of each lane to the lane of the sum.
inline int32x4_t dot_halves(int32x4_t sum, int32x4_t w, int32x4_t x) {
  int32x4_t low = vmull_s16(vget_low_s16(halves(w)), vget_low_s16(halves(x)));
  return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(halves(w), halves(x))));
}
inline I dot_halves(I sum, I w, I x) { return {dot_halves(sum.a, w.a, x.a), dot_halves(sum.b, w.b, x.b)}; }
inline void add_dot_halves(I& sum, const uint8_t* w, I x) { sum = dot_halves(sum, load_int(w), x); }
constexpr bool kHasHalfPairs = false;
// Returns the signed bytes 0 and 2, or 1 and 3, of each lane as its halves.
inline I even_bytes(I x) {
  auto even = [](int32x4_t x) { return words(vshrq_n_s16(vshlq_n_s16(halves(x), 8), 8)); };
  return {even(x.a), even(x.b)};
}
inline I odd_bytes(I x) { return {words(vshrq_n_s16(halves(x.a), 8)), words(vshrq_n_s16(halves(x.b), 8))}; }

// Converts bytes less than 16, each a float4 (E2M1), to integers of twice its value plus 12; bytes of at least 128 become 0.
inline int32x4_t mx4_bytes(int32x4_t x) {
  const int8x16_t table = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  return words(vqtbl1q_s8(table, vreinterpretq_u8_s32(x)));
}
inline I mx4_bytes(I x) { return {mx4_bytes(x.a), mx4_bytes(x.b)}; }
// Converts the low four bits of each half, a float4, to a signed integer of twice its value.
inline I mx4_halves(I x) {
  I codes = mx4_bytes(bit_or(bit_and(x, set1_int(0x000f000fu)), set1_int(0x80008000u)));
  return {words(vsubq_s16(halves(codes.a), vdupq_n_s16(12))), words(vsubq_s16(halves(codes.b), vdupq_n_s16(12)))};
}

// Used only in builds with tiles.
inline I nibbles_to_bf16(I x) { return x; }
inline I mx4_to_bf16(I x) { return x; }
inline I mx4_plus_12_to_bf16(I x) { return x; }

// Adds lane i to lane i + 4, then to i + 2, then to i + 1.
inline float sum_lanes(F x) {
  float32x4_t s = vaddq_f32(x.a, x.b);
  float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
  return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}
inline float max_lanes(F x) {
  float lanes[kLanes];
  store(lanes, x);
  auto most = [](float x, float y) { return x > y ? x : y; };
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] = most(lanes[i], lanes[i + n]);
  return lanes[0];
}

// Vectors of half as many doubles.
struct D { float64x2_t a, b; };
inline D zero_doubles() { return {vdupq_n_f64(0.0), vdupq_n_f64(0.0)}; }
inline D low_doubles(F x) { return {vcvt_f64_f32(vget_low_f32(x.a)), vcvt_high_f64_f32(x.a)}; }
inline D high_doubles(F x) { return {vcvt_f64_f32(vget_low_f32(x.b)), vcvt_high_f64_f32(x.b)}; }
inline D add(D x, D y) { return {vaddq_f64(x.a, y.a), vaddq_f64(x.b, y.b)}; }
inline double sum_lanes(D x) {
  float64x2_t s = vaddq_f64(x.a, x.b);
  return vgetq_lane_f64(s, 0) + vgetq_lane_f64(s, 1);
}

}  // namespace neon
}  // namespace midstream
