// The C interface, to which kernels/cpu/library.py binds.
#pragma once
#include <cstdint>

extern "C" {

struct MidstreamLinear {
  const void* packed;          // written by midstream_pack
  const float* bias;           // [n] or null
  const int32_t* input_order;  // [k]: column i of the weight multiplies element input_order[i] of the input; null: element i
  const MidstreamLinear* next;  // layer for the next outputs of the same input; null if none, and in gated layers
  int32_t n, k, format;
  int32_t input;  // the type to which the input is rounded (quantized_rows.h), if the format has integer products
};

struct MidstreamPool;

int32_t midstream_panel();  // number of output channels in a panel; gate and up weights alternate in groups of this many rows
bool midstream_has_integer_products(int format, int input);  // returns whether the input is rounded
int64_t midstream_packed_bytes(int format, int n, int k);
int64_t midstream_row_bytes(int format, int k);  // size of a row of blocks
// Packs a weight. Row i of the packed weight is row row_order[i] of the source, or zeros if row_order[i] is negative. The source
// is float32 [*, k], or rows of blocks as described in kernels/cpu/linear.py.
void midstream_pack(int format, bool has_blocks, const void* source, int n, int k, const int* row_order, void* packed);

MidstreamPool* midstream_pool_create(int num_threads);
// Makes the pool use tiles (AMX) for large matrix products; returns false and changes nothing if tiles are not available.
bool midstream_pool_use_tiles(MidstreamPool* pool);
void midstream_pool_destroy(MidstreamPool* pool);

// A mixture of experts, which replaces gate_up and down. The fields have the names and meanings of
// gpu_worker/models/description.py.
struct MidstreamMixture {
  MidstreamLinear router;                          // [num_experts, hidden]
  const MidstreamLinear *gate_up, *down;           // [num_experts]
  MidstreamLinear shared_gate_up, shared_down;     // used if shared_size is not 0
  MidstreamLinear shared_gate;                     // [1, hidden]; `packed` is null if there is no gate
  const float* correction;                         // [num_experts] or null
  int32_t num_experts, num_active, expert_size, shared_size;
  int32_t scoring;                                 // 0: softmax; 1: softmax over the chosen experts; 2: sigmoid
  int32_t num_groups, num_active_groups;
  int32_t is_normalized, weighs_input;
  float scale;
};

// One decoder layer. The caller owns all pointers, which must outlive the decoder.
struct MidstreamLayer {
  MidstreamLinear qkv, o, gate_up, down;
  const float *attention_norm, *ffn_norm;                // [hidden], before attention and feed-forward network; or null
  const float *attention_output_norm, *ffn_output_norm;  // [hidden], after each of them; or null
  const float *q_norm, *k_norm;                          // [head_dim], or for all heads together (norms_qk_rows); or null
  const float* sinks;                                    // [num_heads] or null
  const MidstreamMixture* mixture;                       // or null
  // [num_blocks, num_kv_heads]. Each element is a matrix: of keys [head_dim, block_size], or of values [block_size, head_dim].
  // In integer formats it is followed by block_size scales.
  void *k_cache, *v_cache;
  int32_t window;  // number of keys to which a query attends, including its own; 0: all
  int32_t chunk;   // a query does not attend to keys before the last multiple of this position; 0: no chunks
  int32_t table;   // index of the table of rotary angles; -1: no rotary embedding
  // Keys and values are rounded to multiples of their scale by: 0: nothing; 1: float8 e4m3; 2: int8.
  int32_t rounding;
  float key_scale, value_scale;
};

struct MidstreamDims {
  int32_t hidden, num_heads, num_kv_heads, head_dim, ffn, num_layers;
  int32_t num_blocks, block_size, num_positions;
  int32_t cache_format;  // 0: float32; 1: bfloat16; 2: int16; 3: int8. Integers have a float scale per token and head.
  float eps, scale;
  int32_t rotary_dim, is_interleaved;  // the first rotary_dim elements of a head are rotated, in adjacent pairs if is_interleaved
  int32_t has_layer_norm;              // the norms of layers subtract the mean
  int32_t norms_qk_rows;               // q_norm and k_norm normalize all heads of a token together
  int32_t has_unit_qk_norm;            // rotated queries and keys are scaled to unit root mean square
  int32_t is_parallel;                 // the feed-forward network has the same input as attention
  int32_t activation;                  // 0: silu (gate_up is packed as gated); 1: gelu (tanh); 2: gelu; 3: relu; 4: clamped swiglu
  float softcap, residual_scale, embedding_scale, logits_scale, logits_softcap;  // a soft cap of 0 has no effect
  const float* query_scales;           // [num_positions], for layers without rotary embedding; or null
};

// Adds (x a^T) b to the output of a linear layer for x. a is [rank, k], or null if the adapter does not change the layer; b is
// [rank, n] and includes the adapter's scale.
struct MidstreamLoraPair {
  const float *a, *b;
  int32_t rank;
};

struct MidstreamLoraLayer {
  MidstreamLoraPair q, k, v, o, gate, up, down;
};

// The tokens of one step, grouped by sequence.
struct MidstreamBatch {
  int32_t num_tokens, num_sequences, max_blocks;
  const int32_t* positions;      // [num_tokens]
  const int32_t* slot_mapping;   // [num_tokens]: block * block_size + offset
  const int32_t* query_starts;   // [num_sequences + 1]
  const int32_t* context_lens;   // [num_sequences]: number of keys of each sequence, including those of this step
  const int32_t* block_tables;   // [num_sequences, max_blocks]
  const MidstreamLoraLayer* const* adapters;  // [num_sequences]: layers of each sequence's adapter, or null; null if none has one
  int32_t max_threads;  // at most the threads of the pool
};

// How a row's next token is drawn; docs/requests.md describes the fields.
struct MidstreamDraw {
  uint64_t seed;
  float temperature;  // 0: choose the first of the highest logits
  float top_p, min_p;
  int32_t top_k;  // 0: all
  int32_t sequence_index, position;
};

struct MidstreamDecoder;

// cos and sin are [tables, num_positions, rotary_dim / 2].
MidstreamDecoder* midstream_decoder_create(MidstreamPool* pool, const MidstreamDims* dims, const MidstreamLayer* layers,
                                           const float* cos, const float* sin);
void midstream_decoder_destroy(MidstreamDecoder* decoder);

// Runs layers first_layer..last_layer-1 on hidden [num_tokens, hidden], in place. Returns null, or an error message if the batch
// is invalid; in that case nothing is written.
const char* midstream_decoder_forward(MidstreamDecoder* decoder, const MidstreamBatch* batch, float* hidden, int first_layer,
                                      int last_layer);

// An embedding table, with rows of float32, bfloat16 or GGUF blocks.
struct MidstreamEmbedding {
  const void* rows;
  int64_t row_bytes;
  int32_t num_rows, format;
};

// Runs a whole step: embeds the tokens, runs all layers, and chooses the next token after some of them. sampled [num_sampled]
// are the indices of these tokens, and draws [num_sampled] their sampling parameters; null means greedy. chosen and highest are
// as in midstream_draw. Returns null, or an error message; in that case nothing is written.
const char* midstream_decoder_choose(MidstreamDecoder* decoder, const MidstreamBatch* batch, const MidstreamEmbedding* embedding,
                                     const int32_t* token_ids, const MidstreamLinear* head, const float* norm,
                                     int32_t num_sampled, const int32_t* sampled, const MidstreamDraw* draws, int32_t* chosen,
                                     float* highest);

// Writes the next token of some rows of logits [*, n] to chosen [num_rows], and their highest logits to highest [num_rows]: NaN
// if a row contains NaN. If a row's highest logit is not finite, chosen is its index and nothing is drawn. n is at least 1.
void midstream_draw(MidstreamPool* pool, int num_rows, const int32_t* rows, int n, const float* logits,
                    const MidstreamDraw* draws, int32_t* chosen, float* highest);

// out [m, head.n] = norm(hidden [m, hidden]) head, multiplied by logits_scale, with logits_softcap applied
void midstream_decoder_logits(MidstreamDecoder* decoder, const MidstreamLinear* head, const float* norm, int m,
                              const float* hidden, float* out);

// out [m, weight.n] = x [m, weight.k] weight + bias
void midstream_linear(MidstreamPool* pool, const MidstreamLinear* weight, int m, const float* x, float* out);
}
