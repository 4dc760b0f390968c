// The memory layout of packed weights, and their conversion to floats in registers.
//
// A weight [N, K] is divided into panels of kPanel output channels. A panel contains all of K, so that one pass over it reads
// memory sequentially. Within a panel, lane i of a vector belongs to output channel i, so each output is summed over k in the
// order 0..K-1 in its own lane, regardless of the number of rows or threads.
#pragma once
#include "vec.h"

namespace midstream {

constexpr int kPanelVectors = 4;
constexpr int kPanel = kPanelVectors * kLanes;
constexpr int kBlock = 32;  // number of weights of a channel that share a scale; K is padded to a multiple of it

// kernels/cpu/linear.py has the same numbers and describes each format.
enum class Format : int { kF32, kBF16, kInt8, kQ4, kQ8, kInt4, kQ4K, kMx4, kAffine8, kQ6K, kFp8, kInt16 };

// Returns whether weights have four bits. Nibble j of word i is the weight of k = 4 j + i.
constexpr bool has_nibbles(Format format) {
  return format == Format::kQ4 || format == Format::kInt4 || format == Format::kQ4K || format == Format::kMx4;
}

// The layout of a panel's blocks, each of which has kBlock weights of each of kPanel channels. A block begins with its fields,
// which are arrays with one element per channel, followed by its words. In some formats, groups of blocks share additional
// fields, which are stored before the first block of the group.
template <int field_bytes, int words_of_channel, int shared_bytes = 0, int num_sharing = 1> struct Layout {
  static constexpr int kFieldBytes = field_bytes * kPanel, kBytes = kFieldBytes + words_of_channel * kPanel * 4;
  static constexpr int kSharedBytes = shared_bytes * kPanel, kSharing = num_sharing;
  static constexpr int kGroupBytes = kSharedBytes + kBytes * num_sharing;
  static const uint8_t* shared(const uint8_t* panel, int b) { return panel + static_cast<int64_t>(b / kSharing) * kGroupBytes; }
  static const uint8_t* fields(const uint8_t* panel, int b) { return shared(panel, b) + kSharedBytes + b % kSharing * kBytes; }
  static const uint8_t* words(const uint8_t* panel, int b) { return fields(panel, b) + kFieldBytes; }
};

// The function `unpack` of each format calls sink(k, v, weights) for block b of a panel, in ascending order of k, which is
// relative to the start of the block; v is a vector of channels. Integers q represent the weights scale(v) * q + minimum(v).

struct F32Block : Layout<0, kBlock> {
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* panel, int b, Sink&& sink) {
    const float* w = reinterpret_cast<const float*>(words(panel, b));
    for (int k = 0; k < kBlock; ++k)
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) sink(k, v, load(w + k * kPanel + v * kLanes));
  }
};

// A 32-bit word holds the weights of k (low half) and k + 1.
struct BF16Block : Layout<0, kBlock / 2> {
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* panel, int b, Sink&& sink) {
    const I high = set1_int(0xffff0000u);
    for (int k = 0; k < kBlock; k += 2) {
      const uint8_t* pairs = words(panel, b) + k * kPanel * 2;
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) sink(k, v, as_float(shift_left<16>(load_int(pairs + v * kLanes * 4))));
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) sink(k + 1, v, as_float(bit_and(load_int(pairs + v * kLanes * 4), high)));
    }
  }
};

template <int j> [[gnu::always_inline]] inline I byte_of_word(I word) { return bit_and(shift_right<8 * j>(word), set1_int(255)); }
template <int j> [[gnu::always_inline]] inline I signed_byte_of_word(I word) {
  return shift_right_signed<24>(shift_left<24 - 8 * j>(word));
}

// Byte j of a word is the weight of k + j. Calls sink(k + j, v, convert<j>(word, k + j, v)).
template <class Convert, class Sink>
[[gnu::always_inline]] inline void unpack_words(const uint8_t* words, Convert&& convert, Sink&& sink) {
  for (int k = 0; k < kBlock; k += 4, words += kPanel * 4) {
    auto unpack = [&]<int j>() __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v)
        sink(k + j, v, convert.template operator()<j>(load_int(words + v * kLanes * 4), k + j, v));
    };
    unpack.template operator()<0>();
    unpack.template operator()<1>();
    unpack.template operator()<2>();
    unpack.template operator()<3>();
  }
}

[[gnu::always_inline]] inline F load_half_field(const uint8_t* fields, int v) {
  return load_half(reinterpret_cast<const uint16_t*>(fields) + v * kLanes);
}
[[gnu::always_inline]] inline F load_float_field(const uint8_t* fields, int v) {
  return load(reinterpret_cast<const float*>(fields) + v * kLanes);
}
[[gnu::always_inline]] inline F load_byte_field(const uint8_t* fields, int v) { return to_float(load_bytes(fields + v * kLanes)); }

// Signed bytes; an output channel's scale is applied to its sum.
struct Int8Block : Layout<0, kBlock / 4> {
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* panel, int b, Sink&& sink) {
    auto convert = []<int j>(I word, int, int) __attribute__((always_inline)) { return to_float(signed_byte_of_word<j>(word)); };
    unpack_words(words(panel, b), convert, sink);
  }
};

// Q8_0: a float16 scale; signed bytes.
struct Q8Block : Layout<2, kBlock / 4> {
  [[gnu::always_inline]] static F scale(const uint8_t* panel, int b, int v) { return load_half_field(fields(panel, b), v); }
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* panel, int b, Sink&& sink) {
    F scales[kPanelVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) scales[v] = scale(panel, b, v);
    auto convert = [&]<int j>(I word, int, int v) __attribute__((always_inline)) {
      return mul(to_float(signed_byte_of_word<j>(word)), scales[v]);
    };
    unpack_words(words(panel, b), convert, sink);
  }
};

// Q6_K: a float16 and two signed bytes, which multiplied by it are the scales of the two halves of the block; signed bytes.
struct Q6KBlock : Layout<4, kBlock / 4> {
  [[gnu::always_inline]] static F scale(const uint8_t* panel, int b, int v, int half) {
    const uint8_t* at = fields(panel, b);
    return mul(load_half_field(at, v), load_int8(reinterpret_cast<const int8_t*>(at + (2 + half) * kPanel + v * kLanes)));
  }
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* panel, int b, Sink&& sink) {
    auto convert = [&]<int j>(I word, int k, int v) __attribute__((always_inline)) {
      return mul(to_float(signed_byte_of_word<j>(word)), scale(panel, b, v, k / 16));
    };
    unpack_words(words(panel, b), convert, sink);
  }
};

// A float32 scale and minimum; unsigned bytes.
struct Affine8Block : Layout<8, kBlock / 4> {
  [[gnu::always_inline]] static F scale(const uint8_t* panel, int b, int v) { return load_float_field(fields(panel, b), v); }
  [[gnu::always_inline]] static F minimum(const uint8_t* panel, int b, int v) {
    return load_float_field(fields(panel, b) + kPanel * 4, v);
  }
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* panel, int b, Sink&& sink) {
    auto convert = [&]<int j>(I word, int, int v) __attribute__((always_inline)) {
      return fma(to_float(byte_of_word<j>(word)), scale(panel, b, v), minimum(panel, b, v));
    };
    unpack_words(words(panel, b), convert, sink);
  }
};

// A float32 scale; bytes are float8 (E4M3): sign, four bits of exponent, three of mantissa.
struct Fp8Block : Layout<4, kBlock / 4> {
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* panel, int b, Sink&& sink) {
    auto convert = [&]<int j>(I word, int, int v) __attribute__((always_inline)) {
      I bits = shift_right<8 * j>(word);
      I sign = bit_and(shift_left<24>(bits), set1_int(0x80000000u)), rest = bit_and(shift_left<20>(bits), set1_int(0x07f00000u));
      // The exponent bias of a float is larger by 120. Subnormal numbers become 2^-7 + value / 2, and only these are changed by
      // the minimum.
      F value = as_float(add_int(rest, set1_int(120u << 23)));
      value = min(value, fma(value, set1(2.0f), set1(-0x1p-6f)));
      return mul(as_float(bit_or(sign, as_int(value))), load_float_field(fields(panel, b), v));
    };
    unpack_words(words(panel, b), convert, sink);
  }
};

// A byte e for the scale 2^(e - 127); words contain two signed halves: word 2 i + j has k = 4 i + j in its low half, and
// 4 i + j + 2 in its high half, as in rows of halves. The magnitudes of a block add up to at most kMostSum, so that its dot
// product with any halves fits in 32 bits.
struct Int16Block : Layout<1, kBlock / 2> {
  static constexpr int kMostSum = 65536 - kBlock;
  static constexpr int kMost = 8191;  // of the magnitudes
  [[gnu::always_inline]] static F scale(const uint8_t* panel, int b, int v) {
    return as_float(shift_left<23>(load_bytes(fields(panel, b) + v * kLanes)));
  }
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* panel, int b, Sink&& sink) {
    for (int i = 0; i < kBlock / 4; ++i) {
      const uint8_t* pairs = words(panel, b) + 2 * i * kPanel * 4;
      auto unpack = [&]<int k>() __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
          I word = load_int(pairs + (k % 2 * kPanel + v * kLanes) * 4);
          I number = shift_right_signed<16>(k < 2 ? shift_left<16>(word) : word);
          sink(4 * i + k, v, mul(to_float(number), scale(panel, b, v)));
        }
      };
      unpack.template operator()<0>();
      unpack.template operator()<1>();
      unpack.template operator()<2>();
      unpack.template operator()<3>();
    }
  }
};

template <class Block, class Sink> [[gnu::always_inline]] inline void unpack_nibbles(const uint8_t* panel, int b, Sink&& sink) {
  const uint8_t* words = Block::words(panel, b);
  F scale[kPanelVectors], minimum[kPanelVectors], shifted[kPanelVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kPanelVectors; ++v) {
    scale[v] = shifted[v] = Block::scale(panel, b, v);
    minimum[v] = Block::minimum(panel, b, v);
  }
  // Nibbles are masked but not shifted; the scale is divided by 16 instead, which is exact and cheaper.
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
  // The last nibble includes the sign bit, so it is shifted.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      F q = to_float(shift_right<28>(load_int(words + (i * kPanel + v * kLanes) * 4)));
      sink(28 + i, v, fma(q, scale[v], minimum[v]));
    }
}

// Q4_1: a float16 scale and minimum; nibbles.
struct Q4Block : Layout<4, kBlock / 8> {
  [[gnu::always_inline]] static F scale(const uint8_t* panel, int b, int v) { return load_half_field(fields(panel, b), v); }
  [[gnu::always_inline]] static F minimum(const uint8_t* panel, int b, int v) {
    return load_half_field(fields(panel, b) + kPanel * 2, v);
  }
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* panel, int b, Sink&& sink) {
    unpack_nibbles<Q4Block>(panel, b, sink);
  }
};

// A scale whose lowest nine bits contain the zero point: the minimum is -zero_point * scale; nibbles.
struct Int4Block : Layout<4, kBlock / 8> {
  static constexpr uint32_t kZeroMask = 0x1ff;
  [[gnu::always_inline]] static F scale(const uint8_t* panel, int b, int v) {
    return as_float(bit_and(load_int(fields(panel, b) + v * kLanes * 4), set1_int(~kZeroMask)));
  }
  [[gnu::always_inline]] static F minimum(const uint8_t* panel, int b, int v) {
    F zero_point = to_float(bit_and(load_int(fields(panel, b) + v * kLanes * 4), set1_int(kZeroMask)));
    return mul(scale(panel, b, v), sub(zero(), zero_point));
  }
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* panel, int b, Sink&& sink) {
    unpack_nibbles<Int4Block>(panel, b, sink);
  }
};

// Q4_K: eight blocks share a float16 unit for scales and a negative one for minimums; each block has a byte for each, counted
// in these units; nibbles.
struct Q4KBlock : Layout<2, kBlock / 8, 4, 8> {
  [[gnu::always_inline]] static F scale(const uint8_t* panel, int b, int v) {
    return mul(load_half_field(shared(panel, b), v), load_byte_field(fields(panel, b), v));
  }
  [[gnu::always_inline]] static F minimum(const uint8_t* panel, int b, int v) {
    F unit = load_half_field(shared(panel, b) + kPanel * 2, v);
    return mul(unit, load_byte_field(fields(panel, b) + kPanel, v));
  }
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* panel, int b, Sink&& sink) {
    unpack_nibbles<Q4KBlock>(panel, b, sink);
  }
};

// MXFP4: a byte e for the scale 2^(e - 127); nibbles are float4 (E2M1), represented by integers of twice their value.
struct Mx4Block : Layout<1, kBlock / 8> {
  [[gnu::always_inline]] static F scale(const uint8_t* panel, int b, int v) {
    return mul(as_float(shift_left<23>(load_bytes(fields(panel, b) + v * kLanes))), set1(0.5f));
  }
  template <class Sink> [[gnu::always_inline]] static void unpack(const uint8_t* panel, int b, Sink&& sink) {
    auto unpack_nibble = [&]<int j>() __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
          I halves = mx4_halves(shift_right<4 * (j % 4)>(load_int(words(panel, b) + (i * kPanel + v * kLanes) * 4)));
          I number = shift_right_signed<16>(j < 4 ? shift_left<16>(halves) : halves);
          sink(4 * j + i, v, mul(to_float(number), scale(panel, b, v)));
        }
    };
    unpack_nibble.template operator()<0>();
    unpack_nibble.template operator()<1>();
    unpack_nibble.template operator()<2>();
    unpack_nibble.template operator()<3>();
    unpack_nibble.template operator()<4>();
    unpack_nibble.template operator()<5>();
    unpack_nibble.template operator()<6>();
    unpack_nibble.template operator()<7>();
  }
};

// Calls f with the block type of the format.
template <class F> auto with_block(Format format, F&& f) {
  switch (format) {
    case Format::kF32: return f(F32Block{});
    case Format::kBF16: return f(BF16Block{});
    case Format::kInt8: return f(Int8Block{});
    case Format::kQ4: return f(Q4Block{});
    case Format::kQ8: return f(Q8Block{});
    case Format::kInt4: return f(Int4Block{});
    case Format::kQ4K: return f(Q4KBlock{});
    case Format::kMx4: return f(Mx4Block{});
    case Format::kAffine8: return f(Affine8Block{});
    case Format::kQ6K: return f(Q6KBlock{});
    case Format::kFp8: return f(Fp8Block{});
    case Format::kInt16: return f(Int16Block{});
  }
  __builtin_unreachable();
}

// In the format int8, the blocks of a panel are followed by one float scale per channel.
inline int64_t panel_bytes(Format format, int k) {
  int num_blocks = round_up(k, kBlock) / kBlock;
  int64_t bytes = with_block(format, [&](auto block) {
    return static_cast<int64_t>(num_blocks / block.kSharing) * block.kGroupBytes;
  });
  return bytes + (format == Format::kInt8 ? kPanel * 4 : 0);
}

inline int64_t packed_bytes(Format format, int n, int k) { return round_up(n, kPanel) / kPanel * panel_bytes(format, k); }

}  // namespace midstream
