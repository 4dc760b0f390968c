// Operations on single rows: norms, activations, rotary embedding, and conversion to the cache's element type.
#pragma once
#include <algorithm>
#include <bit>
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

// out[width] = x / rms(x) * weight. Whole vectors are summed first, then the remaining elements one by one, so the order depends
// only on the width.
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

// out[width] = (x - mean) / deviation * weight. The order of summation depends only on the width.
inline void layer_norm_row(const float* x, const float* weight, int width, float eps, float* out) {
  int whole = width / kLanes * kLanes;
  F total = zero();
  for (int i = 0; i < whole; i += kLanes) total = add(load(x + i), total);
  float mean = sum_lanes(total);
  for (int i = whole; i < width; ++i) mean += x[i];
  mean /= static_cast<float>(width);
  F squares = zero();
  for (int i = 0; i < whole; i += kLanes) {
    F centered = sub(load(x + i), set1(mean));
    squares = fma(centered, centered, squares);
  }
  float sum = sum_lanes(squares);
  for (int i = whole; i < width; ++i) sum += (x[i] - mean) * (x[i] - mean);
  float inverse = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
  for (int i = 0; i < width; ++i) out[i] = (x[i] - mean) * inverse * weight[i];
}

// Rounds to the nearest multiple of `scale` by a float8 (e4m3), or by an int8 if kind is 2.
inline void round_row(float* x, int width, int kind, float scale) {
  for (int i = 0; i < width; ++i) {
    float step = x[i] / scale;
    if (kind == 2) {
      step = std::nearbyint(std::clamp(step, -128.0f, 127.0f));
    } else {
      step = std::clamp(step, -448.0f, 448.0f);
      // Below 2^-6 the distance between values is 2^-9; above it, values have three bits of mantissa.
      if (std::fabs(step) < 0x1p-6f) {
        step = std::nearbyint(step * 0x1p9f) * 0x1p-9f;
      } else {
        uint32_t bits = std::bit_cast<uint32_t>(step);
        bits += 0x7FFFF + (bits >> 20 & 1);
        step = std::bit_cast<float>(bits & ~0xFFFFFu);
      }
    }
    x[i] = step * scale;
  }
}

// Divides x by its root mean square, in place.
inline void unit_row(float* x, int width, float eps) {
  float sum = 0;
  for (int i = 0; i < width; ++i) sum += x[i] * x[i];
  float inverse = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
  for (int i = 0; i < width; ++i) x[i] *= inverse;
}

// Computes tanh with vector operations, so that the bits do not depend on the position in a row.
inline F tanh(F x) {
  F sign = sub(zero(), set1(1.0f)), size = max(x, mul(x, sign));
  F shrunk = exp(mul(size, set1(-2.0f)));
  F y = div(sub(set1(1.0f), shrunk), add(set1(1.0f), shrunk));
  return as_float(bit_or(as_int(y), bit_and(as_int(x), set1_int(0x80000000u))));
}

// x[i] = cap * tanh(x[i] / cap), for n elements.
inline void bend_row(float* x, int n, float cap) {
  for (int i = 0; i < n; i += kLanes) {
    float part[kLanes] = {};
    int count = std::min(kLanes, n - i);
    std::copy_n(x + i, count, part);
    store(part, mul(set1(cap), tanh(mul(load(part), set1(1.0f / cap)))));
    std::copy_n(part, count, x + i);
  }
}

// out[width] = activation(gate[width]) * up[width]. Activations are numbered as in api.h.
inline void activate_row(int activation, const float* gate, const float* up, int width, float* out) {
  for (int i = 0; i < width; i += kLanes) {
    float gates[kLanes] = {}, ups[kLanes] = {};
    int count = std::min(kLanes, width - i);
    std::copy_n(gate + i, count, gates);
    std::copy_n(up + i, count, ups);
    F g = load(gates), u = load(ups);
    switch (activation) {
      case 0: g = silu(g); break;
      case 1: {
        F inner = mul(set1(0.7978845608028654f), fma(mul(mul(g, g), g), set1(0.044715f), g));
        g = mul(mul(set1(0.5f), g), add(set1(1.0f), tanh(inner)));
        break;
      }
      case 2:
        for (int j = 0; j < count; ++j) gates[j] = 0.5f * gates[j] * (1.0f + std::erf(gates[j] * 0.70710678f));
        g = load(gates);
        break;
      case 3: g = max(zero(), g); break;
      default: {
        g = min(set1(7.0f), g);
        g = div(g, add(set1(1.0f), exp(mul(g, set1(-1.702f)))));
        u = add(min(set1(7.0f), max(set1(-7.0f), u)), set1(1.0f));
      }
    }
    store(gates, mul(g, u));
    std::copy_n(gates, count, out + i);
  }
}

// Rotates the first `dim` elements of one head in place, in pairs (2 i, 2 i + 1) or (i, i + dim / 2). cos and sin have dim / 2
// elements.
inline void rotate_head(float* head, const float* cos, const float* sin, int dim, bool is_interleaved) {
  int half = dim / 2;
  if (is_interleaved) {
    for (int i = 0; i < half; ++i) {
      float first = head[2 * i], second = head[2 * i + 1];
      head[2 * i] = first * cos[i] - second * sin[i];
      head[2 * i + 1] = second * cos[i] + first * sin[i];
    }
    return;
  }
  for (int i = 0; i < half; ++i) {
    float first = head[i], second = head[i + half];
    head[i] = first * cos[i] - second * sin[i];
    head[i + half] = second * cos[i] + first * sin[i];
  }
}

// Quantizes x to integers of magnitude at most `most`, and returns the scale; NaN if x contains NaN.
template <class T> inline float quantize_head(const float* x, int dim, T most, T* out) {
  int whole = dim / kLanes * kLanes;
  F part_largest = zero(), part_total = zero();
  for (int d = 0; d < whole; d += kLanes) {
    F part = load(x + d);
    part_largest = max(as_float(bit_and(as_int(part), set1_int(0x7fffffff))), part_largest);  // ignores NaN
    part_total = add(part_total, part);
  }
  float largest = max_lanes(part_largest), total = sum_lanes(part_total);
  for (int d = whole; d < dim; ++d) largest = std::max(largest, std::fabs(x[d])), total += x[d];
  float inverse = largest > 0 ? static_cast<float>(most) / largest : 0.0f;
  for (int d = 0; d < whole; d += kLanes) {
    int32_t levels[kLanes];
    store_int(levels, to_int(mul(load(x + d), set1(inverse))));
    for (int i = 0; i < kLanes; ++i) out[d + i] = static_cast<T>(levels[i]);
  }
  for (int d = whole; d < dim; ++d) out[d] = static_cast<T>(std::lrint(x[d] * inverse));
  return largest / static_cast<float>(most) + 0.0f * total;
}

// Returns the index of the highest of n numbers, the first if there are several; if there are NaNs, the index of the first one.
inline int find_highest(const float* x, int n) {
  constexpr int kTogether = 4;
  int whole = n / (kTogether * kLanes) * (kTogether * kLanes);
  float highest = x[0];
  uint32_t nan_lanes = 0;
  if (whole) {
    F most[kTogether] = {set1(highest), set1(highest), set1(highest), set1(highest)};
    for (int i = 0; i < whole; i += kTogether * kLanes) {
      F part[kTogether];
      for (int j = 0; j < kTogether; ++j) {
        part[j] = load(x + i + j * kLanes);
        most[j] = max(most[j], part[j]);
      }
      nan_lanes |= unordered_lanes(part[0], part[1]) | unordered_lanes(part[2], part[3]);
    }
    highest = max_lanes(max(max(most[0], most[1]), max(most[2], most[3])));
  }
  for (int i = whole; i < n; ++i) {
    highest = std::max(highest, x[i]);
    nan_lanes |= x[i] != x[i];
  }
  if (nan_lanes) {
    int place = 0;
    while (x[place] == x[place]) ++place;
    return place;
  }
  for (int i = 0; i < whole; i += kLanes)
    if (uint32_t lanes = reaching_lanes(load(x + i), set1(highest))) return i + std::countr_zero(lanes);
  int place = whole;
  while (x[place] != highest) ++place;
  return place;
}

inline void convert(float from, float& to) { to = from; }
inline void convert(float from, uint16_t& to) { to = to_bf16(from); }

}  // namespace midstream
