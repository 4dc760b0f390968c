// Draws the next token of a row of logits.
#pragma once
#include <vector>

#include "api.h"

namespace midstream {

// One thread's memory for draws. kernels/cpu/sampling.py says what is drawn: every sum is exact, so the token depends on
// neither the order of additions nor the instruction set.
class DrawScratch {
 public:
  void reserve(int n);

  // The next token of n logits: the first of the highest without `how`, with a temperature of 0, and where the highest is not
  // finite; NaN counts as the highest.
  int choose(const float* logits, int n, const MidstreamDraw* how, float& highest);

 private:
  // Numbers that reach a weight found: how many are above it, and their sum.
  struct Above {
    int count;
    double sum;
  };

  int draw(const float* logits, int n, float highest, const MidstreamDraw& how);
  double weigh(const float* logits, int n, float highest, float temperature);
  void collect(int n, float least);
  void collect_most_likely(int n, const MidstreamDraw& how, double total, float quantum);
  float weight_reached_by(int n, int count);
  float threshold(int n, const MidstreamDraw& how, double total, float quantum);
  template <class IsEnough> float largest_reached(float least, Above& above, IsEnough&& is_enough);
  int draw_any(int n, double target) const;
  int draw_collected(float least, double number) const;

  std::vector<float> weights_;      // of all tokens, and zeros up to the end of the last part
  std::vector<double> sums_;        // by part
  std::vector<float> maxima_;       // by part and lane
  std::vector<int> ids_;            // of the collected tokens, ascending
  std::vector<float> collected_;    // their weights
  std::vector<float> left_, other_;
  int num_collected_ = 0;
};

}  // namespace midstream
