// Assigns the rows of a step to experts.
#pragma once
#include <vector>

#include "linear.h"

namespace midstream {

// The rows of a step, sorted by the experts of one layer, so that rows for the same weights are adjacent. The experts of a row
// depend only on its own scores.
class ExpertPlan {
 public:
  // Called before the team runs, with the largest number of experts of a layer and of active experts per row.
  void reserve(int num_rows, int num_experts, int num_active, int alignment);

  // Chooses the experts of one row by the router's logits [num_experts]. Called inside for_each of a running team.
  void choose(const MidstreamMixture& mixture, int row, const float* logits);
  // Sorts the rows by expert. Called by one thread, after the experts of all rows have been chosen.
  void sort(const MidstreamMixture& mixture, int num_rows);

  int max_places() const { return max_places_; }
  int max_groups(const MidstreamMixture& mixture, int num_rows) const {
    return std::min(mixture.num_experts, num_rows * mixture.num_active);
  }
  const RowGroup* groups() const { return groups_.data(); }
  // For the pair row * num_active + i: its position among the sorted rows, and the weight of its expert.
  const int* places() const { return places_.data(); }
  float weight(int pair) const { return weights_[pair]; }

 private:
  std::vector<RowGroup> groups_;
  std::vector<int> places_, experts_, starts_;
  std::vector<float> weights_;
  int max_places_ = 0, alignment_ = 1;
};

}  // namespace midstream
