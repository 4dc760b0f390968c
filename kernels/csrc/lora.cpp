#include "lora.h"

#include <algorithm>

#include "vec.h"

namespace midstream {
namespace {

// Number of ranks that are computed in one pass over the input.
constexpr int kRanks = 4;

// shrunk[0..R-1] = a [R, k] x
template <int R>
void dots(const float* a, const float* x, int k, float* shrunk) {
  int whole = k / kLanes * kLanes;
  F sums[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r] = zero();
  for (int i = 0; i < whole; i += kLanes) {
    F part = load(x + i);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r] = fma(part, load(a + static_cast<int64_t>(r) * k + i), sums[r]);
  }
  for (int r = 0; r < R; ++r) {
    shrunk[r] = sum_lanes(sums[r]);
    for (int i = whole; i < k; ++i) shrunk[r] += x[i] * a[static_cast<int64_t>(r) * k + i];
  }
}

// out [n] = (a x) b
void apply(const MidstreamLoraPair& pair, int k, int n, const float* x, float* out) {
  std::fill(out, out + n, 0.0f);
  for (int first = 0; first < pair.rank; first += kRanks) {
    int count = std::min(kRanks, pair.rank - first);
    float shrunk[kRanks];
    const float* a = pair.a + static_cast<int64_t>(first) * k;
    if (count == kRanks) {
      dots<kRanks>(a, x, k, shrunk);
    } else {
      for (int r = 0; r < count; ++r) dots<1>(a + static_cast<int64_t>(r) * k, x, k, shrunk + r);
    }
    const float* b = pair.b + static_cast<int64_t>(first) * n;
    int whole = n / kLanes * kLanes;
    for (int i = 0; i < whole; i += kLanes) {
      F sum = load(out + i);
      for (int r = 0; r < count; ++r) sum = fma(set1(shrunk[r]), load(b + static_cast<int64_t>(r) * n + i), sum);
      store(out + i, sum);
    }
    for (int i = whole; i < n; ++i)
      for (int r = 0; r < count; ++r) out[i] += shrunk[r] * b[static_cast<int64_t>(r) * n + i];
  }
}

}  // namespace

void LoraRows::plan(const MidstreamBatch& batch, int max_width) {
  rows_.clear();
  if (!batch.adapters) return;
  deltas_.assign(batch.num_tokens, nullptr);
  for (int s = 0; s < batch.num_sequences; ++s)
    if (batch.adapters[s])
      for (int i = batch.query_starts[s]; i < batch.query_starts[s + 1]; ++i) rows_.push_back({i, batch.adapters[s]});
  width_ = max_width;
  storage_.resize(rows_.size() * width_);
}

void LoraRows::compute(ThreadPool& pool, int layer, std::initializer_list<LoraPart> parts, int k, const float* x,
                       int64_t ldx) {
  int num_parts = static_cast<int>(parts.size()), count = static_cast<int>(rows_.size()) * num_parts;
  pool.for_each(count, pool.grain(count), [&](int task) {
    const Row& row = rows_[task / num_parts];
    const MidstreamLoraLayer& pairs = row.layers[layer];
    bool has_any = std::any_of(parts.begin(), parts.end(), [&](const LoraPart& part) { return (pairs.*part.pair).a; });
    float* delta = storage_.data() + static_cast<int64_t>(task / num_parts) * width_;
    const LoraPart* part = parts.begin() + task % num_parts;
    if (part == parts.begin()) deltas_[row.index] = has_any ? delta : nullptr;
    if (!has_any) return;
    for (const LoraPart* before = parts.begin(); before < part; ++before) delta += before->width;
    const MidstreamLoraPair& pair = pairs.*part->pair;
    if (pair.a) {
      apply(pair, k, part->width, x + row.index * ldx, delta);
    } else {
      std::fill(delta, delta + part->width, 0.0f);
    }
  });
}

}  // namespace midstream
