// A decoder that runs all of its layers in one call.
#pragma once
#include "attention.h"
#include "mixture.h"
#include "pool.h"

struct MidstreamDecoder {
  MidstreamDecoder(MidstreamPool* pool, const MidstreamDims& dims, const MidstreamLayer* layers, const float* cos,
                   const float* sin);

  const char* forward(const MidstreamBatch& batch, float* hidden, int first_layer, int last_layer);
  void logits(const MidstreamLinear& head, const float* norm, int m, const float* hidden, float* out);
  const char* choose(const MidstreamBatch& batch, const MidstreamEmbedding& embedding, const int32_t* token_ids,
                     const MidstreamLinear& head, const float* norm, int num_sampled, const int32_t* sampled,
                     const MidstreamDraw* draws, int32_t* chosen, float* highest);

 private:
  struct AttentionTask {
    int sequence, first_query, num_queries, kv_head, num_kv_heads;
  };
  // A matrix with one row per token of the step. Columns from width to stride are zero, as linear() requires.
  struct Rows {
    void reserve(int num_rows, int width);
    float* row(int i) { return data.data() + i * stride; }
    std::vector<float> data;
    int64_t stride = 0;
  };

  const char* check(const MidstreamBatch& batch) const;
  void reserve(int num_tokens);
  void prepare(const MidstreamBatch& batch);
  int num_threads(const MidstreamBatch& batch) const;
  void plan_attention(const MidstreamBatch& batch);
  int qkv_width() const { return (dims_.num_heads + 2 * dims_.num_kv_heads) * dims_.head_dim; }
  void run_layer(int thread, int index, const MidstreamBatch& batch, float* hidden);
  const midstream::LoraRows* adapt(int index, const MidstreamLinear& weight, Rows& x,
                                   std::initializer_list<midstream::LoraPart> parts);
  void norm_row(const float* x, const float* weight, float* out) const;
  void norm_rows(int m, const float* x, const float* weight);
  void add_linear(int thread, const MidstreamLinear& weight, int m, Rows& x, const float* norm, float* hidden,
                  const midstream::LoraRows* lora);
  void add_rows(int m, Rows& x, const float* norm, float* hidden);
  void run_gate(int thread, const MidstreamLinear& gate_up, int m, int size, const midstream::LoraRows* lora);
  void run_mixture(int thread, const MidstreamLayer& layer, int m, float* hidden);
  void finish_logits(float* logits, int n) const;
  void rotate_and_store(const MidstreamLayer& layer, const MidstreamBatch& batch, int token);
  template <class T> void store_cache(const MidstreamLayer& layer, int slot, const float* k, const float* v);
  template <class T> void attend_task(int thread, const MidstreamLayer& layer, const MidstreamBatch& batch,
                                      const AttentionTask& task);
  void run_attention(int thread, const MidstreamLayer& layer, const MidstreamBatch& batch, const AttentionTask& task);
  void run_linear(int thread, const MidstreamLinear& weight, int m, Rows& x, midstream::Output output, int num_outputs,
                  float* out, int64_t stride, const midstream::LoraRows* lora = nullptr);

  midstream::ThreadPool& threads_;
  MidstreamPool& pool_;
  const MidstreamDims dims_;
  const std::vector<MidstreamLayer> layers_;
  const float *cos_, *sin_;
  const int group_, queries_per_task_;
  std::vector<midstream::AttentionScratch> attention_scratch_;
  std::vector<AttentionTask> tasks_;
  midstream::LoraRows lora_;
  midstream::ExpertPlan plan_;
  const MidstreamMixture* largest_mixture_ = nullptr;  // the one with most experts; null if there is none
  int most_active_ = 0, most_features_ = 0, expert_features_ = 0;
  Rows normed_, qkv_, attended_, gated_, halves_, added_;
  Rows router_, gathered_, expert_halves_, expert_gated_, expert_outputs_;
  std::vector<float> hidden_, logits_;  // used by choose()
};
