// A pool of threads with their scratch memory.
#pragma once
#include "draw.h"
#include "linear.h"

struct MidstreamPool {
  explicit MidstreamPool(int num_threads)
      : threads(num_threads), linear_scratch(num_threads), draw_scratch(num_threads) {}
  midstream::ThreadPool threads;
  std::vector<midstream::LinearScratch> linear_scratch;
  midstream::QuantizedScratch quantized;
  std::vector<midstream::DrawScratch> draw_scratch;
  std::vector<float> rows;  // padded copy of an input

  // Called before reserve(), for every layer that will run.
  void use(const MidstreamLinear& weight) {
    for (const MidstreamLinear* part = &weight; part; part = part->next) quantized.has_orders |= part->input_order != nullptr;
  }
  void reserve(int m, int max_k) {
    for (midstream::LinearScratch& scratch : linear_scratch) scratch.reserve(m, quantized.can_use_tiles);
    quantized.reserve(m, max_k);
  }
  void reserve_draws(int n) {
    for (midstream::DrawScratch& scratch : draw_scratch) scratch.reserve(n);
  }
};
