// The vector type of this build, and functions that are the same for every width.
#pragma once
#include <cmath>

#if defined(MIDSTREAM_PAIR)
#include "vec_pair.h"
namespace midstream { using namespace pair; }
#elif defined(__AVX512F__)
#include "vec_avx512.h"
namespace midstream { using namespace avx512; }
#elif defined(__aarch64__)
#include "vec_neon.h"
namespace midstream { using namespace neon; }
#else
#include "vec_avx2.h"
namespace midstream { using namespace avx2; }
#endif

namespace midstream {

constexpr int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// Returns e^x within 2 ulp: exactly 1 at 0, exactly 0 below -87.3 (including -inf), and NaN for NaN.
inline F exp(F x) {
  F clamped = min(set1(88.0f), max(set1(-87.3365478515625f), x));
  F n = round(mul(clamped, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = fma(set1(1.9875691500e-4f), r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), set1(1.0f));
  F power = as_float(shift_left<23>(add_int(to_int(n), set1_int(127))));
  return zero_where_less(x, set1(-87.3365478515625f), mul(p, power));
}

// Returns 2^x within 3 ulp for x up to 127: exactly 1 at 0, exactly 0 below -126 (including -inf), and NaN for NaN.
inline F exp2(F x) {
  F n = round(x);
  F r = sub(x, n);
  F p = fma(set1(1.326472731307149e-3f), r, set1(9.671512991189957e-3f));
  p = fma(p, r, set1(5.550733581185341e-2f));
  p = fma(p, r, set1(0.24022242426872253f));
  p = fma(p, r, set1(0.6931470036506653f));
  p = fma(p, r, set1(1.0f));
  return zero_where_less(x, set1(-126.0f), times_power(p, n));
}

inline F silu(F x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

}  // namespace midstream
