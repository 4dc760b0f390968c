// Causal attention over a paged cache.
#pragma once
#include <algorithm>
#include <type_traits>

#include "gemm.h"
#include "quantized_rows.h"

namespace midstream {

// Keys are taken in tiles counted from position 0, and the running softmax of a query is updated tile by tile, so a query
// goes through the same sums whatever else is asked with it.
constexpr int kKeyTile = 4 * kLanes;
constexpr int kMaxHeadDim = 256;

// The parts of one layer's cache that belong to one sequence and to some neighbouring key-value heads.
struct HeadCache {
  const void* keys;    // [num_blocks, num_kv_heads, head_dim, block_size], at the first of these heads
  const void* values;  // [num_blocks, num_kv_heads, block_size, head_dim], likewise
  // What integers are to be multiplied with follows the numbers of each head of a block, as floats [block_size].
  const int32_t* block_table;
  int block_size;
  int64_t block_stride, head_stride;  // elements from one block to the next, and from one head to the next
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
  int chunk;   // no query sees keys before the last multiple of it; 0 for none
  float softcap;       // bends scores s to softcap * tanh(s / softcap); 0 for none
  const float* sinks;  // of the first of these heads: a score that takes weight and has no value; null for none

  // The first key that a query at this position sees.
  int oldest(int position) const {
    int first = window ? std::max(position + 1 - window, 0) : 0;
    return chunk ? std::max(first, position / chunk * chunk) : first;
  }
};

// Scratch of one thread.
struct AttentionScratch {
  AlignedVector<float> q, keys, values, out, highest, total;
  void reserve(int max_rows, int num_kv_heads, int head_dim);  // rows of one key-value head: queries times group
};

// Elements of a head in a block of the cache, scales included.
template <class T> constexpr int64_t head_elements(int head_dim, int block_size) {
  constexpr int kScale = std::is_same_v<T, int16_t> || std::is_same_v<T, int8_t> ? sizeof(float) / sizeof(T) : 0;
  return static_cast<int64_t>(head_dim + kScale) * block_size;
}

// T is float, uint16_t (bfloat16), int16_t or int8_t.
template <class T> void attend(const HeadCache& cache, const QueryTile& tile, AttentionScratch& scratch);

}  // namespace midstream
