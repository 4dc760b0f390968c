"""The CPU kernels in C++ (csrc/) as typed Python: packed weights and a decoder that runs all layers in one call."""

from kernels.cpu.decoder import DecoderDims, DecoderLayer, NativeDecoder, supports
from kernels.cpu.library import Library, load_library
from kernels.cpu.linear import PackedLinear, WeightFormat
from kernels.cpu.threads import ThreadPool

__all__ = [
    "DecoderDims",
    "DecoderLayer",
    "Library",
    "NativeDecoder",
    "PackedLinear",
    "ThreadPool",
    "WeightFormat",
    "load_library",
    "supports",
]
