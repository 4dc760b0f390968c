// Operations on single rows: norms, rotary embedding, and the step from floats to the cache's element type.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "vec.h"

namespace midstream {

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// out[width] = x / rms(x) * weight. Whole vectors first, then the rest one by one: the order depends on width only.
inline void rms_norm_row(const float* x, const float* weight, int width, float eps, float* out) {
  int whole = width / kLanes * kLanes;
  F squares = zero();
  for (int i = 0; i < whole; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  float sum = sum_lanes(squares);
  for (int i = whole; i < width; ++i) sum += x[i] * x[i];
  float inverse = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
  for (int i = 0; i < whole; i += kLanes) store(out + i, mul(mul(load(x + i), set1(inverse)), load(weight + i)));
  for (int i = whole; i < width; ++i) out[i] = x[i] * inverse * weight[i];
}

// Turns the pairs (i, i + dim / 2) of one head in place; cos and sin have dim / 2 values.
inline void rotate_head(float* head, const float* cos, const float* sin, int dim) {
  int half = dim / 2;
  for (int i = 0; i < half; ++i) {
    float first = head[i], second = head[i + half];
    head[i] = first * cos[i] - second * sin[i];
    head[i + half] = second * cos[i] + first * sin[i];
  }
}

// out = x as integers up to most, times the scale that is returned; NaN for a row that has one.
template <class T> inline float quantize_head(const float* x, int dim, T most, T* out) {
  float largest = 0, total = 0;
  for (int d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(x[d])), total += x[d];
  float inverse = largest > 0 ? static_cast<float>(most) / largest : 0.0f;
  for (int d = 0; d < dim; ++d) out[d] = static_cast<T>(_mm_cvtss_si32(_mm_set_ss(x[d] * inverse)));
  return largest / static_cast<float>(most) + 0.0f * total;
}

// The place of the first of the highest of n numbers, or of the first NaN.
inline int find_highest(const float* x, int n) {
  int whole = n / kLanes * kLanes;
  float highest = x[0];
  if (whole) {
    F most = load(x);
    for (int i = kLanes; i < whole; i += kLanes) most = max(most, load(x + i));
    highest = max_lanes(most);
  }
  for (int i = whole; i < n; ++i) highest = std::max(highest, x[i]);
  // NaN is lost on the way up, but a sum keeps it.
  F sum = zero();
  for (int i = 0; i < whole; i += kLanes) sum = add(sum, mul(load(x + i), zero()));
  float rest = sum_lanes(sum);
  for (int i = whole; i < n; ++i) rest += x[i] * 0.0f;
  if (rest == rest) {
    for (int i = 0; i < n; ++i)
      if (x[i] == highest) return i;
  }
  int best = 0;
  for (int i = 0; i < n; ++i) {
    if (x[i] != x[i]) return i;
    if (x[i] > x[best]) best = i;
  }
  return best;
}

inline void convert(float from, float& to) { to = from; }
inline void convert(float from, uint16_t& to) { to = to_bf16(from); }

}  // namespace midstream
