#include "decoder.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "embedding.h"
#include "row_ops.h"

using namespace midstream;

namespace {

// Number of rows (queries times heads of a group) that share one pass over the keys.
constexpr int kAttentionRows = 96;

// Blocks are scattered over the cache, so small pages would cause many TLB misses. This is only a hint; failures are ignored.
void ask_for_huge_pages(void* start, size_t bytes) {
  constexpr uintptr_t kHugePage = 2 << 20;
  uintptr_t first = (reinterpret_cast<uintptr_t>(start) + kHugePage - 1) & ~(kHugePage - 1);
  uintptr_t end = (reinterpret_cast<uintptr_t>(start) + bytes) & ~(kHugePage - 1);
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

// Calls body with a value of the cache's element type.
template <class Body> auto with_element(int cache_format, Body&& body) {
  switch (cache_format) {
    case 1: return body(uint16_t{});
    case 2: return body(int16_t{});
    case 3: return body(int8_t{});
    default: return body(float{});
  }
}

// Writes one head of a token to its slot, with this stride between elements, and the scale if the cache has integers.
template <class T> void store_slot(const float* x, int dim, T* out, int stride, T* scales, int offset) {
  if constexpr (std::is_same_v<T, int16_t> || std::is_same_v<T, int8_t>) {
    T levels[kMaxHeadDim];
    float scale = quantize_head<T>(x, dim, std::numeric_limits<T>::max(), levels);
    std::memcpy(scales + offset * (sizeof(float) / sizeof(T)), &scale, sizeof(float));
    for (int d = 0; d < dim; ++d) out[static_cast<int64_t>(d) * stride] = levels[d];
  } else {
    for (int d = 0; d < dim; ++d) convert(x[d], out[static_cast<int64_t>(d) * stride]);
  }
}

}  // namespace

MidstreamDecoder::MidstreamDecoder(MidstreamPool* pool, const MidstreamDims& dims, const MidstreamLayer* layers,
                                   const float* cos, const float* sin)
    : threads_(pool->threads), pool_(*pool), dims_(dims), layers_(layers, layers + dims.num_layers), cos_(cos), sin_(sin),
      group_(dims.num_heads / dims.num_kv_heads), queries_per_task_(std::max(1, kAttentionRows / group_)),
      attention_scratch_(threads_.size()) {
  for (AttentionScratch& scratch : attention_scratch_)
    scratch.reserve(queries_per_task_ * group_, dims_.num_kv_heads, dims_.head_dim);
  size_t cache_bytes = static_cast<size_t>(dims_.num_blocks) * dims_.num_kv_heads * with_element(dims_.cache_format, [&](auto x) {
    return head_elements<decltype(x)>(dims_.head_dim, dims_.block_size) * sizeof(x);
  });
  most_features_ = dims_.ffn;
  for (const MidstreamLayer& layer : layers_) {
    for (const MidstreamLinear* weight : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) pool_.use(*weight);
    if (const MidstreamMixture* mixture = layer.mixture) {
      for (const MidstreamLinear* weight : {&mixture->shared_gate_up, &mixture->shared_down}) pool_.use(*weight);
      if (!largest_mixture_ || mixture->num_experts > largest_mixture_->num_experts) largest_mixture_ = mixture;
      most_active_ = std::max(most_active_, mixture->num_active);
      most_features_ = std::max(most_features_, mixture->shared_size);
      expert_features_ = std::max(expert_features_, mixture->expert_size);
    }
    ask_for_huge_pages(layer.k_cache, cache_bytes);
    ask_for_huge_pages(layer.v_cache, cache_bytes);
  }
}

const char* MidstreamDecoder::forward(const MidstreamBatch& batch, float* hidden, int first_layer, int last_layer) {
  if (const char* problem = check(batch)) return problem;
  if (first_layer < 0 || last_layer > dims_.num_layers) return "there is no such layer";
  prepare(batch);
  threads_.run(num_threads(batch), [&](int thread) {
    for (int i = first_layer; i < last_layer; ++i) run_layer(thread, i, batch, hidden);
  });
  return nullptr;
}

const char* MidstreamDecoder::choose(const MidstreamBatch& batch, const MidstreamEmbedding& embedding,
                                     const int32_t* token_ids, const MidstreamLinear& head, const float* norm, int num_sampled,
                                     const int32_t* sampled, const MidstreamDraw* draws, int32_t* chosen, float* highest) {
  if (const char* problem = check(batch)) return problem;
  if (!can_embed(static_cast<Format>(embedding.format))) return "there is no such embedding";
  for (int i = 0; i < batch.num_tokens; ++i)
    if (token_ids[i] < 0 || token_ids[i] >= embedding.num_rows) return "a token is out of range";
  for (int i = 0; i < num_sampled; ++i)
    if (sampled[i] < 0 || sampled[i] >= batch.num_tokens) return "a sampled token is out of range";
  prepare(batch);
  pool_.use(head);
  reserve(num_sampled);
  hidden_.resize(static_cast<size_t>(batch.num_tokens) * dims_.hidden);
  logits_.resize(static_cast<size_t>(num_sampled) * head.n);
  if (draws) pool_.reserve_draws(head.n);
  auto hidden = [&](int i) { return hidden_.data() + static_cast<int64_t>(i) * dims_.hidden; };
  threads_.run(num_threads(batch), [&](int thread) {
    threads_.for_each(batch.num_tokens, threads_.grain(batch.num_tokens),
                      [&](int i) {
                        embed_row(embedding, token_ids[i], dims_.hidden, hidden(i));
                        if (dims_.embedding_scale != 1.0f)
                          for (int d = 0; d < dims_.hidden; ++d) hidden(i)[d] *= dims_.embedding_scale;
                      });
    for (int i = 0; i < dims_.num_layers; ++i) run_layer(thread, i, batch, hidden_.data());
    threads_.for_each(num_sampled, threads_.grain(num_sampled), [&](int i) {
      norm_row(hidden(sampled[i]), norm, normed_.row(i));
    });
    run_linear(thread, head, num_sampled, normed_, Output::kStore, head.n, logits_.data(), head.n);
    threads_.for_each(num_sampled, threads_.grain(num_sampled), [&](int i) {
      float* row = logits_.data() + static_cast<int64_t>(i) * head.n;
      finish_logits(row, head.n);
      chosen[i] = pool_.draw_scratch[thread].choose(row, head.n, draws ? draws + i : nullptr, highest[i]);
    });
  });
  return nullptr;
}

void MidstreamDecoder::logits(const MidstreamLinear& head, const float* norm, int m, const float* hidden, float* out) {
  pool_.use(head);
  reserve(m);
  threads_.run([&](int thread) {
    norm_rows(m, hidden, norm);
    run_linear(thread, head, m, normed_, Output::kStore, head.n, out, head.n);
    threads_.for_each(m, threads_.grain(m), [&](int i) { finish_logits(out + static_cast<int64_t>(i) * head.n, head.n); });
  });
}

void MidstreamDecoder::finish_logits(float* logits, int n) const {
  if (dims_.logits_scale != 1.0f)
    for (int i = 0; i < n; ++i) logits[i] *= dims_.logits_scale;
  if (dims_.logits_softcap) bend_row(logits, n, dims_.logits_softcap);
}

void MidstreamDecoder::Rows::reserve(int num_rows, int width) {
  stride = round_up(width, kBlock);
  if (data.size() < static_cast<size_t>(num_rows * stride)) data.assign(num_rows * stride, 0.0f);
}

void MidstreamDecoder::reserve(int num_tokens) {
  int num_rows = num_tokens;
  if (largest_mixture_) {
    plan_.reserve(num_tokens, largest_mixture_->num_experts, most_active_, group_alignment(pool_.quantized));
    num_rows = std::max(num_tokens, plan_.max_places());
    router_.reserve(num_tokens, std::max(1, largest_mixture_->num_experts));
    gathered_.reserve(num_rows, dims_.hidden);
    if (dims_.activation) expert_halves_.reserve(num_rows, 2 * expert_features_);
    expert_gated_.reserve(num_rows, expert_features_);
    expert_outputs_.reserve(num_rows, dims_.hidden);
  }
  pool_.reserve(num_rows, std::max({dims_.hidden, most_features_, expert_features_, dims_.num_heads * dims_.head_dim}));
  normed_.reserve(num_tokens, dims_.hidden);
  qkv_.reserve(num_tokens, qkv_width());
  attended_.reserve(num_tokens, dims_.num_heads * dims_.head_dim);
  gated_.reserve(num_tokens, most_features_);
  if (dims_.activation) halves_.reserve(num_tokens, 2 * most_features_);
  added_.reserve(num_tokens, dims_.hidden);
}

void MidstreamDecoder::prepare(const MidstreamBatch& batch) {
  reserve(batch.num_tokens);
  plan_attention(batch);
  lora_.plan(batch, std::max({qkv_width(), 2 * dims_.ffn, dims_.hidden}));
}

// Returns the number of threads that have enough work between two barriers: small models have little work per layer.
int MidstreamDecoder::num_threads(const MidstreamBatch& batch) const {
  constexpr int64_t kProductsOfThread = 1 << 18, kLinearLayers = 4;
  int64_t heads = dims_.num_heads + dims_.num_kv_heads;
  int64_t features = largest_mixture_ ? most_active_ * expert_features_ : dims_.ffn;
  int64_t weights = static_cast<int64_t>(dims_.hidden) * (2 * heads * dims_.head_dim + 3 * features);
  int64_t most = std::clamp<int64_t>(batch.max_threads, 1, threads_.size());
  return static_cast<int>(std::clamp<int64_t>(batch.num_tokens * weights / kLinearLayers / kProductsOfThread, 1, most));
}

// Checks all indices, because an invalid one would read or write memory out of bounds.
const char* MidstreamDecoder::check(const MidstreamBatch& batch) const {
  int64_t num_slots = static_cast<int64_t>(dims_.num_blocks) * dims_.block_size;
  for (int i = 0; i < batch.num_tokens; ++i) {
    if (batch.positions[i] < 0 || batch.positions[i] >= dims_.num_positions) return "a position is out of range";
    if (batch.slot_mapping[i] < 0 || batch.slot_mapping[i] >= num_slots) return "a slot is out of range";
  }
  if (batch.query_starts[0] != 0 || batch.query_starts[batch.num_sequences] != batch.num_tokens)
    return "query_starts does not cover the tokens";
  for (int s = 0; s < batch.num_sequences; ++s) {
    int num_queries = batch.query_starts[s + 1] - batch.query_starts[s], length = batch.context_lens[s];
    if (num_queries < 0 || length < num_queries) return "a sequence has more queries than context";
    int num_blocks = (length + dims_.block_size - 1) / dims_.block_size;
    if (num_blocks > batch.max_blocks) return "a context is longer than its block table";
    const int32_t* table = batch.block_tables + static_cast<int64_t>(s) * batch.max_blocks;
    for (int b = 0; b < num_blocks; ++b)
      if (table[b] < 0 || table[b] >= dims_.num_blocks) return "a block is out of range";
  }
  return nullptr;
}

void MidstreamDecoder::plan_attention(const MidstreamBatch& batch) {
  tasks_.clear();
  int num_tiles = 0;
  for (int s = 0; s < batch.num_sequences; ++s)
    num_tiles += (batch.query_starts[s + 1] - batch.query_starts[s] + queries_per_task_ - 1) / queries_per_task_;
  // The heads of a block are adjacent in memory. A task for all heads reads memory sequentially, but there are fewer tasks to
  // distribute.
  int step = num_tiles >= 4 * num_threads(batch) ? dims_.num_kv_heads : 1;
  for (int s = 0; s < batch.num_sequences; ++s)
    for (int q = batch.query_starts[s]; q < batch.query_starts[s + 1]; q += queries_per_task_) {
      int count = std::min(queries_per_task_, batch.query_starts[s + 1] - q);
      for (int head = 0; head < dims_.num_kv_heads; head += step) tasks_.push_back({s, q, count, head, step});
    }
}

void MidstreamDecoder::run_layer(int thread, int index, const MidstreamBatch& batch, float* hidden) {
  using Lora = MidstreamLoraLayer;
  const MidstreamLayer& layer = layers_[index];
  int m = batch.num_tokens, num_tasks = static_cast<int>(tasks_.size());
  int q_width = dims_.num_heads * dims_.head_dim, kv_width = dims_.num_kv_heads * dims_.head_dim;
  norm_rows(m, hidden, layer.attention_norm);
  const LoraRows* lora = adapt(index, layer.qkv, normed_, {{&Lora::q, q_width}, {&Lora::k, kv_width}, {&Lora::v, kv_width}});
  run_linear(thread, layer.qkv, m, normed_, Output::kStore, num_outputs_of(layer.qkv), qkv_.data.data(), qkv_.stride, lora);
  threads_.for_each(m, threads_.grain(m), [&](int token) { rotate_and_store(layer, batch, token); });
  threads_.for_each(num_tasks, threads_.grain(num_tasks), [&](int i) { run_attention(thread, layer, batch, tasks_[i]); });
  lora = adapt(index, layer.o, attended_, {{&Lora::o, dims_.hidden}});
  add_linear(thread, layer.o, m, attended_, layer.attention_output_norm, hidden, lora);
  if (!dims_.is_parallel) norm_rows(m, hidden, layer.ffn_norm);
  if (layer.mixture) return run_mixture(thread, layer, m, hidden);
  run_gate(thread, layer.gate_up, m, dims_.ffn, adapt(index, layer.gate_up, normed_, {{&Lora::gate, dims_.ffn}, {&Lora::up, dims_.ffn}}));
  lora = adapt(index, layer.down, gated_, {{&Lora::down, dims_.hidden}});
  add_linear(thread, layer.down, m, gated_, layer.ffn_output_norm, hidden, lora);
}

// gated_ = activation(normed_ gate) * (normed_ up)
void MidstreamDecoder::run_gate(int thread, const MidstreamLinear& gate_up, int m, int size, const LoraRows* lora) {
  if (!dims_.activation) {
    run_linear(thread, gate_up, m, normed_, Output::kSiluMul, size, gated_.data.data(), gated_.stride, lora);
    return;
  }
  run_linear(thread, gate_up, m, normed_, Output::kStore, 2 * size, halves_.data.data(), halves_.stride, lora);
  threads_.for_each(m, threads_.grain(m), [&](int i) {
    activate_row(dims_.activation, halves_.row(i), halves_.row(i) + size, size, gated_.row(i));
  });
}

// Adds a linear layer of x to hidden, after normalizing it (if `norm` is not null) and multiplying it by residual_scale.
void MidstreamDecoder::add_linear(int thread, const MidstreamLinear& weight, int m, Rows& x, const float* norm, float* hidden,
                                  const LoraRows* lora) {
  if (!norm && dims_.residual_scale == 1.0f) {
    run_linear(thread, weight, m, x, Output::kAdd, dims_.hidden, hidden, dims_.hidden, lora);
    return;
  }
  run_linear(thread, weight, m, x, Output::kStore, dims_.hidden, added_.data.data(), added_.stride, lora);
  add_rows(m, added_, norm, hidden);
}

void MidstreamDecoder::add_rows(int m, Rows& x, const float* norm, float* hidden) {
  threads_.for_each(m, threads_.grain(m), [&](int i) {
    float *row = x.row(i), *out = hidden + static_cast<int64_t>(i) * dims_.hidden;
    if (norm) norm_row(row, norm, row);
    for (int d = 0; d < dims_.hidden; ++d) out[d] += row[d] * dims_.residual_scale;
  });
}

// Adds the outputs of each row's experts, and of the shared expert, for normed_ to hidden.
void MidstreamDecoder::run_mixture(int thread, const MidstreamLayer& layer, int m, float* hidden) {
  const MidstreamMixture& mixture = *layer.mixture;
  int k = mixture.num_active, num_pairs = m * k, num_groups = plan_.max_groups(mixture, m), size = mixture.expert_size;
  run_linear(thread, mixture.router, m, normed_, Output::kStore, mixture.num_experts, router_.data.data(), router_.stride);
  threads_.for_each(m, threads_.grain(m), [&](int i) { plan_.choose(mixture, i, router_.row(i)); });
  threads_.for_each(1, 1, [&](int) { plan_.sort(mixture, m); });
  threads_.for_each(num_pairs, threads_.grain(num_pairs), [&](int pair) {
    const float* from = normed_.row(pair / k);
    float *to = gathered_.row(plan_.places()[pair]), factor = mixture.weighs_input ? plan_.weight(pair) : 1.0f;
    for (int d = 0; d < dims_.hidden; ++d) to[d] = from[d] * factor;
  });
  auto run = [&](const MidstreamLinear* weights, Rows& x, Output output, int num_outputs, Rows& out) {
    grouped_linear(threads_, pool_.linear_scratch[thread], pool_.quantized, weights, plan_.groups(), num_groups, plan_.places(),
                   num_pairs, x.data.data(), x.stride, output, num_outputs, out.data.data(), out.stride);
  };
  if (dims_.activation) {
    run(mixture.gate_up, gathered_, Output::kStore, 2 * size, expert_halves_);
    threads_.for_each(num_pairs, threads_.grain(num_pairs), [&](int pair) {
      int place = plan_.places()[pair];
      float* halves = expert_halves_.row(place);
      activate_row(dims_.activation, halves, halves + size, size, expert_gated_.row(place));
    });
  } else {
    run(mixture.gate_up, gathered_, Output::kSiluMul, size, expert_gated_);
  }
  run(mixture.down, expert_gated_, Output::kStore, dims_.hidden, expert_outputs_);
  threads_.for_each(m, threads_.grain(m), [&](int i) {
    float* total = added_.row(i);
    std::fill_n(total, dims_.hidden, 0.0f);
    for (int pair = i * k; pair < (i + 1) * k; ++pair) {
      const float* out = expert_outputs_.row(plan_.places()[pair]);
      float weight = mixture.weighs_input ? 1.0f : plan_.weight(pair);
      for (int d = 0; d < dims_.hidden; ++d) total[d] += out[d] * weight;
    }
  });
  if (mixture.shared_size) {
    run_gate(thread, mixture.shared_gate_up, m, mixture.shared_size, nullptr);
    Rows& shared = gathered_;
    if (mixture.shared_gate.packed)
      run_linear(thread, mixture.shared_gate, m, normed_, Output::kStore, 1, router_.data.data(), router_.stride);
    run_linear(thread, mixture.shared_down, m, gated_, Output::kStore, dims_.hidden, shared.data.data(), shared.stride);
    threads_.for_each(m, threads_.grain(m), [&](int i) {
      float weight = 1.0f;
      if (mixture.shared_gate.packed) weight = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(router_.row(i)[0]))));
      for (int d = 0; d < dims_.hidden; ++d) added_.row(i)[d] += shared.row(i)[d] * weight;
    });
  }
  add_rows(m, added_, layer.ffn_output_norm, hidden);
}

// Computes the deltas of the step's adapters for a linear layer of x; returns null without any work if the step has none.
const LoraRows* MidstreamDecoder::adapt(int index, const MidstreamLinear& weight, Rows& x,
                                        std::initializer_list<LoraPart> parts) {
  if (lora_.empty()) return nullptr;
  lora_.compute(threads_, index, parts, weight.k, x.data.data(), x.stride);
  return &lora_;
}

void MidstreamDecoder::norm_row(const float* x, const float* weight, float* out) const {
  if (!weight) {
    std::copy_n(x, dims_.hidden, out);
  } else if (dims_.has_layer_norm) {
    layer_norm_row(x, weight, dims_.hidden, dims_.eps, out);
  } else {
    rms_norm_row(x, weight, dims_.hidden, dims_.eps, out);
  }
}

void MidstreamDecoder::norm_rows(int m, const float* x, const float* weight) {
  threads_.for_each(m, threads_.grain(m),
                    [&](int i) { norm_row(x + static_cast<int64_t>(i) * dims_.hidden, weight, normed_.row(i)); });
}

void MidstreamDecoder::run_linear(int thread, const MidstreamLinear& weight, int m, Rows& x, Output output, int num_outputs,
                                  float* out, int64_t stride, const LoraRows* lora) {
  linear(threads_, pool_.linear_scratch[thread], pool_.quantized, weight, m, x.data.data(), x.stride, output, num_outputs, out,
         stride, lora);
}

void MidstreamDecoder::rotate_and_store(const MidstreamLayer& layer, const MidstreamBatch& batch, int token) {
  int dim = dims_.head_dim, num_rotated = dims_.num_heads + dims_.num_kv_heads, q_width = dims_.num_heads * dim;
  int position = batch.positions[token];
  bool rotates = layer.table >= 0;
  int64_t angles = (static_cast<int64_t>(layer.table) * dims_.num_positions + position) * (dims_.rotary_dim / 2);
  float* row = qkv_.row(token);
  if (dims_.norms_qk_rows) {
    rms_norm_row(row, layer.q_norm, q_width, dims_.eps, row);
    rms_norm_row(row + q_width, layer.k_norm, dims_.num_kv_heads * dim, dims_.eps, row + q_width);
  }
  for (int h = 0; h < num_rotated; ++h) {
    const float* norm = h < dims_.num_heads ? layer.q_norm : layer.k_norm;
    float* head = row + h * dim;
    if (norm && !dims_.norms_qk_rows) rms_norm_row(head, norm, dim, dims_.eps, head);
    if (rotates) rotate_head(head, cos_ + angles, sin_ + angles, dims_.rotary_dim, dims_.is_interleaved);
    if (rotates && dims_.has_unit_qk_norm) unit_row(head, dim, dims_.eps);
  }
  if (!rotates && dims_.query_scales)
    for (int d = 0; d < q_width; ++d) row[d] *= dims_.query_scales[position];
  float* k = row + dims_.num_heads * dim;
  float* v = row + num_rotated * dim;
  if (layer.rounding) {
    round_row(k, dims_.num_kv_heads * dim, layer.rounding, layer.key_scale);
    round_row(v, dims_.num_kv_heads * dim, layer.rounding, layer.value_scale);
  }
  with_element(dims_.cache_format,
               [&](auto element) { store_cache<decltype(element)>(layer, batch.slot_mapping[token], k, v); });
}

template <class T>
void MidstreamDecoder::store_cache(const MidstreamLayer& layer, int slot, const float* k, const float* v) {
  int dim = dims_.head_dim, size = dims_.block_size, offset = slot % size;
  int64_t head_stride = head_elements<T>(dim, size), block_start = slot / size * dims_.num_kv_heads * head_stride;
  for (int h = 0; h < dims_.num_kv_heads; ++h) {
    T* keys = static_cast<T*>(layer.k_cache) + block_start + h * head_stride;
    T* values = static_cast<T*>(layer.v_cache) + block_start + h * head_stride;
    store_slot(k + h * dim, dim, keys + offset, size, keys + dim * size, offset);
    store_slot(v + h * dim, dim, values + offset * dim, 1, values + dim * size, offset);
  }
}

void MidstreamDecoder::run_attention(int thread, const MidstreamLayer& layer, const MidstreamBatch& batch,
                                     const AttentionTask& task) {
  with_element(dims_.cache_format,
               [&](auto element) { attend_task<decltype(element)>(thread, layer, batch, task); });
}

template <class T>
void MidstreamDecoder::attend_task(int thread, const MidstreamLayer& layer, const MidstreamBatch& batch,
                                   const AttentionTask& task) {
  int dim = dims_.head_dim;
  int64_t head_stride = head_elements<T>(dim, dims_.block_size), start = task.kv_head * head_stride;
  HeadCache cache{static_cast<const T*>(layer.k_cache) + start, static_cast<const T*>(layer.v_cache) + start,
                  batch.block_tables + static_cast<int64_t>(task.sequence) * batch.max_blocks, dims_.block_size,
                  dims_.num_kv_heads * head_stride, head_stride};
  int before = batch.context_lens[task.sequence] - (batch.query_starts[task.sequence + 1] - task.first_query);
  int64_t column = static_cast<int64_t>(task.kv_head) * group_ * dim;
  QueryTile tile{qkv_.row(task.first_query) + column, attended_.row(task.first_query) + column, qkv_.stride, attended_.stride,
                 task.num_queries, task.num_kv_heads, group_, dim, before, dims_.scale, layer.window,
                 layer.chunk, dims_.softcap, layer.sinks ? layer.sinks + task.kv_head * group_ : nullptr};
  attend<T>(cache, tile, attention_scratch_[thread]);
}
