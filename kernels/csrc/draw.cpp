#include "draw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "row_ops.h"

namespace midstream {
namespace {

constexpr int kPart = 1024;      // number of tokens per part; each part has its own sum of weights
constexpr int kFewTokens = 256;  // top-p usually keeps no more than this

int num_parts(int n) { return (n + kPart - 1) / kPart; }

// Returns the quantum: all weights are multiples of it, so that the sum of n weights up to 1 is exact in the 53 bits of
// a double.
float quantum_of(int n) { return std::ldexp(1.0f, std::bit_width(static_cast<unsigned>(n - 1)) - 53); }

// Returns e^x for x <= 0, exactly 1 at 0, rounded to a multiple of the quantum, which is 2^-23 times `small`. Each product and
// each sum is rounded separately, so that PyTorch's operations give the same bits.
inline F weight(F x, F small) {
  x = max(set1(-80.0f), x);
  F n = round(mul(x, set1(1.44269504088896341f)));
  F r = sub(x, mul(n, set1(0.693359375f)));
  r = add(r, mul(n, set1(2.12194440e-4f)));
  F p = add(mul(set1(1.9875691500e-4f), r), set1(1.3981999507e-3f));
  p = add(mul(p, r), set1(8.3334519073e-3f));
  p = add(mul(p, r), set1(4.1665795894e-2f));
  p = add(mul(p, r), set1(1.6666665459e-1f));
  p = add(mul(p, r), set1(5.0000001201e-1f));
  p = add(add(mul(mul(r, r), p), r), set1(1.0f));
  F w = times_power(p, n);
  return where_less(w, small, sub(add(w, small), small), w);
}

double sum_of(const float* x, int n) {
  int whole = n / kLanes * kLanes;
  D sums = zero_doubles();
  for (int i = 0; i < whole; i += kLanes) sums = add(sums, add(low_doubles(load(x + i)), high_doubles(load(x + i))));
  double sum = sum_lanes(sums);
  for (int i = whole; i < n; ++i) sum += static_cast<double>(x[i]);
  return sum;
}

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// Returns a number in [0, 1), computed as in gpu_worker/sampling/uniforms.py.
double uniform(const MidstreamDraw& how) {
  constexpr uint64_t kStep = 0x9E3779B97F4A7C15;
  uint64_t mixed = mix(how.seed + kStep);
  mixed = mix((mixed ^ static_cast<uint64_t>(how.sequence_index)) + kStep);
  mixed = mix((mixed ^ static_cast<uint64_t>(how.position)) + kStep);
  return static_cast<double>(mixed >> 11) * 0x1p-53;
}

}  // namespace

void DrawScratch::reserve(int n) {
  size_t padded = static_cast<size_t>(num_parts(n)) * kPart;
  if (weights_.size() >= padded) return;
  for (std::vector<float>* numbers : {&weights_, &collected_, &left_, &other_}) numbers->resize(padded);
  ids_.resize(padded);
  sums_.resize(num_parts(n));
  maxima_.resize(static_cast<size_t>(num_parts(n)) * kLanes);
}

int DrawScratch::choose(const float* logits, int n, const MidstreamDraw* how, float& highest) {
  int best = find_highest(logits, n);
  highest = logits[best];
  return how && how->temperature > 0.0f && std::isfinite(highest) ? draw(logits, n, highest, *how) : best;
}

int DrawScratch::draw(const float* logits, int n, float highest, const MidstreamDraw& how) {
  double total = weigh(logits, n, highest, how.temperature);
  bool is_cut = (how.top_k > 0 && how.top_k < n) || how.top_p < 1.0f || how.min_p > 0.0f;
  double number = uniform(how);
  if (!is_cut) return draw_any(n, number * total);
  return draw_collected(threshold(n, how, total, quantum_of(n)), number);
}

// Computes the weights of all tokens, and their sums and maxima; returns the sum of all weights.
double DrawScratch::weigh(const float* logits, int n, float highest, float temperature) {
  const F top = set1(highest), divisor = set1(temperature), small = set1(quantum_of(n) * 0x1p23f);
  float last[kPart];
  double total = 0;
  for (int part = 0; part < num_parts(n); ++part) {
    int begin = part * kPart, count = std::min(kPart, n - begin);
    const float* x = logits + begin;
    if (count < kPart) {
      std::fill(std::copy_n(x, count, last), last + kPart, -std::numeric_limits<float>::infinity());
      x = last;
    }
    D sum = zero_doubles();
    F most = zero();
    for (int i = 0; i < kPart; i += kLanes) {
      F w = weight(div(sub(load(x + i), top), divisor), small);
      store(&weights_[begin + i], w);
      most = max(most, w);
      sum = add(sum, add(low_doubles(w), high_doubles(w)));
    }
    store(&maxima_[part * kLanes], most);
    total += sums_[part] = sum_lanes(sum);
  }
  return total;
}

// Collects the tokens whose weight is at least `least`, in ascending order.
void DrawScratch::collect(int n, float least) {
  const F bound = set1(least);
  num_collected_ = 0;
  for (int i = 0; i < n; i += kLanes) {
    for (uint32_t lanes = reaching_lanes(load(&weights_[i]), bound); lanes; lanes &= lanes - 1) {
      int id = i + std::countr_zero(lanes);
      ids_[num_collected_] = id;
      collected_[num_collected_++] = weights_[id];
    }
  }
}

// Returns a weight that at least `count` tokens reach; 0 if it cannot be derived from the maxima.
float DrawScratch::weight_reached_by(int n, int count) {
  int num_maxima = num_parts(n) * kLanes;
  if (count > num_maxima) return 0;
  std::copy_n(maxima_.begin(), num_maxima, left_.begin());
  std::nth_element(left_.begin(), left_.begin() + count - 1, left_.begin() + num_maxima, std::greater<>());
  return left_[count - 1];
}

// Collects all tokens with a nonzero weight that top-k, or without it top-p, may keep.
void DrawScratch::collect_most_likely(int n, const MidstreamDraw& how, double total, float quantum) {
  bool has_top_k = how.top_k > 0 && how.top_k < n;
  collect(n, std::max(quantum, weight_reached_by(n, has_top_k ? how.top_k : kFewTokens)));
  double wanted = static_cast<double>(how.top_p) * total;
  if (has_top_k || sum_of(collected_.data(), num_collected_) >= wanted) return;
  // Tokens below this threshold have less weight in total than top-p excludes.
  collect(n, std::max(quantum, static_cast<float>(0.99 * (total - wanted) / n)));
}

// Collects tokens, and returns the smallest weight that is kept.
float DrawScratch::threshold(int n, const MidstreamDraw& how, double total, float quantum) {
  bool has_top_k = how.top_k > 0 && how.top_k < n, has_top_p = how.top_p < 1.0f;
  float least = std::max(quantum, how.min_p);
  if (!has_top_k && !has_top_p) {
    collect(n, least);
    return least;
  }
  collect_most_likely(n, how, total, quantum);
  float kept = quantum;
  double mass = total;
  if (has_top_k && num_collected_ > how.top_k) {
    Above above;
    kept = largest_reached(kept, above, [&](const Above& reaching) { return reaching.count >= how.top_k; });
    mass = above.sum + (how.top_k - above.count) * static_cast<double>(kept);
  } else if (has_top_k) {
    mass = sum_of(collected_.data(), num_collected_);
  }
  if (has_top_p) {
    double wanted = static_cast<double>(how.top_p) * mass;
    Above above;
    kept = largest_reached(kept, above, [&](const Above& reaching) { return reaching.count > 0 && reaching.sum >= wanted; });
  }
  return std::max(kept, least);
}

// Returns the largest weight, at least `least`, for which `is_enough` holds for the collected tokens that reach it. It must hold
// for `least`. Positive floats have the order of their bits, so this is a binary search over bit patterns.
template <class IsEnough> float DrawScratch::largest_reached(float least, Above& above, IsEnough&& is_enough) {
  uint32_t low = std::bit_cast<uint32_t>(least), high = std::bit_cast<uint32_t>(1.0f);
  above = {0, 0.0};
  const float* from = collected_.data();
  int count = num_collected_;
  while (low < high) {
    uint32_t middle = low + (high - low + 1) / 2;
    const float pivot = std::bit_cast<float>(middle);
    float *reaching = other_.data(), *rest = left_.data();
    for (int i = 0; i < count; ++i) {
      float x = from[i];
      *reaching = x;
      *rest = x;
      reaching += x >= pivot;
      rest += x < pivot;
    }
    int num_reaching = static_cast<int>(reaching - other_.data());
    Above found{above.count + num_reaching, above.sum + sum_of(other_.data(), num_reaching)};
    if (is_enough(found)) {
      low = middle;
      count = num_reaching;
      left_.swap(other_);
    } else {
      high = middle - 1;
      above = found;
      count = static_cast<int>(rest - left_.data());
    }
    from = left_.data();
  }
  return std::bit_cast<float>(low);
}

// Returns the first token at which the cumulative weight exceeds the target; if there is none, the last token with a nonzero
// weight.
int DrawScratch::draw_any(int n, double target) const {
  double sum = 0;
  int part = 0;
  for (; part + 1 < num_parts(n) && sum + sums_[part] <= target; ++part) sum += sums_[part];
  int end = std::min(n, (part + 1) * kPart);
  for (int i = part * kPart; i < end; ++i) {
    sum += static_cast<double>(weights_[i]);
    if (sum > target) return i;
  }
  int last = n - 1;
  while (weights_[last] == 0.0f) --last;
  return last;
}

// Does the same for the collected tokens whose weight is at least `least`; `number` is the fraction of their total.
int DrawScratch::draw_collected(float least, double number) const {
  double total = 0;
  for (int i = 0; i < num_collected_; ++i) total += collected_[i] >= least ? static_cast<double>(collected_[i]) : 0.0;
  double target = number * total, sum = 0;
  int last = 0;
  for (int i = 0; i < num_collected_; ++i) {
    if (collected_[i] < least) continue;
    last = ids_[i];
    sum += static_cast<double>(collected_[i]);
    if (sum > target) break;
  }
  return last;
}

}  // namespace midstream
