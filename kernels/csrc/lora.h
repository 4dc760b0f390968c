// Low-rank adapters: what those of single rows add to the output of a linear layer.
#pragma once
#include <initializer_list>
#include <vector>

#include "api.h"
#include "thread_pool.h"

namespace midstream {

// Some outputs of a linear layer, and the pair that adds to them.
struct LoraPart {
  MidstreamLoraPair MidstreamLoraLayer::*pair;
  int width;
};

// The rows of a step that have an adapter. What is added to a row is computed from that row alone.
class LoraRows {
 public:
  // Before the team runs; no linear layer has more than max_width outputs.
  void plan(const MidstreamBatch& batch, int max_width);
  bool empty() const { return rows_.empty(); }

  // Called by every thread of a running team: what is added to a linear layer of x [num_tokens, ldx], k columns of it. The
  // parts are its outputs in order.
  void compute(ThreadPool& pool, int layer, std::initializer_list<LoraPart> parts, int k, const float* x, int64_t ldx);

  // What is added to a row, by output; null for nothing.
  const float* delta(int row) const { return deltas_[row]; }

 private:
  struct Row {
    int index;
    const MidstreamLoraLayer* layers;
  };
  std::vector<Row> rows_;
  std::vector<const float*> deltas_;
  std::vector<float> storage_;
  int width_ = 0;
};

}  // namespace midstream
