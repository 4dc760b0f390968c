#include "linear.h"

#include <algorithm>
#include <cstring>

#include "gemm.h"

namespace midstream {
namespace {

// Number of blocks whose unpacked weights fit in the L1 cache while all rows use them.
constexpr int kTileBlocks = 24 * 1024 / (kPanel * 4 * kBlock);

// Number of rows that use a panel together: their input fits in the L2 cache, and work at the end of many rows can still be
// distributed over the threads. A multiple of all sizes of row tiles.
constexpr int kRowGroup = 240;

// For few rows: weights are unpacked in registers, and are not stored.
template <class Block, int R>
void sum_direct(const uint8_t* panel, int num_blocks, const float* x, int64_t ldx, float* sums) {
  F sum[R][kPanelVectors];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) sum[r][v] = zero();
  for (int b = 0; b < num_blocks; ++b) {
    const float* part = x + b * kBlock;
    Block::unpack(panel, b, [&](int k, int v, F w) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][v] = fma(set1(part[r * ldx + k]), w, sum[r][v]);
    });
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) store(sums + r * kPanel + v * kLanes, sum[r][v]);
}

// For many rows: weights are unpacked once to a tile that all rows use.
template <class Block>
void sum_tiled(const uint8_t* panel, int num_blocks, int m, const float* x, int64_t ldx, float* sums, float* tile) {
  for (int first = 0; first < num_blocks; first += kTileBlocks) {
    int count = std::min(kTileBlocks, num_blocks - first);
    for (int b = 0; b < count; ++b) {
      float* part = tile + b * kBlock * kPanel;
      Block::unpack(panel, first + b, [&](int k, int v, F w) __attribute__((always_inline)) { store(part + k * kPanel + v * kLanes, w); });
    }
    multiply<kMicroVectors>(m, kPanel, count * kBlock, x + first * kBlock, ldx, Matrix{tile, kPanel}, sums, kPanel, first > 0);
  }
}

void scale_columns(const float* scales, int m, float* sums) {
  for (int r = 0; r < m; ++r)
    for (int v = 0; v < kPanelVectors; ++v)
      store(sums + r * kPanel + v * kLanes, mul(load(sums + r * kPanel + v * kLanes), load(scales + v * kLanes)));
}

template <class Block>
void sum_floats(const uint8_t* panel, int k, int m, const float* x, int64_t ldx, float* sums, float* tile) {
  int num_blocks = round_up(k, kBlock) / kBlock;
  if (m == 1) {
    sum_direct<Block, 1>(panel, num_blocks, x, ldx, sums);
  } else {
    sum_tiled<Block>(panel, num_blocks, m, x, ldx, sums, tile);
  }
}

void sum_floats(Format format, const uint8_t* panel, int k, int m, const float* x, int64_t ldx, float* sums, float* tile) {
  with_block(format, [&](auto block) { sum_floats<decltype(block)>(panel, k, m, x, ldx, sums, tile); });
}

// sums [m, kPanel] = x [m, k] panel [k, kPanel]. If `quantized` is not null, it is used instead of x.
void sum_panel(const MidstreamLinear& weight, int panel_index, int m, const float* x, int64_t ldx,
               const QuantizedRows* quantized, LinearScratch& scratch, float* sums) {
  Format format = static_cast<Format>(weight.format);
  int64_t bytes = panel_bytes(format, weight.k);
  const uint8_t* panel = static_cast<const uint8_t*>(weight.packed) + panel_index * bytes;
  if (quantized && quantized->has_tiles) {
    sum_tiles(format, panel, m, *quantized, sums, scratch.tiles[0]);
  } else if (quantized) {
    sum_dots(format, panel, m, *quantized, sums, scratch.dot_tile.data());
  } else {
    sum_floats(format, panel, weight.k, m, x, ldx, sums, scratch.tile.data());
  }
  if (format == Format::kInt8) scale_columns(reinterpret_cast<const float*>(panel + bytes) - kPanel, m, sums);
}

// Adds the columns first..first+width-1 of the deltas of m rows to a panel's sums.
void add_deltas(const LoraRows& lora, int row, int m, int first, int width, float* sums) {
  for (int r = 0; r < m; ++r)
    if (const float* delta = lora.delta(row + r))
      for (int i = 0; i < width; ++i) sums[r * kPanel + i] += delta[first + i];
}

// Writes a vector of outputs. For kSiluMul, `bias` contains the up values, by which the activated gates are multiplied.
template <Output output> [[gnu::always_inline]] inline void write_vector(const float* sums, const float* bias, float* out) {
  F x = load(sums);
  if (output == Output::kSiluMul) x = mul(silu(x), load(bias));
  if (output != Output::kSiluMul && bias) x = add(x, load(bias));
  store(out, output == Output::kAdd ? add(load(out), x) : x);
}

// Writes the first `width` columns of a panel's row.
template <Output output, bool has_bias> void write_row(const float* sums, const float* bias, int width, float* out) {
  if (width == kPanel) {
#pragma GCC unroll 4
    for (int i = 0; i < kPanel; i += kLanes) write_vector<output>(sums + i, has_bias ? bias + i : nullptr, out + i);
    return;
  }
  int whole = width / kLanes * kLanes, rest = width - whole;
  for (int i = 0; i < whole; i += kLanes) write_vector<output>(sums + i, has_bias ? bias + i : nullptr, out + i);
  if (rest == 0) return;
  // bias and out end before a whole vector.
  float last_bias[kLanes] = {}, last_out[kLanes] = {};
  if (has_bias) std::copy_n(bias + whole, rest, last_bias);
  std::copy_n(out + whole, rest, last_out);
  write_vector<output>(sums + whole, has_bias ? last_bias : nullptr, last_out);
  std::copy_n(last_out, rest, out + whole);
}

// Writes the first `width` columns of a panel's rows. For kSiluMul, `bias` has a row of kPanel values for each row.
template <Output output, bool has_bias>
void write_rows(int m, const float* sums, const float* bias, int width, float* out, int64_t ldout) {
  for (int r = 0; r < m; ++r)
    write_row<output, has_bias>(sums + r * kPanel, output == Output::kSiluMul ? bias + r * kPanel : bias, width, out + r * ldout);
}

void write_rows(Output output, int m, const float* sums, const float* bias, int width, float* out, int64_t ldout) {
  switch (output) {
    case Output::kStore: return (bias ? write_rows<Output::kStore, true> : write_rows<Output::kStore, false>)(m, sums, bias, width, out, ldout);
    case Output::kAdd: return (bias ? write_rows<Output::kAdd, true> : write_rows<Output::kAdd, false>)(m, sums, bias, width, out, ldout);
    case Output::kSiluMul: return write_rows<Output::kSiluMul, true>(m, sums, bias, width, out, ldout);
  }
}

}  // namespace

void LinearScratch::reserve(int max_rows, bool can_use_tiles) {
  size_t size = static_cast<size_t>(round_up(std::min(max_rows, kRowGroup), kTileRows)) * 2 * kPanel;
  if (sums.size() < size) sums.resize(size);
  dot_tile.resize(kDotTileBytes / sizeof(uint64_t));
  tile.resize(kTileBlocks * kBlock * kPanel);
  tiles.resize(can_use_tiles);
}

namespace {

// Copies the rows of the input in the order of the weight's columns.
const float* reorder(ThreadPool& pool, QuantizedScratch& quantized, const MidstreamLinear& weight, int m, const float* x,
                     int64_t ldx) {
  float* rows = quantized.ordered.data();
  int64_t stride = round_up(weight.k, kBlock);
  pool.for_each(m, pool.grain(m), [&](int r) {
    for (int i = 0; i < weight.k; ++i) rows[r * stride + i] = x[r * ldx + weight.input_order[i]];
    std::fill(rows + r * stride + weight.k, rows + (r + 1) * stride, 0.0f);
  });
  return rows;
}

// Runs one of the weights of a layer; its first output is number first_output of the layer.
void run_part(ThreadPool& pool, LinearScratch& scratch, QuantizedScratch& quantized, const MidstreamLinear& weight, int m,
              const float* x, int64_t ldx, Output output, int num_outputs, float* out, int64_t ldout, const LoraRows* lora,
              int first_output) {
  if (weight.input_order) {
    x = reorder(pool, quantized, weight, m, x, ldx);
    ldx = round_up(weight.k, kBlock);
  }
  Format format = static_cast<Format>(weight.format);
  Input input = static_cast<Input>(weight.input);
  bool is_quantized = has_dots(format, input), is_gated = output == Output::kSiluMul;
  QuantizedRows rows = quantized.rows(m, weight.k, format, is_quantized ? input : Input::kFloats);
  if (!rows.has_tiles) rows.num_split = num_split_rows(format, input, m);
  if (!rows.has_tiles && has_pair_products(format, input, m)) rows.products = quantized.products.data();
  bool is_prepared = is_quantized || rows.has_tiles;
  // Rows of a tile share cache lines, so one thread prepares all of them.
  int grain = round_up(pool.grain(m), rows.row_tile());
  if (is_prepared) pool.for_each(m, grain, [&](int r) { rows.quantize(r, x + r * ldx, format); });
  if (rows.has_tiles) configure_tiles(std::min(m, kTileRows), num_weight_tiles(format));
  float* sums = scratch.sums.data();
  float* up = sums + static_cast<int64_t>(round_up(std::min(m, kRowGroup), kTileRows)) * kPanel;
  int num_panels = round_up(num_outputs, kPanel) / kPanel, count = num_panels * (round_up(m, kRowGroup) / kRowGroup);
  pool.for_each(count, pool.grain(count), [&](int task) {
    int i = task % num_panels, row = task / num_panels * kRowGroup, num_rows = std::min(kRowGroup, m - row);
    QuantizedRows prepared = rows.from(row);
    const float* input_rows = x + row * ldx;
    auto sum = [&](int panel, float* to) {
      sum_panel(weight, panel, num_rows, input_rows, ldx, is_prepared ? &prepared : nullptr, scratch, to);
    };
    sum(is_gated ? 2 * i : i, sums);
    if (is_gated) sum(2 * i + 1, up);
    int first = i * kPanel, width = std::min(kPanel, num_outputs - first);
    if (lora) add_deltas(*lora, row, num_rows, first_output + first, width, sums);
    if (lora && is_gated) add_deltas(*lora, row, num_rows, num_outputs + first, width, up);
    const float* bias = weight.bias ? weight.bias + first : nullptr;
    write_rows(output, num_rows, sums, is_gated ? up : bias, width, out + row * ldout + first, ldout);
  });
  if (rows.has_tiles) release_tiles();
}

}  // namespace

int num_outputs_of(const MidstreamLinear& weight) {
  int count = 0;
  for (const MidstreamLinear* part = &weight; part; part = part->next) count += part->n;
  return count;
}

void linear(ThreadPool& pool, LinearScratch& scratch, QuantizedScratch& quantized, const MidstreamLinear& weight, int m,
            const float* x, int64_t ldx, Output output, int num_outputs, float* out, int64_t ldout, const LoraRows* lora) {
  int first = 0;
  for (const MidstreamLinear* part = &weight; part; first += part->n, part = part->next) {
    int count = weight.next ? part->n : num_outputs;
    run_part(pool, scratch, quantized, *part, m, x, ldx, output, count, out + first, ldout, lora, first);
  }
}

int group_alignment(const QuantizedScratch& quantized) {
  // A multiple of both kTileRows (if tiles are used) and kRowTile.
  static_assert(kRowGroup % (3 * kTileRows) == 0 && 3 * kTileRows % kRowTile == 0);
  return quantized.can_use_tiles ? 3 * kTileRows : kRowTile;
}

// Returns the group that contains a place.
static const RowGroup& group_of(const RowGroup* groups, int num_groups, int place) {
  return std::upper_bound(groups, groups + num_groups, place, [](int p, const RowGroup& group) { return p < group.first; })[-1];
}

void grouped_linear(ThreadPool& pool, LinearScratch& scratch, QuantizedScratch& quantized, const MidstreamLinear* weights,
                    const RowGroup* groups, int max_groups, const int* places, int num_rows, const float* x, int64_t ldx,
                    Output output, int num_outputs, float* out, int64_t ldout) {
  Format format = static_cast<Format>(weights->format);
  Input input = static_cast<Input>(weights->input);
  bool is_quantized = has_dots(format, input), is_gated = output == Output::kSiluMul;
  // The average number of rows per group determines the method; the bits do not depend on it.
  int usual_rows = std::max(1, num_rows / max_groups);
  QuantizedRows rows = quantized.rows(usual_rows, weights->k, format, is_quantized ? input : Input::kFloats);
  if (!rows.has_tiles && has_pair_products(format, input, usual_rows)) rows.products = quantized.products.data();
  bool is_prepared = is_quantized || rows.has_tiles;
  auto rows_of = [&](const RowGroup& group, int first) {
    QuantizedRows some = rows.from_group(group.first);
    some.num_split = rows.has_tiles ? 0 : num_split_rows(format, input, group.count);
    return some.from(first - group.first);
  };
  if (is_prepared)
    pool.for_each(num_rows, pool.grain(num_rows), [&](int r) {
      const RowGroup& group = group_of(groups, max_groups, places[r]);
      rows_of(group, group.first).quantize(places[r] - group.first, x + places[r] * ldx, format);
    });
  float* sums = scratch.sums.data();
  float* up = sums + scratch.sums.size() / 2;
  int num_panels = round_up(num_outputs, kPanel) / kPanel, count = num_panels * max_groups;
  pool.for_each(count, pool.grain(count), [&](int task) {
    const RowGroup& group = groups[task / num_panels];
    const MidstreamLinear& weight = weights[group.weight];
    int i = task % num_panels, column = i * kPanel, width = std::min(kPanel, num_outputs - column);
    const float* bias = weight.bias ? weight.bias + column : nullptr;
    for (int first = group.first, end = group.first + group.count; first < end; first += kRowGroup) {
      int m = std::min(kRowGroup, end - first);
      QuantizedRows prepared = rows_of(group, first);
      const float* input_rows = x + first * ldx;
      if (rows.has_tiles) configure_tiles(std::min(m, kTileRows), num_weight_tiles(format));
      auto sum = [&](int panel, float* to) {
        sum_panel(weight, panel, m, input_rows, ldx, is_prepared ? &prepared : nullptr, scratch, to);
      };
      sum(is_gated ? 2 * i : i, sums);
      if (is_gated) sum(2 * i + 1, up);
      write_rows(output, m, sums, is_gated ? up : bias, width, out + first * ldout + column, ldout);
    }
  });
  if (rows.has_tiles) release_tiles();
}

}  // namespace midstream
