#include "attention.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace midstream {
namespace {

constexpr int kVectors = 2;     // of a micro kernel
constexpr int kWideVectors = 4;  // of one that has few rows
constexpr int kWideRows = 3;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int padded_dim(int head_dim) { return round_up(head_dim, kVectors * kLanes); }

F load_element(const float* p) { return load(p); }
F load_element(const uint16_t* p) { return load_bf16(p); }
F load_element(const int16_t* p) { return load_int16(p); }
F load_element(const int8_t* p) { return load_int8(p); }
template <class T> constexpr bool kIsScaled = std::is_same_v<T, int16_t> || std::is_same_v<T, int8_t>;
float to_float(float x) { return x; }
float to_float(int16_t x) { return x; }
float to_float(int8_t x) { return x; }
float to_float(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// Keys of a tile [head_dim, kKeyTile], where each vector of neighbouring slots may lie elsewhere.
template <class T> struct KeyTile {
  const T* vectors[kKeyTile / kLanes];
  int64_t stride;  // elements from one d to the next
  [[gnu::always_inline]] F operator()(int d, int key) const { return load_element(vectors[key / kLanes] + d * stride); }
};

// Values of a tile [kKeyTile, padded_dim], each row in its place.
template <class T> struct ValueTile {
  const T* const* rows;
  [[gnu::always_inline]] F operator()(int key, int d) const { return load_element(rows[key] + d); }
};

// Where a tile lies in the cache of a head.
template <class T> struct TilePlaces {
  const T* keys[kKeyTile];    // d = 0; the next d is block_size further
  const T* values[kKeyTile];  // rows
  const T *key_scales[kKeyTile], *value_scales[kKeyTile];
  int count;

  TilePlaces(const HeadCache& cache, int head_dim, int first, int num_keys) : count(num_keys) {
    int block = first / cache.block_size, offset = first % cache.block_size;
    for (int j = 0; j < count; ++j) {
      int64_t start = cache.block_table[block] * cache.block_stride;
      int64_t scale = start + static_cast<int64_t>(head_dim) * cache.block_size + offset * (sizeof(float) / sizeof(T));
      keys[j] = static_cast<const T*>(cache.keys) + start + offset;
      values[j] = static_cast<const T*>(cache.values) + start + static_cast<int64_t>(offset) * head_dim;
      key_scales[j] = static_cast<const T*>(cache.keys) + scale;
      value_scales[j] = static_cast<const T*>(cache.values) + scale;
      if (++offset == cache.block_size) offset = 0, ++block;
    }
  }

  TilePlaces of_head(int h, int64_t head_stride) const {
    TilePlaces places = *this;
    for (int j = 0; j < count; ++j) {
      places.keys[j] += h * head_stride, places.values[j] += h * head_stride;
      if (kIsScaled<T>) places.key_scales[j] += h * head_stride, places.value_scales[j] += h * head_stride;
    }
    return places;
  }

  // Vectors of slots must not cross a block's end. Those without a key repeat the first: their scores get masked.
  KeyTile<T> key_tile(int block_size) const {
    KeyTile<T> tile{{}, block_size};
    for (int j = 0; j < kKeyTile; j += kLanes) tile.vectors[j / kLanes] = keys[j < count ? j : 0];
    return tile;
  }
};

// keys [head_dim, kKeyTile] as floats.
template <class T> KeyTile<float> copy_keys(const TilePlaces<T>& places, int block_size, int head_dim, float* keys) {
  if (block_size % kLanes == 0) {
    KeyTile<T> tile = places.key_tile(block_size);
    for (int d = 0; d < head_dim; ++d)
      for (int j = 0; j < kKeyTile; j += kLanes) store(keys + d * kKeyTile + j, tile(d, j));
  } else {
    for (int d = 0; d < head_dim; ++d)
      for (int j = 0; j < places.count; ++j)
        keys[d * kKeyTile + j] = to_float(places.keys[j][static_cast<int64_t>(d) * block_size]);
  }
  KeyTile<float> tile{{}, kKeyTile};
  for (int j = 0; j < kKeyTile; j += kLanes) tile.vectors[j / kLanes] = keys + j;
  return tile;
}

// values [places.count, padded_dim] as floats; the columns from head_dim on stay zero.
template <class T> void copy_values(const TilePlaces<T>& places, int head_dim, float* values) {
  int stride = padded_dim(head_dim);
  for (int j = 0; j < places.count; ++j)
    for (int d = 0; d < head_dim; ++d) values[j * stride + d] = to_float(places.values[j][d]);
}

// c[rows, n] (+)= a[rows, k] b[k, n]; n is a multiple of kVectors vectors.
template <class Right>
void multiply_rows(int rows, int n, int k, const float* a, int64_t lda, const Right& b, float* c, int64_t ldc, bool accumulate) {
  if (rows <= kWideRows && n % (kWideVectors * kLanes) == 0) {
    multiply<kWideVectors>(rows, n, k, a, lda, b, c, ldc, accumulate);
  } else {
    multiply<kVectors>(rows, n, k, a, lda, b, c, ldc, accumulate);
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

// scores [rows, kKeyTile] times the scales of their keys or values.
template <class T> void scale_columns(const T* const* scales, int count, int rows, float* scores) {
  float factors[kKeyTile] = {};
  for (int j = 0; j < count; ++j) std::memcpy(&factors[j], scales[j], sizeof(float));
  for (int row = 0; row < rows; ++row)
    for (int j = 0; j < kKeyTile; j += kLanes)
      store(scores + row * kKeyTile + j, mul(load(scores + row * kKeyTile + j), load(factors + j)));
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

// Takes one key tile of one head into its state.
template <class T>
void add_tile(const QueryTile& tile, int first_key, const TilePlaces<T>& places, int block_size, AttentionScratch& scratch,
              const HeadState& state) {
  int rows = tile.count * tile.group, dim = tile.head_dim, stride = padded_dim(dim);
  // What many rows read is converted once; few rows convert it in registers.
  bool is_read_often = sizeof(T) != sizeof(float) && rows > kMicroRows;
  float* scores = scratch.scores.data();
  auto score = [&](const auto& keys) { multiply_rows(rows, kKeyTile, dim, state.q, dim, keys, scores, kKeyTile, false); };
  if (is_read_often || block_size % kLanes) {
    score(copy_keys(places, block_size, dim, scratch.keys.data()));
  } else {
    score(places.key_tile(block_size));
  }
  if (kIsScaled<T>) scale_columns(places.key_scales, places.count, rows, scores);
  for (int row = 0; row < rows; ++row) {
    float* row_scores = scores + row * kKeyTile;
    mask_scores(row_scores, first_key, tile.first_position + row / tile.group, tile.window);
    softmax_step(row_scores, state.out + row * stride, stride, state.highest[row], state.total[row]);
  }
  if (kIsScaled<T>) scale_columns(places.value_scales, places.count, rows, scores);
  auto sum = [&](const auto& values) {
    multiply_rows(rows, stride, places.count, scores, kKeyTile, values, state.out, stride, true);
  };
  if (is_read_often || dim != stride) {
    copy_values(places, dim, scratch.values.data());
    sum(Matrix{scratch.values.data(), stride});
  } else {
    sum(ValueTile<T>{places.values});
  }
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
  for (; first < num_keys; first += kKeyTile) {
    TilePlaces<T> places(cache, dim, first, std::min(kKeyTile, num_keys - first));
    for (int h = 0; h < tile.num_kv_heads; ++h)
      add_tile(tile, first, places.of_head(h, cache.head_stride), cache.block_size, scratch,
               HeadState(scratch, h, rows, dim));
  }
  for (int h = 0; h < tile.num_kv_heads; ++h) {
    HeadState state(scratch, h, rows, dim);
    store_outputs(tile, h, state.out, state.total);
  }
}

template void attend<float>(const HeadCache&, const QueryTile&, AttentionScratch&);
template void attend<uint16_t>(const HeadCache&, const QueryTile&, AttentionScratch&);
template void attend<int16_t>(const HeadCache&, const QueryTile&, AttentionScratch&);
template void attend<int8_t>(const HeadCache&, const QueryTile&, AttentionScratch&);

}  // namespace midstream
