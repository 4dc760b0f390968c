#include "attention.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "row_ops.h"

namespace midstream {
namespace {

constexpr int kWideVectors = 4;  // vectors of a micro kernel with at most kWideRows rows
constexpr int kWideRows = 3;
constexpr int kTileVectors = kKeyTile / kLanes;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504088896341f;

int padded_dim(int head_dim) { return round_up(head_dim, kLanes); }

F load_element(const float* p) { return load(p); }
F load_element(const uint16_t* p) { return load_bf16(p); }
F load_element(const int16_t* p) { return load_int16(p); }
F load_element(const int8_t* p) { return load_int8(p); }
template <class T> constexpr bool kIsScaled = std::is_same_v<T, int16_t> || std::is_same_v<T, int8_t>;
float to_float(float x) { return x; }
float to_float(int16_t x) { return x; }
float to_float(int8_t x) { return x; }
float to_float(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// The next tile is prefetched: its parts are too far apart for the processor's own prefetching.
template <class T> [[gnu::always_inline]] inline void prefetch(const T* p) {
  __builtin_prefetch(p, 0, 3);
}

// The keys of a tile [head_dim, kKeyTile]. Only the slots of a vector are adjacent in memory.
template <class T> struct KeyTile {
  const T *vectors[kTileVectors], *following[kTileVectors];
  int64_t stride;  // distance from one d to the next, in elements
  [[gnu::always_inline]] F operator()(int d, int key) const {
    prefetch(following[key / kLanes] + d * stride);
    return load_element(vectors[key / kLanes] + d * stride);
  }
};

// The values of a tile [kKeyTile, head_dim]. Only the slots of a vector are adjacent in memory.
template <class T> struct ValueTile {
  const T *slots[kTileVectors], *following[kTileVectors];
  int64_t stride;
  [[gnu::always_inline]] F operator()(int key, int d) const {
    int64_t offset = key % kLanes * stride + d;
    prefetch(following[key / kLanes] + offset);
    return load_element(slots[key / kLanes] + offset);
  }
};

// One tile of keys and values in the cache of one head.
template <class T> struct CachedTile {
  const HeadCache& cache;
  int head, head_dim, first, count;

  struct Slot {
    const T *keys, *values;  // keys: the element d = 0; the next d is block_size elements further
    const T *key_scale, *value_scale;
  };

  int num_vectors() const { return (count + kLanes - 1) / kLanes; }
  bool has_whole_vectors() const { return cache.block_size % kLanes == 0; }

  Slot slot(int key) const {
    int block = (first + key) / cache.block_size, offset = (first + key) % cache.block_size;
    int64_t start = cache.block_table[block] * cache.block_stride + head * cache.head_stride;
    int64_t scale = static_cast<int64_t>(head_dim) * cache.block_size + offset * (sizeof(float) / sizeof(T));
    const T *keys = static_cast<const T*>(cache.keys) + start, *values = static_cast<const T*>(cache.values) + start;
    return {keys + offset, values + static_cast<int64_t>(offset) * head_dim, keys + scale, values + scale};
  }

  // Vectors of slots must not cross a block's end. If the next tile has fewer of them, its first one is used for the
  // rest.
  KeyTile<T> keys(const CachedTile& next) const {
    KeyTile<T> tile{{}, {}, cache.block_size};
    for (int v = 0; v < num_vectors(); ++v) {
      tile.vectors[v] = slot(v * kLanes).keys;
      tile.following[v] = next.slot(v < next.num_vectors() ? v * kLanes : 0).keys;
    }
    return tile;
  }
  ValueTile<T> values(const CachedTile& next) const {
    ValueTile<T> tile{{}, {}, head_dim};
    for (int v = 0; v < num_vectors(); ++v) {
      tile.slots[v] = slot(v * kLanes).values;
      tile.following[v] = next.slot(v < next.num_vectors() ? v * kLanes : 0).values;
    }
    return tile;
  }

  // Copies the scales of integers, kKeyTile of each kind; those from `count` on must not be used.
  void copy_scales(float* key_scales, float* value_scales) const {
    if (has_whole_vectors()) {
      for (int v = 0; v < num_vectors(); ++v) {
        Slot from = slot(v * kLanes);
        std::memcpy(key_scales + v * kLanes, from.key_scale, kLanes * sizeof(float));
        std::memcpy(value_scales + v * kLanes, from.value_scale, kLanes * sizeof(float));
      }
      return;
    }
    for (int j = 0; j < count; ++j) {
      Slot from = slot(j);
      std::memcpy(key_scales + j, from.key_scale, sizeof(float));
      std::memcpy(value_scales + j, from.value_scale, sizeof(float));
    }
  }

  // Converts the keys to floats: out [head_dim, kKeyTile].
  Matrix copy_keys(float* out) const {
    if (has_whole_vectors()) {
      for (int v = 0; v < num_vectors(); ++v) {
        const T* from = slot(v * kLanes).keys;
        for (int d = 0; d < head_dim; ++d, from += cache.block_size) store(out + d * kKeyTile + v * kLanes, load_element(from));
      }
    } else {
      for (int j = 0; j < count; ++j) {
        const T* from = slot(j).keys;
        for (int d = 0; d < head_dim; ++d) out[d * kKeyTile + j] = to_float(from[static_cast<int64_t>(d) * cache.block_size]);
      }
    }
    return {out, kKeyTile};
  }

  // Converts the values to floats: out [count, padded_dim]. The columns from head_dim on are not written; they are zero.
  Matrix copy_values(float* out) const {
    int stride = padded_dim(head_dim), whole = head_dim / kLanes * kLanes;
    for (int j = 0; j < count; ++j) {
      const T* from = slot(j).values;
      for (int d = 0; d < whole; d += kLanes) store(out + j * stride + d, load_element(from + d));
      for (int d = whole; d < head_dim; ++d) out[j * stride + d] = to_float(from[d]);
    }
    return {out, stride};
  }
};

// c[R, num_vectors vectors] (+)= a[R, k] b[k, num_vectors vectors].
template <int R, class Right>
void multiply_vectors(int num_vectors, int k, const float* a, int64_t lda, const Right& b, float* c, int64_t ldc, bool accumulate) {
  constexpr int kMost = R <= kWideRows ? kWideVectors : kMicroVectors;
  for (int v = 0; v < num_vectors; v += kMost) {
    int column = v * kLanes;
    switch (std::min(num_vectors - v, kMost)) {
      case 1: micro_kernel<R, 1>(a, lda, b, column, k, c, ldc, accumulate); break;
      case 2: micro_kernel<R, 2>(a, lda, b, column, k, c, ldc, accumulate); break;
      case 3: micro_kernel<R, std::min(kMost, 3)>(a, lda, b, column, k, c, ldc, accumulate); break;
      default: micro_kernel<R, kMost>(a, lda, b, column, k, c, ldc, accumulate); break;
    }
  }
}

// Masks the scores of keys to which the query at this position does not attend; `oldest` is the first to which it does.
void mask_scores(float* scores, int first_key, int num_keys, int position, int oldest) {
  int end = std::min(position + 1 - first_key, num_keys);
  int begin = std::max(oldest - first_key, 0);
  for (int j = std::max(end, 0); j < num_keys; ++j) scores[j] = -kInfinity;
  for (int j = 0; j < std::min(begin, num_keys); ++j) scores[j] = -kInfinity;
}

void multiply_vector(float* x, F factor) { store(x, mul(load(x), factor)); }

// The running softmax of one row.
struct RowState {
  float* out;      // weighted sums of values
  float* total;    // sums of weights, per lane
  float* highest;  // highest score so far
  int stride;      // stride of out

  // Rescales the sums so far to the maximum that includes these num_vectors of base-2 scores.
  void raise(const float* scores, int num_vectors) const {
    F most = load(scores);
    for (int v = 1; v < num_vectors; ++v) most = max(most, load(scores + v * kLanes));
    float next = max_lanes(most);
    if (next > *highest) {
      float factors[kLanes];
      store(factors, exp2(set1(*highest - next)));
      F shrink = set1(factors[0]);
      for (int d = 0; d < stride; d += kLanes) multiply_vector(out + d, shrink);
      multiply_vector(total, shrink);
      *highest = next;
    }
  }

  // Turns these scores into weights 2^(score - highest so far). The factors by which weights are multiplied before they
  // are applied to the values are not part of the total.
  template <bool is_scaled> void add_scores(float* scores, int num_vectors, const float* value_scales) const {
    F base = set1(*highest == -kInfinity ? 0.0f : *highest), sum = load(total);
    for (int v = 0; v < num_vectors; ++v) {
      F weight = exp2(sub(load(scores + v * kLanes), base));
      sum = add(sum, weight);
      store(scores + v * kLanes, is_scaled ? mul(weight, load(value_scales + v * kLanes)) : weight);
    }
    store(total, sum);
  }
};

// Calls visit(row, offset of query, offset of head) for the rows of one key-value head.
template <class Visit> void for_each_row(const QueryTile& tile, int kv_head, Visit&& visit) {
  for (int i = 0; i < tile.count; ++i)
    for (int h = 0; h < tile.group; ++h) visit(i * tile.group + h, i, (kv_head * tile.group + h) * tile.head_dim);
}

// The running softmax of the rows of one key-value head.
struct HeadState {
  float *q, *out, *highest, *total;

  HeadState(AttentionScratch& scratch, int kv_head, int rows, int head_dim)
      : q(scratch.q.data() + kv_head * rows * head_dim), out(scratch.out.data() + kv_head * rows * padded_dim(head_dim)),
        highest(scratch.highest.data() + kv_head * rows), total(scratch.total.data() + kv_head * rows * kLanes) {}

  // Resets the state and copies the queries, scaled so that scores are base-2 logarithms.
  void start(const QueryTile& tile, int kv_head) const {
    int rows = tile.count * tile.group;
    float scale = tile.scale * kLog2E;
    std::fill_n(out, rows * padded_dim(tile.head_dim), 0.0f);
    std::fill_n(highest, rows, -kInfinity);
    std::fill_n(total, rows * kLanes, 0.0f);
    if (tile.sinks)
      for (int row = 0; row < rows; ++row) {
        highest[row] = tile.sinks[kv_head * tile.group + row % tile.group] * kLog2E;
        total[row * kLanes] = 1.0f;
      }
    for_each_row(tile, kv_head, [&](int row, int query, int column) {
      const float* head = tile.q + query * tile.q_stride + column;
      for (int d = 0; d < tile.head_dim; ++d) q[row * tile.head_dim + d] = head[d] * scale;
    });
  }

  void finish(const QueryTile& tile, int kv_head) const {
    int stride = padded_dim(tile.head_dim);
    for_each_row(tile, kv_head, [&](int row, int query, int column) {
      float* head = tile.out + query * tile.out_stride + column;
      float inverse = 1.0f / sum_lanes(load(total + row * kLanes));
      for (int d = 0; d < tile.head_dim; ++d) head[d] = out[row * stride + d] * inverse;
    });
  }
};

// A key tile in the form in which rows of queries read it.
template <class Keys, class Values> struct ReadTile {
  Keys keys;
  Values values;
  int first, count;
  alignas(64) float key_scales[kKeyTile], value_scales[kKeyTile];
};

// Processes a key tile for R rows of a head, starting at this one.
template <int R, bool is_scaled, class Keys, class Values>
void add_rows(const QueryTile& tile, const ReadTile<Keys, Values>& cached, const HeadState& state, int row) {
  // None of these rows attends to later keys.
  int num_keys = std::min(cached.count, tile.first_position + (row + R - 1) / tile.group + 1 - cached.first);
  if (num_keys <= 0) return;
  int dim = tile.head_dim, stride = padded_dim(dim), num_vectors = (num_keys + kLanes - 1) / kLanes;
  alignas(64) float scores[R * kKeyTile];
  multiply_vectors<R>(num_vectors, dim, state.q + row * dim, dim, cached.keys, scores, kKeyTile, false);
  RowState rows[R];
  for (int r = 0; r < R; ++r) {
    float* row_scores = scores + r * kKeyTile;
    rows[r] = {state.out + (row + r) * stride, state.total + (row + r) * kLanes, state.highest + row + r, stride};
    int num_scores = num_vectors * kLanes, position = tile.first_position + (row + r) / tile.group;
    if (is_scaled)
      for (int j = 0; j < num_scores; j += kLanes) multiply_vector(row_scores + j, load(cached.key_scales + j));
    if (tile.softcap) bend_row(row_scores, num_scores, tile.softcap * kLog2E);
    if (position + 1 - cached.first < num_scores || tile.window || tile.chunk)
      mask_scores(row_scores, cached.first, num_scores, position, tile.oldest(position));
    rows[r].raise(row_scores, num_vectors);
  }
  for (int r = 0; r < R; ++r)
    rows[r].template add_scores<is_scaled>(scores + r * kKeyTile, num_vectors, cached.value_scales);
  multiply_vectors<R>(stride / kLanes, num_keys, scores, kKeyTile, cached.values, state.out + row * stride, stride, true);
}

template <bool is_scaled, class Keys, class Values>
void add_all_rows(const QueryTile& tile, const ReadTile<Keys, Values>& cached, const HeadState& state) {
  int rows = tile.count * tile.group;
  for (int row = 0; row < rows; row += kMicroRows) {
    switch (rows - row) {
      case 1: add_rows<1, is_scaled>(tile, cached, state, row); break;
      case 2: add_rows<2, is_scaled>(tile, cached, state, row); break;
      case 3: add_rows<3, is_scaled>(tile, cached, state, row); break;
      case 4: add_rows<4, is_scaled>(tile, cached, state, row); break;
      case 5: add_rows<5, is_scaled>(tile, cached, state, row); break;
      default: add_rows<kMicroRows, is_scaled>(tile, cached, state, row); break;
    }
  }
}

// Adds one key tile of one head to its state; `next` is the tile that follows.
template <class T>
void add_tile(const QueryTile& tile, const CachedTile<T>& cached, const CachedTile<T>& next, AttentionScratch& scratch,
              const HeadState& state) {
  int dim = tile.head_dim;
  auto add = [&](const auto& keys, const auto& values) {
    ReadTile<std::decay_t<decltype(keys)>, std::decay_t<decltype(values)>> read{keys, values, cached.first, cached.count};
    if (kIsScaled<T>) cached.copy_scales(read.key_scales, read.value_scales);
    add_all_rows<kIsScaled<T>>(tile, read, state);
  };
  // For many rows, the tile is converted to floats once; for few rows, it is converted in registers.
  if (tile.count * tile.group <= kMicroRows && cached.has_whole_vectors() && dim == padded_dim(dim)) {
    add(cached.keys(next), cached.values(next));
  } else {
    Matrix keys = cached.copy_keys(scratch.keys.data());
    add(keys, cached.copy_values(scratch.values.data()));
  }
}

}  // namespace

void AttentionScratch::reserve(int max_rows, int num_kv_heads, int head_dim) {
  size_t all_rows = static_cast<size_t>(max_rows) * num_kv_heads;
  size_t stride = static_cast<size_t>(padded_dim(head_dim));
  q.resize(all_rows * head_dim);
  keys.assign(static_cast<size_t>(head_dim) * kKeyTile, 0.0f);
  values.assign(kKeyTile * stride, 0.0f);
  out.resize(all_rows * stride);
  highest.resize(all_rows);
  total.resize(all_rows * kLanes);
}

template <class T> void attend(const HeadCache& cache, const QueryTile& tile, AttentionScratch& scratch) {
  int rows = tile.count * tile.group, dim = tile.head_dim;
  for (int h = 0; h < tile.num_kv_heads; ++h) HeadState(scratch, h, rows, dim).start(tile, h);
  int num_keys = tile.first_position + tile.count, last = (num_keys - 1) / kKeyTile * kKeyTile;
  auto cached = [&](int first, int h) {
    return CachedTile<T>{cache, h, dim, first, std::min(kKeyTile, num_keys - first)};
  };
  for (int first = tile.oldest(tile.first_position) / kKeyTile * kKeyTile; first < num_keys; first += kKeyTile)
    for (int h = 0; h < tile.num_kv_heads; ++h) {
      auto next = h + 1 < tile.num_kv_heads ? cached(first, h + 1) : cached(std::min(first + kKeyTile, last), 0);
      add_tile(tile, cached(first, h), next, scratch, HeadState(scratch, h, rows, dim));
    }
  for (int h = 0; h < tile.num_kv_heads; ++h) HeadState(scratch, h, rows, dim).finish(tile, h);
}

template void attend<float>(const HeadCache&, const QueryTile&, AttentionScratch&);
template void attend<uint16_t>(const HeadCache&, const QueryTile&, AttentionScratch&);
template void attend<int16_t>(const HeadCache&, const QueryTile&, AttentionScratch&);
template void attend<int8_t>(const HeadCache&, const QueryTile&, AttentionScratch&);

}  // namespace midstream
