// A thread team with the scratch memory of its threads.
#pragma once
#include "linear.h"

struct MidstreamPool {
  MidstreamPool(int num_threads, const int* cpus) : threads(num_threads, cpus), linear_scratch(num_threads) {}
  midstream::ThreadPool threads;
  std::vector<midstream::LinearScratch> linear_scratch;
  std::vector<float> rows;  // padded copy of an input
};
