"""The C++ CPU kernels (csrc/) in a typed Python interface: packed weights, and a decoder that runs in one call."""

from kernels.cpu.blocks import dequantize_blocks, levels_of_blocks
from kernels.cpu.decoder import (
    DecoderLayer,
    Embedding,
    NativeDecoder,
    PackedExpert,
    PackedMixture,
    stored_head_dim,
    supports,
)
from kernels.cpu.dims import DecoderDims
from kernels.cpu.library import Library
from kernels.cpu.linear import InputFormat, PackedLinear, WeightFormat
from kernels.cpu.loading import load_library
from kernels.cpu.lora import PackedLora
from kernels.cpu.sampling import Draws, draw, empty_draws
from kernels.cpu.threads import ThreadPool

__all__ = [
    "DecoderDims",
    "DecoderLayer",
    "Draws",
    "Embedding",
    "InputFormat",
    "Library",
    "NativeDecoder",
    "PackedExpert",
    "PackedLinear",
    "PackedLora",
    "PackedMixture",
    "ThreadPool",
    "WeightFormat",
    "dequantize_blocks",
    "draw",
    "empty_draws",
    "levels_of_blocks",
    "load_library",
    "stored_head_dim",
    "supports",
]
