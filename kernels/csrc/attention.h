// Causal attention over a paged cache.
#pragma once
#include <algorithm>
#include <type_traits>

#include "gemm.h"
#include "quantized_rows.h"

namespace midstream {

// Keys are processed in tiles that start at multiples of kKeyTile, and the running softmax of a query is updated tile by tile.
// The order of its sums therefore does not depend on other queries.
constexpr int kKeyTile = 4 * kLanes;
constexpr int kMaxHeadDim = 256;

// The blocks of one sequence in the cache of one layer, for some adjacent key-value heads.
struct HeadCache {
  const void* keys;    // [num_blocks, num_kv_heads, head_dim, block_size], starting at the first of these heads
  const void* values;  // [num_blocks, num_kv_heads, block_size, head_dim], likewise
  // In integer formats, the elements of each head of a block are followed by their scales, as floats [block_size].
  const int32_t* block_table;
  int block_size;
  int64_t block_stride, head_stride;  // elements from one block to the next, and from one head to the next
};

// Consecutive queries of one sequence, with all heads of num_kv_heads groups.
struct QueryTile {
  const float* q;  // query i, head h at q + i * stride + h * head_dim
  float* out;      // likewise, with its own stride
  int64_t q_stride, out_stride;
  int count, num_kv_heads, group, head_dim;
  int first_position;  // position of query 0 in its sequence
  float scale;
  int window;  // number of keys to which a query attends, including its own; 0: all
  int chunk;   // a query does not attend to keys before the last multiple of this position; 0: no chunks
  float softcap;       // scores s become softcap * tanh(s / softcap); 0: unchanged
  const float* sinks;  // attention sinks, from the first of these heads on: logits without a value; null if there are none

  // Returns the first key to which a query at this position attends.
  int oldest(int position) const {
    int first = window ? std::max(position + 1 - window, 0) : 0;
    return chunk ? std::max(first, position / chunk * chunk) : first;
  }
};

// Scratch memory of one thread.
struct AttentionScratch {
  AlignedVector<float> q, keys, values, out, highest, total;
  void reserve(int max_rows, int num_kv_heads, int head_dim);  // max_rows per key-value head: queries times group
};

// Returns the number of elements per head in a block of the cache, including scales.
template <class T> constexpr int64_t head_elements(int head_dim, int block_size) {
  constexpr int kScale = std::is_same_v<T, int16_t> || std::is_same_v<T, int8_t> ? sizeof(float) / sizeof(T) : 0;
  return static_cast<int64_t>(head_dim + kScale) * block_size;
}

// T is float, uint16_t (bfloat16), int16_t or int8_t.
template <class T> void attend(const HeadCache& cache, const QueryTile& tile, AttentionScratch& scratch);

}  // namespace midstream
