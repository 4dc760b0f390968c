#include "mixture.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace midstream {
namespace {

constexpr int kMaxExperts = 1024;

// Returns the index of the highest of n numbers, the first if there are several, and sets that number to -infinity.
int take_highest(double* x, int n) {
  int best = 0;
  for (int i = 1; i < n; ++i)
    if (x[i] > x[best]) best = i;
  x[best] = -std::numeric_limits<double>::infinity();
  return best;
}

// Keeps the groups whose two highest numbers have the highest sums, and sets the numbers of all others to -infinity.
void keep_groups(double* rated, int num_experts, int num_groups, int num_active_groups) {
  int size = num_experts / num_groups;
  double sums[kMaxExperts];
  bool is_kept[kMaxExperts] = {};
  for (int g = 0; g < num_groups; ++g) {
    double first = -std::numeric_limits<double>::infinity(), second = first;
    for (int i = g * size; i < (g + 1) * size; ++i) {
      second = std::max(second, std::min(first, rated[i]));
      first = std::max(first, rated[i]);
    }
    sums[g] = first + (size > 1 ? second : 0.0);
  }
  for (int i = 0; i < num_active_groups; ++i) is_kept[take_highest(sums, num_groups)] = true;
  for (int i = 0; i < num_experts; ++i)
    if (!is_kept[i / size]) rated[i] = -std::numeric_limits<double>::infinity();
}

// Replaces n numbers by their softmax.
void softmax(double* x, int n) {
  double highest = *std::max_element(x, x + n), total = 0;
  for (int i = 0; i < n; ++i) total += x[i] = std::exp(x[i] - highest);
  for (int i = 0; i < n; ++i) x[i] /= total;
}

}  // namespace

void ExpertPlan::reserve(int num_rows, int num_experts, int num_active, int alignment) {
  size_t num_pairs = static_cast<size_t>(num_rows) * num_active;
  if (places_.size() < num_pairs) places_.resize(num_pairs), experts_.resize(num_pairs), weights_.resize(num_pairs);
  if (groups_.size() < static_cast<size_t>(num_experts)) groups_.resize(num_experts), starts_.resize(num_experts);
  alignment_ = alignment;
  int num_groups = static_cast<int>(std::min<size_t>(num_experts, num_pairs));
  max_places_ = static_cast<int>(num_pairs) + num_groups * (alignment - 1);
}

void ExpertPlan::choose(const MidstreamMixture& mixture, int row, const float* logits) {
  int n = mixture.num_experts, k = mixture.num_active;
  double scores[kMaxExperts], rated[kMaxExperts], chosen[kMaxExperts];
  for (int i = 0; i < n; ++i) scores[i] = mixture.scoring == 2 ? 1.0 / (1.0 + std::exp(-static_cast<double>(logits[i]))) : logits[i];
  if (mixture.scoring == 0) softmax(scores, n);
  for (int i = 0; i < n; ++i) rated[i] = scores[i] + (mixture.correction ? mixture.correction[i] : 0.0f);
  if (mixture.num_active_groups < mixture.num_groups) keep_groups(rated, n, mixture.num_groups, mixture.num_active_groups);
  double total = 0;
  for (int i = 0; i < k; ++i) {
    int best = take_highest(rated, n);
    experts_[row * k + i] = best;
    chosen[i] = scores[best];
  }
  if (mixture.scoring == 1) softmax(chosen, k);
  for (int i = 0; i < k; ++i) total += chosen[i];
  double factor = mixture.is_normalized ? mixture.scale / (total + (mixture.scoring == 2 ? 1e-20 : 0.0)) : mixture.scale;
  for (int i = 0; i < k; ++i) weights_[row * k + i] = static_cast<float>(chosen[i] * factor);
}

void ExpertPlan::sort(const MidstreamMixture& mixture, int num_rows) {
  int num_pairs = num_rows * mixture.num_active, group = 0, first = 0;
  std::fill_n(starts_.begin(), mixture.num_experts, 0);
  for (int pair = 0; pair < num_pairs; ++pair) ++starts_[experts_[pair]];
  for (int expert = 0; expert < mixture.num_experts; ++expert) {
    int count = starts_[expert];
    starts_[expert] = first;
    if (!count) continue;
    groups_[group++] = {expert, first, count};
    first += (count + alignment_ - 1) / alignment_ * alignment_;
  }
  for (int end = max_groups(mixture, num_rows); group < end; ++group) groups_[group] = {0, first, 0};
  for (int pair = 0; pair < num_pairs; ++pair) places_[pair] = starts_[experts_[pair]]++;
}

}  // namespace midstream
