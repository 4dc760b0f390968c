// Runs kernels on inputs from standard input and writes their results to standard output, for builds that only an emulator
// can run. See test_arm.py for the cases.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../kernels/csrc/api.h"

namespace {

using Bytes = std::vector<unsigned char>;

// Reads a length and then as many bytes; empty at the end of the input.
Bytes read_bytes() {
  int64_t size = 0;
  if (std::fread(&size, sizeof(size), 1, stdin) != 1) return {};
  Bytes bytes(static_cast<size_t>(size));
  if (std::fread(bytes.data(), 1, bytes.size(), stdin) != bytes.size()) std::abort();
  return bytes;
}

template <class T> std::vector<T> read() {
  Bytes bytes = read_bytes();
  auto* first = reinterpret_cast<const T*>(bytes.data());
  return {first, first + bytes.size() / sizeof(T)};
}

template <class T> void write(const std::vector<T>& values) { std::fwrite(values.data(), sizeof(T), values.size(), stdout); }

// A packed layer with its storage.
struct Layer {
  Bytes packed;
  MidstreamLinear linear;
};

// Reads sizes (format, input, has_blocks, n, k), the order of rows, and the source.
Layer read_layer() {
  std::vector<int32_t> sizes = read<int32_t>(), order = read<int32_t>();
  Bytes source = read_bytes();
  int format = sizes[0], rows = static_cast<int>(order.size()), k = sizes[4];
  Layer layer{Bytes(static_cast<size_t>(midstream_packed_bytes(format, rows, k))), {}};
  midstream_pack(format, sizes[2] != 0, source.data(), rows, k, order.data(), layer.packed.data());
  layer.linear = {layer.packed.data(), nullptr, nullptr, nullptr, rows, k, format, sizes[1]};
  return layer;
}

void run_linear(MidstreamPool* pool) {
  Layer layer = read_layer();
  layer.linear.packed = layer.packed.data();
  std::vector<int32_t> counts = read<int32_t>();
  std::vector<float> x = read<float>();
  for (int32_t count : counts) {
    std::vector<float> out(static_cast<size_t>(count) * static_cast<size_t>(layer.linear.n));
    midstream_linear(pool, &layer.linear, count, x.data(), out.data());
    write(out);
  }
}

// Reads the dimensions, layers qkv, o, gate_up and down, norms, caches, angles, the batch and the hidden states.
void run_decoder(MidstreamPool* pool) {
  std::vector<MidstreamDims> dims = read<MidstreamDims>();
  std::vector<int32_t> settings = read<int32_t>();  // window, tokens, sequences, blocks of a sequence
  Layer layers[4];
  for (Layer& layer : layers) layer = read_layer();
  for (Layer& layer : layers) layer.linear.packed = layer.packed.data();
  std::vector<float> norms[4], cos, sin, hidden;
  for (auto& norm : norms) norm = read<float>();
  Bytes keys = read_bytes(), values = read_bytes();
  cos = read<float>(), sin = read<float>();
  std::vector<int32_t> steps[5];  // positions, slots, query starts, context lengths, block tables
  for (auto& part : steps) part = read<int32_t>();
  hidden = read<float>();
  MidstreamLayer layer{};
  layer.qkv = layers[0].linear, layer.o = layers[1].linear, layer.gate_up = layers[2].linear, layer.down = layers[3].linear;
  layer.attention_norm = norms[0].data(), layer.ffn_norm = norms[1].data();
  layer.q_norm = norms[2].data(), layer.k_norm = norms[3].data();
  layer.k_cache = keys.data(), layer.v_cache = values.data(), layer.window = settings[0];
  MidstreamBatch batch{settings[1], settings[2], settings[3], steps[0].data(), steps[1].data(), steps[2].data(),
                       steps[3].data(), steps[4].data(), nullptr, 2};
  MidstreamDecoder* decoder = midstream_decoder_create(pool, dims.data(), &layer, cos.data(), sin.data());
  if (const char* error = midstream_decoder_forward(decoder, &batch, hidden.data(), 0, 1)) {
    std::fprintf(stderr, "%s\n", error);
    std::exit(1);
  }
  write(hidden), write(keys), write(values);
  midstream_decoder_destroy(decoder);
}

void run_draw(MidstreamPool* pool) {
  std::vector<MidstreamDraw> draws = read<MidstreamDraw>();
  std::vector<float> logits = read<float>(), highest(draws.size());
  std::vector<int32_t> rows, chosen(draws.size());
  for (size_t i = 0; i < draws.size(); ++i) rows.push_back(static_cast<int32_t>(i));
  int count = static_cast<int>(draws.size());
  midstream_draw(pool, count, rows.data(), static_cast<int>(logits.size()) / count, logits.data(), draws.data(), chosen.data(), highest.data());
  write(chosen), write(highest);
}

}  // namespace

int main() {
  MidstreamPool* pool = midstream_pool_create(2);
  for (Bytes name = read_bytes(); !name.empty(); name = read_bytes()) {
    if (name[0] == 'l') run_linear(pool);
    if (name[0] == 'd') run_decoder(pool);
    if (name[0] == 's') run_draw(pool);
  }
  midstream_pool_destroy(pool);
}
