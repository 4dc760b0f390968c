// How packed weights lie in memory, and how they become floats in registers.
//
// A weight [N, K] is cut into panels of kPanel output channels; a panel holds all of K, so that one pass over it reads
// memory in order. Inside, lane i of a vector belongs to output channel i, so each output is summed over k in order 0..K-1
// in a lane of its own, whatever the number of rows or threads.
#pragma once
#include "vec.h"

namespace midstream {

constexpr int kPanelVectors = 4;
constexpr int kPanel = kPanelVectors * kLanes;
constexpr int kBlock = 32;  // weights that share a scale in Q4_1 and Q8_0; every K is padded to a multiple of it

enum class Format : int { kF32 = 0, kBF16 = 1, kInt8 = 2, kQ4 = 3, kQ8 = 4 };

// Each format has: bytes of one block of a panel (kBlock k's of kPanel channels), and unpack, which calls
// sink(k, vector, weights) for the k's of one block in order; k is counted from the start of the block.

struct F32Block {
  static constexpr int kBytes = kBlock * kPanel * 4;
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* block, Sink&& sink) {
    const float* w = reinterpret_cast<const float*>(block);
    for (int k = 0; k < kBlock; ++k)
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) sink(k, v, load(w + k * kPanel + v * kLanes));
  }
};

// A 32-bit word holds the weights of k (low half) and k + 1.
struct BF16Block {
  static constexpr int kBytes = kBlock * kPanel * 2;
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* block, Sink&& sink) {
    const I high = set1_int(0xffff0000u);
    for (int k = 0; k < kBlock; k += 2) {
      const uint8_t* words = block + k * kPanel * 2;
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) sink(k, v, as_float(shift_left<16>(load_int(words + v * kLanes * 4))));
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) sink(k + 1, v, as_float(bit_and(load_int(words + v * kLanes * 4), high)));
    }
  }
};

// Byte j of a word holds the weight of k + j.
template <int j> [[gnu::always_inline]] inline F byte_to_float(I word) {
  return to_float(shift_right_signed<24>(shift_left<24 - 8 * j>(word)));
}

template <int j, class Sink>
[[gnu::always_inline]] inline void unpack_bytes(const uint8_t* words, int k, Sink&& sink) {
#pragma GCC unroll 4
  for (int v = 0; v < kPanelVectors; ++v) sink(k + j, v, byte_to_float<j>(load_int(words + v * kLanes * 4)));
}

template <class Sink> [[gnu::always_inline]] inline void unpack_words(const uint8_t* words, Sink&& sink) {
  for (int k = 0; k < kBlock; k += 4, words += kPanel * 4) {
    unpack_bytes<0>(words, k, sink);
    unpack_bytes<1>(words, k, sink);
    unpack_bytes<2>(words, k, sink);
    unpack_bytes<3>(words, k, sink);
  }
}

// The scale of an output channel is applied to its sum.
struct Int8Block {
  static constexpr int kBytes = kBlock * kPanel;
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* block, Sink&& sink) {
    unpack_words(block, sink);
  }
};

// Q8_0: a float16 scale for each channel, then the words.
struct Q8Block {
  static constexpr int kBytes = kPanel * 2 + kBlock * kPanel;
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* block, Sink&& sink) {
    F scale[kPanelVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) scale[v] = load_half(reinterpret_cast<const uint16_t*>(block) + v * kLanes);
    unpack_words(block + kPanel * 2, [&](int k, int v, F w) __attribute__((always_inline)) { sink(k, v, mul(w, scale[v])); });
  }
};

// Q4_1: float16 scales, float16 minimums, then words; nibble j of word i holds the weight of k = 4 j + i.
struct Q4Block {
  static constexpr int kBytes = kPanel * 4 + kBlock * kPanel / 2;
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* block, Sink&& sink) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(block);
    const uint8_t* words = block + kPanel * 4;
    F scale[kPanelVectors], minimum[kPanelVectors], shifted[kPanelVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      scale[v] = shifted[v] = load_half(halves + v * kLanes);
      minimum[v] = load_half(halves + kPanel + v * kLanes);
    }
    // A nibble is masked where it stands, and the scale divided by 16 instead: exact, and cheaper than to shift it down.
    I mask = set1_int(15);
    for (int j = 0; j < 7; ++j) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
          F q = to_float(bit_and(load_int(words + (i * kPanel + v * kLanes) * 4), mask));
          sink(4 * j + i, v, fma(q, shifted[v], minimum[v]));
        }
      mask = shift_left<4>(mask);
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) shifted[v] = mul(shifted[v], set1(1.0f / 16));
    }
    // The mask of the last nibble would cover the sign.
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) {
        F q = to_float(shift_right<28>(load_int(words + (i * kPanel + v * kLanes) * 4)));
        sink(28 + i, v, fma(q, scale[v], minimum[v]));
      }
  }
};

inline int block_bytes(Format format) {
  switch (format) {
    case Format::kF32: return F32Block::kBytes;
    case Format::kBF16: return BF16Block::kBytes;
    case Format::kInt8: return Int8Block::kBytes;
    case Format::kQ4: return Q4Block::kBytes;
    case Format::kQ8: return Q8Block::kBytes;
  }
  return 0;
}

// After a panel's blocks, int8 has one float scale for each channel.
inline int64_t panel_bytes(Format format, int k) {
  int64_t blocks = round_up(k, kBlock) / kBlock;
  return blocks * block_bytes(format) + (format == Format::kInt8 ? kPanel * 4 : 0);
}

inline int64_t packed_bytes(Format format, int n, int k) { return round_up(n, kPanel) / kPanel * panel_bytes(format, k); }

}  // namespace midstream
