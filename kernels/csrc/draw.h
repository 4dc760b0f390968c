// Draws the next token of a row of logits.
#pragma once
#include <vector>

#include "api.h"

namespace midstream {

// One thread's memory for draws. kernels/cpu/sampling.py defines the result. All sums are exact, so the token depends neither on
// the order of additions nor on the instruction set.
class DrawScratch {
 public:
  void reserve(int n);

  // Returns the next token for n logits: the first of the highest if `how` is null, if the temperature is 0, or if the highest
  // logit is not finite. NaN counts as the highest.
  int choose(const float* logits, int n, const MidstreamDraw* how, float& highest);

 private:
  // The number of tokens whose weight is above a threshold, and the sum of their weights.
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

  std::vector<float> weights_;      // weights of all tokens, padded with zeros to the end of the last part
  std::vector<double> sums_;        // sums of weights, per part
  std::vector<float> maxima_;       // largest weights, per part and lane
  std::vector<int> ids_;            // ids of the collected tokens, ascending
  std::vector<float> collected_;    // weights of the collected tokens
  std::vector<float> left_, other_;
  int num_collected_ = 0;
};

}  // namespace midstream
