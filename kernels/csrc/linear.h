// The linear layer over packed weights.
#pragma once
#include "api.h"
#include "dot_panel.h"
#include "lora.h"
#include "tile_panel.h"
#include "thread_pool.h"

namespace midstream {

// What becomes of the sums of a linear layer.
enum class Output {
  kStore,    // out = sums + bias
  kAdd,      // out += sums + bias
  kSiluMul,  // panels alternate between gate and up: out = silu(gate) * up
};

// Scratch of one thread; reserve() may allocate, the rest of a step does not.
struct LinearScratch {
  AlignedVector<float> sums, tile;
  AlignedVector<uint64_t> dot_tile;
  AlignedVector<TileScratch> tiles;  // one, where tiles are used
  void reserve(int max_rows, bool can_use_tiles);
};

// Of all parts of a layer that is not gated.
int num_outputs_of(const MidstreamLinear& weight);

// Called by every thread of a running team; quantized is the team's. x [m, ldx] has zeros from weight.k up to a multiple of
// kBlock; out [m, ldout] is written in columns 0..num_outputs-1 only. Where lora is given, its deltas are added to the sums;
// those for gate and up lie one after the other. Bits of a row do not depend on m.
void linear(ThreadPool& pool, LinearScratch& scratch, QuantizedScratch& quantized, const MidstreamLinear& weight, int m,
            const float* x, int64_t ldx, Output output, int num_outputs, float* out, int64_t ldout,
            const LoraRows* lora = nullptr);

// Rows first..first+count-1 of an input, which meet the same one of many weights; first is a multiple of group_alignment.
struct RowGroup {
  int weight, first, count;
};
int group_alignment(const QuantizedScratch& quantized);

// The same for rows that each meet one of many weights of one shape and format, without input_order and next. Rows lie at the num_rows given places of x and
// out, groups in the order of their first row; of max_groups groups those without rows are last and have count 0. How often threads meet
// depends on num_rows and max_groups alone.
void grouped_linear(ThreadPool& pool, LinearScratch& scratch, QuantizedScratch& quantized, const MidstreamLinear* weights,
                    const RowGroup* groups, int max_groups, const int* places, int num_rows, const float* x, int64_t ldx,
                    Output output, int num_outputs, float* out, int64_t ldout);

}  // namespace midstream
