#include "attention.h"

#include <algorithm>
#include <limits>

#include "transpose.h"

namespace midstream {
namespace {

constexpr int kVectors = 2;  // of a micro kernel: two make a key tile of 16-lane vectors
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int padded_dim(int head_dim) { return round_up(head_dim, kVectors * kLanes); }

// Where the keys and values of a tile lie, in elements from the start of the cache.
struct TileSlots {
  int64_t offsets[kKeyTile];
  int count;
};

TileSlots find_slots(const HeadCache& cache, int first, int count) {
  TileSlots slots;
  slots.count = count;
  int block = first / cache.block_size, offset = first % cache.block_size;
  for (int j = 0; j < count; ++j) {
    int64_t slot = static_cast<int64_t>(cache.block_table[block]) * cache.block_size + offset;
    slots.offsets[j] = slot * cache.slot_stride;
    if (++offset == cache.block_size) offset = 0, ++block;
  }
  return slots;
}

// The rows of a tile are scattered, so the processor does not foresee them.
template <class T> void prefetch(const HeadCache& cache, const TileSlots& slots, int width) {
  for (int j = 0; j < slots.count; ++j)
    for (int d = 0; d < width; d += 64 / static_cast<int>(sizeof(T))) {
      __builtin_prefetch(static_cast<const T*>(cache.keys) + slots.offsets[j] + d);
      __builtin_prefetch(static_cast<const T*>(cache.values) + slots.offsets[j] + d);
    }
}

// keys [head_dim, kKeyTile]; zero where there is no key.
template <class T> void gather_keys(const T* cache, const TileSlots& slots, int head_dim, float* keys) {
  static const T no_key[kMaxHeadDim] = {};
  for (int j = 0; j < kKeyTile; j += 8) {
    const T* rows[8];
    for (int i = 0; i < 8; ++i) rows[i] = j + i < slots.count ? cache + slots.offsets[j + i] : no_key;
    for (int d = 0; d < head_dim; d += 8) transpose_8x8(rows, d, keys + d * kKeyTile + j, kKeyTile);
  }
}

// values [slots.count, padded_dim]; the columns from head_dim on stay zero.
template <class T> void gather_values(const T* cache, const TileSlots& slots, int head_dim, float* values) {
  int stride = padded_dim(head_dim);
  for (int j = 0; j < slots.count; ++j) {
    const T* row = cache + slots.offsets[j];
    for (int d = 0; d < head_dim; d += 8) _mm256_storeu_ps(values + j * stride + d, load_eight(row + d));
  }
}

// Hides the scores of keys that the query at this position does not see.
void mask_scores(float* scores, int first_key, int position, int window) {
  int end = std::min(position + 1 - first_key, kKeyTile);
  int begin = window ? std::max(position + 1 - window - first_key, 0) : 0;
  for (int j = std::max(end, 0); j < kKeyTile; ++j) scores[j] = -kInfinity;
  for (int j = 0; j < std::min(begin, kKeyTile); ++j) scores[j] = -kInfinity;
}

// Turns scores into weights e^(score - highest so far), and brings the sums so far to the same base.
void softmax_step(float* scores, float* out, int dim, float& highest, float& total) {
  F tile_highest = load(scores);
  for (int j = kLanes; j < kKeyTile; j += kLanes) tile_highest = max(tile_highest, load(scores + j));
  float next = std::max(highest, max_lanes(tile_highest));
  F base = set1(next == -kInfinity ? 0.0f : next);
  float shrink[kLanes];
  store(shrink, exp(sub(set1(highest), base)));
  F sum = zero();
  for (int j = 0; j < kKeyTile; j += kLanes) {
    F weight = exp(sub(load(scores + j), base));
    store(scores + j, weight);
    sum = add(sum, weight);
  }
  total = total * shrink[0] + sum_lanes(sum);
  highest = next;
  if (shrink[0] == 1.0f) return;
  for (int d = 0; d < dim; d += kLanes) store(out + d, mul(load(out + d), set1(shrink[0])));
}

// Calls visit(row, offset of query, offset of head) for the rows of one key-value head.
template <class Visit> void for_each_row(const QueryTile& tile, int kv_head, Visit&& visit) {
  for (int i = 0; i < tile.count; ++i)
    for (int h = 0; h < tile.group; ++h) visit(i * tile.group + h, i, (kv_head * tile.group + h) * tile.head_dim);
}

void load_queries(const QueryTile& tile, int kv_head, float* q) {
  for_each_row(tile, kv_head, [&](int row, int query, int column) {
    const float* head = tile.q + query * tile.q_stride + column;
    for (int d = 0; d < tile.head_dim; ++d) q[row * tile.head_dim + d] = head[d] * tile.scale;
  });
}

void store_outputs(const QueryTile& tile, int kv_head, const float* out, const float* total) {
  int stride = padded_dim(tile.head_dim);
  for_each_row(tile, kv_head, [&](int row, int query, int column) {
    float* head = tile.out + query * tile.out_stride + column;
    for (int d = 0; d < tile.head_dim; ++d) head[d] = out[row * stride + d] / total[row];
  });
}

// The running softmax of the rows of one key-value head.
struct HeadState {
  float *q, *out, *highest, *total;

  HeadState(AttentionScratch& scratch, int kv_head, int rows, int head_dim)
      : q(scratch.q.data() + kv_head * rows * head_dim), out(scratch.out.data() + kv_head * rows * padded_dim(head_dim)),
        highest(scratch.highest.data() + kv_head * rows), total(scratch.total.data() + kv_head * rows) {}

  void clear(int rows, int head_dim) {
    std::fill_n(out, rows * padded_dim(head_dim), 0.0f);
    std::fill_n(highest, rows, -kInfinity);
    std::fill_n(total, rows, 0.0f);
  }
};

// Takes one key tile, gathered into scratch, into the state of one head.
void add_tile(const QueryTile& tile, int first_key, int num_keys, AttentionScratch& scratch, const HeadState& state) {
  int rows = tile.count * tile.group, dim = tile.head_dim, stride = padded_dim(dim);
  float* scores = scratch.scores.data();
  multiply<kVectors>(rows, kKeyTile, dim, state.q, dim, scratch.keys.data(), kKeyTile, scores, kKeyTile, false);
  for (int row = 0; row < rows; ++row) {
    float* row_scores = scores + row * kKeyTile;
    mask_scores(row_scores, first_key, tile.first_position + row / tile.group, tile.window);
    softmax_step(row_scores, state.out + row * stride, stride, state.highest[row], state.total[row]);
  }
  multiply<kVectors>(rows, stride, num_keys, scores, kKeyTile, scratch.values.data(), stride, state.out, stride, true);
}

}  // namespace

void AttentionScratch::reserve(int max_rows, int num_kv_heads, int head_dim) {
  size_t rows = static_cast<size_t>(max_rows), all_rows = rows * num_kv_heads;
  size_t stride = static_cast<size_t>(padded_dim(head_dim));
  q.resize(all_rows * head_dim);
  keys.assign(static_cast<size_t>(head_dim) * kKeyTile, 0.0f);
  values.assign(kKeyTile * stride, 0.0f);
  scores.resize(rows * kKeyTile);
  out.resize(all_rows * stride);
  highest.resize(all_rows);
  total.resize(all_rows);
}

template <class T> void attend(const HeadCache& cache, const QueryTile& tile, AttentionScratch& scratch) {
  int rows = tile.count * tile.group, dim = tile.head_dim;
  for (int h = 0; h < tile.num_kv_heads; ++h) {
    HeadState state(scratch, h, rows, dim);
    state.clear(rows, dim);
    load_queries(tile, h, state.q);
  }
  int num_keys = tile.first_position + tile.count;
  int oldest = tile.window ? std::max(tile.first_position + 1 - tile.window, 0) : 0;
  int first = oldest / kKeyTile * kKeyTile;
  TileSlots next = find_slots(cache, first, std::min(kKeyTile, num_keys - first));
  for (; first < num_keys; first += kKeyTile) {
    TileSlots slots = next;
    next = find_slots(cache, first + kKeyTile, std::clamp(num_keys - first - kKeyTile, 0, kKeyTile));
    prefetch<T>(cache, next, tile.num_kv_heads * dim);
    for (int h = 0; h < tile.num_kv_heads; ++h) {
      gather_keys(static_cast<const T*>(cache.keys) + h * dim, slots, dim, scratch.keys.data());
      gather_values(static_cast<const T*>(cache.values) + h * dim, slots, dim, scratch.values.data());
      add_tile(tile, first, slots.count, scratch, HeadState(scratch, h, rows, dim));
    }
  }
  for (int h = 0; h < tile.num_kv_heads; ++h) {
    HeadState state(scratch, h, rows, dim);
    store_outputs(tile, h, state.out, state.total);
  }
}

template void attend<float>(const HeadCache&, const QueryTile&, AttentionScratch&);
template void attend<uint16_t>(const HeadCache&, const QueryTile&, AttentionScratch&);

}  // namespace midstream
