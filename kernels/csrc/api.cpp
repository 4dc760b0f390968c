#include "api.h"

#include <cstring>

#include "decoder.h"

using namespace midstream;

int32_t midstream_panel() { return kPanel; }

bool midstream_has_integer_products(int format, int input) {
  return has_dots(static_cast<Format>(format), static_cast<Input>(input));
}

MidstreamPool* midstream_pool_create(int num_threads) { return new MidstreamPool(num_threads); }

bool midstream_pool_use_tiles(MidstreamPool* pool) { return pool->quantized.can_use_tiles = request_tiles(); }

void midstream_pool_destroy(MidstreamPool* pool) { delete pool; }

void midstream_linear(MidstreamPool* pool, const MidstreamLinear* weight, int m, const float* x, float* out) {
  int padded = round_up(weight->k, kBlock);
  if (padded > weight->k) {
    pool->rows.assign(static_cast<size_t>(m) * padded, 0.0f);
    for (int r = 0; r < m; ++r)
      std::memcpy(&pool->rows[static_cast<size_t>(r) * padded], x + static_cast<int64_t>(r) * weight->k, weight->k * 4);
    x = pool->rows.data();
  }
  pool->use(*weight);
  pool->reserve(m, weight->k);
  int num_outputs = num_outputs_of(*weight);
  pool->threads.run([&](int thread) {
    linear(pool->threads, pool->linear_scratch[thread], pool->quantized, *weight, m, x, padded, Output::kStore,
           num_outputs, out, num_outputs);
  });
}

MidstreamDecoder* midstream_decoder_create(MidstreamPool* pool, const MidstreamDims* dims, const MidstreamLayer* layers,
                                           const float* cos, const float* sin) {
  return new MidstreamDecoder(pool, *dims, layers, cos, sin);
}

void midstream_decoder_destroy(MidstreamDecoder* decoder) { delete decoder; }

const char* midstream_decoder_forward(MidstreamDecoder* decoder, const MidstreamBatch* batch, float* hidden, int first_layer,
                                      int last_layer) {
  return decoder->forward(*batch, hidden, first_layer, last_layer);
}

const char* midstream_decoder_choose(MidstreamDecoder* decoder, const MidstreamBatch* batch, const MidstreamEmbedding* embedding,
                                     const int32_t* token_ids, const MidstreamLinear* head, const float* norm,
                                     int32_t num_sampled, const int32_t* sampled, const MidstreamDraw* draws, int32_t* chosen,
                                     float* highest) {
  return decoder->choose(*batch, *embedding, token_ids, *head, norm, num_sampled, sampled, draws, chosen, highest);
}

void midstream_draw(MidstreamPool* pool, int num_rows, const int32_t* rows, int n, const float* logits,
                    const MidstreamDraw* draws, int32_t* chosen, float* highest) {
  pool->reserve_draws(n);
  pool->threads.run(num_rows, [&](int thread) {
    pool->threads.for_each(num_rows, 1, [&](int i) {
      chosen[i] = pool->draw_scratch[thread].choose(logits + static_cast<int64_t>(rows[i]) * n, n, draws + i, highest[i]);
    });
  });
}

void midstream_decoder_logits(MidstreamDecoder* decoder, const MidstreamLinear* head, const float* norm, int m,
                              const float* hidden, float* out) {
  decoder->logits(*head, norm, m, hidden, out);
}
