// Which experts the rows of a step go through.
#pragma once
#include <vector>

#include "linear.h"

namespace midstream {

// The rows of a step for the experts of one layer, sorted by expert: what meets the same weights lies side by side. A row's
// choice depends on its own scores alone.
class ExpertPlan {
 public:
  // Before the team runs; for layers of at most these many experts, of which each row goes through num_active.
  void reserve(int num_rows, int num_experts, int num_active, int alignment);

  // Within for_each of a running team: the experts of one row, by the router's logits [num_experts].
  void choose(const MidstreamMixture& mixture, int row, const float* logits);
  // Once all rows have chosen, by one thread.
  void sort(const MidstreamMixture& mixture, int num_rows);

  int max_places() const { return max_places_; }
  int max_groups(const MidstreamMixture& mixture, int num_rows) const {
    return std::min(mixture.num_experts, num_rows * mixture.num_active);
  }
  const RowGroup* groups() const { return groups_.data(); }
  // Of pair row * num_active + i: its place among the sorted rows, and the weight of the expert.
  const int* places() const { return places_.data(); }
  float weight(int pair) const { return weights_[pair]; }

 private:
  std::vector<RowGroup> groups_;
  std::vector<int> places_, experts_, starts_;
  std::vector<float> weights_;
  int max_places_ = 0, alignment_ = 1;
};

}  // namespace midstream
