// The C interface that kernels/native.py binds.
#pragma once
#include <cstdint>

extern "C" {

struct MidstreamLinear {
  const void* packed;          // midstream_pack's output
  const float* bias;           // [n] or null
  const int32_t* input_order;  // [k]: column i of the weight meets number input_order[i] of the input; null: number i
  const MidstreamLinear* next;  // further outputs of the same input, in order; null for none, and in gated layers
  int32_t n, k, format;
  int32_t input;  // what it is rounded to (quantized_rows.h), where the format has integer products
};

struct MidstreamPool;

int32_t midstream_panel();  // output channels of a panel: gate and up weights alternate in rows of this many
bool midstream_has_integer_products(int format, int input);  // whether the input is rounded
int64_t midstream_packed_bytes(int format, int n, int k);
int64_t midstream_row_bytes(int format, int k);  // of a row of blocks
// Row i of the packed weight is row row_order[i] of source, or zeros where that is negative. source is float32 [*, k], or rows
// of blocks as kernels/cpu/linear.py describes them.
void midstream_pack(int format, bool has_blocks, const void* source, int n, int k, const int* row_order, void* packed);

MidstreamPool* midstream_pool_create(int num_threads, const int* cpus);
// From now on large products are made with tiles (AMX); false, and nothing changes, where there are none.
bool midstream_pool_use_tiles(MidstreamPool* pool);
void midstream_pool_destroy(MidstreamPool* pool);

// A mixture of experts in place of gate_up and down. Names and meanings are those of gpu_worker/models/description.py.
struct MidstreamMixture {
  MidstreamLinear router;                          // [num_experts, hidden]
  const MidstreamLinear *gate_up, *down;           // [num_experts]
  MidstreamLinear shared_gate_up, shared_down;     // where shared_size is not 0
  MidstreamLinear shared_gate;                     // [1, hidden]; packed is null where there is none
  const float* correction;                         // [num_experts] or null
  int32_t num_experts, num_active, expert_size, shared_size;
  int32_t scoring;                                 // 0 softmax, 1 softmax of the chosen, 2 sigmoid
  int32_t num_groups, num_active_groups;
  int32_t is_normalized, weighs_input;
  float scale;
};

// One decoder layer. Pointers stay the caller's and must outlive the decoder.
struct MidstreamLayer {
  MidstreamLinear qkv, o, gate_up, down;
  const float *attention_norm, *ffn_norm;                // [hidden], before attention and feed-forward network; or null
  const float *attention_output_norm, *ffn_output_norm;  // [hidden], after them; or null
  const float *q_norm, *k_norm;                          // [head_dim], or of all heads (norms_qk_rows); or null
  const float* sinks;                                    // [num_heads] or null
  const MidstreamMixture* mixture;                       // or null
  // [num_blocks, num_kv_heads], each of [head_dim, block_size] or [block_size, head_dim] and, for integers, block_size scales.
  void *k_cache, *v_cache;
  int32_t window;  // keys that a query sees, itself included; 0 for all
  int32_t chunk;   // a query sees no key before the last multiple of it; 0 for none
  int32_t table;   // of rotary angles; -1 for no rotary embedding
};

struct MidstreamDims {
  int32_t hidden, num_heads, num_kv_heads, head_dim, ffn, num_layers;
  int32_t num_blocks, block_size, num_positions;
  int32_t cache_format;  // 0 float32, 1 bfloat16; 2 int16 and 3 int8, with a float scale for each token and head
  float eps, scale;
  int32_t rotary_dim, is_interleaved;  // leading numbers of a head that are rotated, in pairs side by side or half apart
  int32_t has_layer_norm;              // norms of layers subtract the mean
  int32_t norms_qk_rows;               // q_norm and k_norm are of all heads of a token together
  int32_t has_unit_qk_norm;            // rotated queries and keys are brought to unit root mean square
  int32_t is_parallel;                 // the feed-forward network reads what attention reads
  int32_t activation;                  // 0 silu, 1 gelu by tanh, 2 gelu, 3 relu, 4 clamped swiglu; gate_up is gated with silu alone
  float softcap, residual_scale, embedding_scale, logits_scale, logits_softcap;  // soft caps: 0 for none
  const float* query_scales;           // [num_positions], of layers without rotary embedding; or null
};

// Adds (x a^T) b to a linear layer of x. a [rank, k], null where the adapter leaves the layer alone; b [rank, n] with the
// adapter's scale in it.
struct MidstreamLoraPair {
  const float *a, *b;
  int32_t rank;
};

struct MidstreamLoraLayer {
  MidstreamLoraPair q, k, v, o, gate, up, down;
};

// The tokens of one step, sequence after sequence.
struct MidstreamBatch {
  int32_t num_tokens, num_sequences, max_blocks;
  const int32_t* positions;      // [num_tokens]
  const int32_t* slot_mapping;   // [num_tokens]: block * block_size + offset
  const int32_t* query_starts;   // [num_sequences + 1]
  const int32_t* context_lens;   // [num_sequences]: keys of the sequence, this step's included
  const int32_t* block_tables;   // [num_sequences, max_blocks]
  const MidstreamLoraLayer* const* adapters;  // [num_sequences]: layers of its adapter, or null; null where none has one
};

// How a row's next token is drawn; docs/requests.md describes the fields.
struct MidstreamDraw {
  uint64_t seed;
  float temperature;  // 0: the first of the highest logits
  float top_p, min_p;
  int32_t top_k;  // 0: all
  int32_t sequence_index, position;
};

struct MidstreamDecoder;

// cos and sin are [tables, num_positions, rotary_dim / 2].
MidstreamDecoder* midstream_decoder_create(MidstreamPool* pool, const MidstreamDims* dims, const MidstreamLayer* layers,
                                           const float* cos, const float* sin);
void midstream_decoder_destroy(MidstreamDecoder* decoder);

// Runs layers first_layer..last_layer-1 on hidden [num_tokens, hidden], in place. Returns null, or what is wrong with the
// batch; then nothing was written.
const char* midstream_decoder_forward(MidstreamDecoder* decoder, const MidstreamBatch* batch, float* hidden, int first_layer,
                                      int last_layer);

// A table of tokens' embeddings: rows of floats, of bfloat16, or of GGUF blocks.
struct MidstreamEmbedding {
  const void* rows;
  int64_t row_bytes;
  int32_t num_rows, format;
};

// A whole step of tokens: embeds them, runs all layers, and chooses the next token of some of them. sampled [num_sampled] are
// indices of tokens, draws [num_sampled] how their next ones are drawn; null, and all are greedy. chosen and highest are those
// of midstream_draw. Returns null, or what is wrong; then nothing was written.
const char* midstream_decoder_choose(MidstreamDecoder* decoder, const MidstreamBatch* batch, const MidstreamEmbedding* embedding,
                                     const int32_t* token_ids, const MidstreamLinear* head, const float* norm,
                                     int32_t num_sampled, const int32_t* sampled, const MidstreamDraw* draws, int32_t* chosen,
                                     float* highest);

// chosen [num_rows] gets the next token of some rows of logits [*, n], highest [num_rows] their highest logits, NaN where one of
// the row is. Where that is not finite, nothing is drawn: chosen is its place. n is at least 1.
void midstream_draw(MidstreamPool* pool, int num_rows, const int32_t* rows, int n, const float* logits,
                    const MidstreamDraw* draws, int32_t* chosen, float* highest);

// out [m, head.n] = norm(hidden [m, hidden]) head, scaled and bent
void midstream_decoder_logits(MidstreamDecoder* decoder, const MidstreamLinear* head, const float* norm, int m,
                              const float* hidden, float* out);

// out [m, weight.n] = x [m, weight.k] weight + bias
void midstream_linear(MidstreamPool* pool, const MidstreamLinear* weight, int m, const float* x, float* out);
}
