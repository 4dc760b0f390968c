// Causal attention over a paged cache.
#pragma once
#include <vector>

#include "gemm.h"

namespace midstream {

// Keys are taken in tiles counted from position 0, and the running softmax of a query is updated tile by tile, so a query
// goes through the same sums whatever else is asked with it.
constexpr int kKeyTile = 32;
constexpr int kMaxHeadDim = 256;

// The parts of one layer's cache that belong to one sequence and to some neighbouring key-value heads.
struct HeadCache {
  const void* keys;    // [num_blocks, num_kv_heads, head_dim, block_size], at the first of these heads
  const void* values;  // [num_blocks, num_kv_heads, block_size, head_dim], likewise
  const int32_t* block_table;
  int block_size;
  int64_t block_stride;  // elements from one block to the next
};

// Consecutive queries of one sequence, all heads of these groups.
struct QueryTile {
  const float* q;  // query i, head h at q + i * stride + h * head_dim
  float* out;      // likewise, with its own stride
  int64_t q_stride, out_stride;
  int count, num_kv_heads, group, head_dim;
  int first_position;  // of query 0 in its sequence
  float scale;
  int window;  // keys that a query sees, itself included; 0 for all
};

// Scratch of one thread.
struct AttentionScratch {
  std::vector<float> q, keys, values, scores, out, highest, total;
  void reserve(int max_rows, int num_kv_heads, int head_dim);  // rows of one key-value head: queries times group
};

// T is float or uint16_t (bfloat16).
template <class T> void attend(const HeadCache& cache, const QueryTile& tile, AttentionScratch& scratch);

}  // namespace midstream
