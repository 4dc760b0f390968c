// The linear layer over packed weights.
#pragma once
#include "api.h"
#include "dot_panel.h"
#include "lora.h"
#include "tile_panel.h"
#include "thread_pool.h"

namespace midstream {

// How the sums of a linear layer are written to its output.
enum class Output {
  kStore,    // out = sums + bias
  kAdd,      // out += sums + bias
  kSiluMul,  // panels alternate between gate and up: out = silu(gate) * up
};

// Scratch memory of one thread. Only reserve() allocates memory.
struct LinearScratch {
  AlignedVector<float> sums, tile;
  AlignedVector<uint64_t> dot_tile;
  AlignedVector<TileScratch> tiles;  // one element if tiles are used, otherwise none
  void reserve(int max_rows, bool can_use_tiles);
};

// Returns the number of outputs of all parts of a layer, which must not be gated.
int num_outputs_of(const MidstreamLinear& weight);

// Computes a linear layer; called by every thread of a running team, with the team's `quantized`. x [m, ldx] has zeros from
// weight.k up to a multiple of kBlock; only the columns 0..num_outputs-1 of out [m, ldout] are written. The deltas of `lora`, if
// not null, are added to the sums; those for gate and up follow each other. The bits of a row do not depend on m.
void linear(ThreadPool& pool, LinearScratch& scratch, QuantizedScratch& quantized, const MidstreamLinear& weight, int m,
            const float* x, int64_t ldx, Output output, int num_outputs, float* out, int64_t ldout,
            const LoraRows* lora = nullptr);

// Rows first..first+count-1 of an input, which use the same weight; `first` is a multiple of group_alignment().
struct RowGroup {
  int weight, first, count;
};
int group_alignment(const QuantizedScratch& quantized);

// Does the same for rows that each use one of several weights. All weights have the same shape and format, and neither
// input_order nor next. The num_rows rows are at the given places of x and out. Groups are in the order of their first
// row; those without rows come last and have count 0. The number of barriers depends only on num_rows and max_groups.
void grouped_linear(ThreadPool& pool, LinearScratch& scratch, QuantizedScratch& quantized, const MidstreamLinear* weights,
                    const RowGroup* groups, int max_groups, const int* places, int num_rows, const float* x, int64_t ldx,
                    Output output, int num_outputs, float* out, int64_t ldout);

}  // namespace midstream
