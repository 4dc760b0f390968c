// LoRA adapters: computes the deltas that are added to the output of a linear layer; each row may have another adapter.
#pragma once
#include <initializer_list>
#include <vector>

#include "api.h"
#include "thread_pool.h"

namespace midstream {

// A range of a linear layer's outputs, and the LoRA pair that adds to them.
struct LoraPart {
  MidstreamLoraPair MidstreamLoraLayer::*pair;
  int width;
};

// The rows of a step that have an adapter. The delta of a row depends only on that row.
class LoraRows {
 public:
  // Called before the team runs. max_width is the largest number of outputs of a linear layer.
  void plan(const MidstreamBatch& batch, int max_width);
  bool empty() const { return rows_.empty(); }

  // Computes the deltas of a linear layer for the first k columns of x [num_tokens, ldx]; `parts` are the layer's outputs in
  // order. Called by every thread of a running team.
  void compute(ThreadPool& pool, int layer, std::initializer_list<LoraPart> parts, int k, const float* x, int64_t ldx);

  // Returns the delta of a row, one element per output; null if there is none.
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
