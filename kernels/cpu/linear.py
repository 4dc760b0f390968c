"""Linear layers over packed weights, which may be quantized."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from kernels.cpu.huge_pages import empty_bytes
from kernels.cpu.library import Library, LinearStruct
from kernels.cpu.threads import ThreadPool


class WeightFormat(IntEnum):
    """Storage format of weights in memory; the values are those of csrc/formats.h.

    Formats from Q4_1 on are rows of blocks of 32 weights, uint8 [N, K / 32 * block bytes] with K rounded up. A block
    has the fields named below in this order, little-endian, followed by the weights. Four-bit weights take 16 bytes:
    the low nibble of byte i is weight i and the high nibble is weight 16 + i. Other weights take a byte each.
    """

    F32 = 0
    BF16 = 1
    INT8 = 2  # one scale per output channel; built from floats, or from rows of bytes with a float32 scale at the end
    Q4_1 = 3  # GGUF: float16 scale, float16 minimum; four bits
    Q8_0 = 4  # GGUF: float16 scale; int8
    INT4 = 5  # float32 scale whose last nine bits are replaced by the zero point; four bits
    Q4_K = 6  # float16 d, float16 m, uint8 a, uint8 b; w = (d a) q - (m b), four bits; eight blocks share d and m
    MXFP4 = 7  # uint8 e; w = 2^(e - 127) times a four-bit float (E2M1)
    AFFINE8 = 8  # float32 scale, float32 minimum; uint8
    Q6_K = 9  # float16 d, int8 a, int8 b; w = (d a) q in the first half of the block, (d b) q in the second; int8
    FP8 = 10  # float32 scale; float8 (E4M3)
    INT16 = 11  # built from floats: 16 bits, with a power of two as the scale of 32 weights (`blocks.round_to_int16`)

    @property
    def has_blocks(self) -> bool:
        """Return whether the format has only a block layout, and no plain matrix."""
        return self >= WeightFormat.Q4_1 and self != WeightFormat.INT16


class InputFormat(IntEnum):
    """Number format of a layer's quantized input, with a scale per 32 elements; values as in csrc/quantized_rows.h."""

    F32 = 0  # not rounded
    INT8 = 1
    INT16 = 2  # as accurate as float32 accumulation, and faster


BLOCK = 32
GGUF_BLOCK_BYTES = {WeightFormat.Q4_1: 20, WeightFormat.Q8_0: 34}


class PackedLinear:
    """A linear layer [N, K] in the layout that the kernels read."""

    def __init__(
        self,
        library: Library,
        parts: Sequence[Tensor],
        weight_format: WeightFormat,
        bias: Tensor | None = None,
        is_gated: bool = False,
        input_format: InputFormat = InputFormat.F32,
        num_inputs: int | None = None,
        input_order: Tensor | None = None,
    ) -> None:
        """Stack the parts along N and pack them; the original tensors are not needed afterwards.

        A part is a float tensor [N, K], or uint8 rows of blocks. bias is [sum of N]. With is_gated, the parts are the
        gate and up weights of a feed-forward layer, and the decoder multiplies the two results elementwise into N
        outputs. Input rows are rounded to input_format if the kernels have integer products for the weight format on
        this processor: INT16 supports all integer formats; INT8 supports most of them with VNNI, and the four-bit ones
        without it. rounds_input tells whether inputs are rounded. num_inputs gives K if the weights are in blocks and K
        is not a multiple of 32. If input_order is given, column i of the weights is multiplied by element
        input_order[i] of the input.
        """
        has_blocks = parts[0].dtype == torch.uint8
        stacked = torch.cat([_rows(part, weight_format, has_blocks) for part in parts])
        self.num_outputs = stacked.shape[0]
        self.num_inputs = num_inputs or _num_inputs(library, stacked, weight_format, has_blocks)
        if has_blocks and stacked.shape[1] != library.row_bytes(int(weight_format), self.num_inputs):
            raise ValueError(f"a row of {stacked.shape[1]} bytes is not made of {weight_format.name} blocks")
        if weight_format == WeightFormat.Q4_K and self.num_inputs % 256:
            raise ValueError(f"Q4_K weights have {self.num_inputs} inputs: expected a multiple of 256")
        self.format = weight_format
        self.is_gated = is_gated
        self.rounds_input = library.has_integer_products(int(weight_format), int(input_format))
        if is_gated and (len(parts) != 2 or parts[0].shape != parts[1].shape or bias is not None):
            raise ValueError("a gated layer must have two parts of the same shape and no bias")
        order = _gated_order(self.num_outputs, library.panel()) if is_gated else torch.arange(self.num_outputs)
        order = order.int()
        sizes = (int(weight_format), len(order), self.num_inputs)
        self.packed = empty_bytes(library.packed_bytes(*sizes))
        self.bias = None if bias is None else bias.float().contiguous()
        if self.bias is not None and self.bias.shape != (self.num_outputs,):
            raise ValueError(f"bias is {list(self.bias.shape)}: expected [{self.num_outputs}]")
        self.input_order = None if input_order is None else _checked_order(input_order, self.num_inputs)
        library.pack(sizes[0], has_blocks, stacked.data_ptr(), *sizes[1:], order.data_ptr(), self.packed.data_ptr())
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in (self.bias, self.input_order))
        self.struct = LinearStruct(
            self.packed.data_ptr(), *pointers, None, *sizes[1:], int(weight_format), int(input_format)
        )
        self._next: PackedLinear | None = None

    def followed_by(self, other: PackedLinear) -> PackedLinear:
        """Append the outputs of another layer that has the same input; return this layer."""
        if self.is_gated or other.is_gated or other.num_inputs != self.num_inputs or self._next is not None:
            raise ValueError(
                "only one layer can follow, neither layer may be gated, and both must have the same number of inputs"
            )
        self._next = other  # the kernels hold pointers to it
        self.struct.next = ctypes.addressof(other.struct)
        self.num_outputs += other.num_outputs
        return self

    def __call__(self, x: Tensor, threads: ThreadPool) -> Tensor:
        """Return x [M, K] times the transposed weights plus the bias, as float32 [M, N]."""
        if self.is_gated:
            raise ValueError("a gated layer can only run inside a decoder")
        if x.dtype != torch.float32 or x.shape[1:] != (self.num_inputs,) or not x.is_contiguous():
            raise ValueError(f"x is {x.dtype} {list(x.shape)}: expected contiguous float32 [M, {self.num_inputs}]")
        out = torch.empty(x.shape[0], self.num_outputs)
        threads.library.linear(threads.handle, ctypes.byref(self.struct), x.shape[0], x.data_ptr(), out.data_ptr())
        return out


def _rows(part: Tensor, weight_format: WeightFormat, has_blocks: bool) -> Tensor:
    if (part.dtype == torch.uint8) != has_blocks or (weight_format.has_blocks and not has_blocks):
        raise ValueError(f"{weight_format.name} weights are {part.dtype}: expected uint8 rows of blocks")
    if has_blocks and not weight_format.has_blocks and weight_format != WeightFormat.INT8:
        raise ValueError(f"{weight_format.name} weights are {part.dtype}: expected a floating-point type")
    return part.contiguous() if has_blocks else part.float().contiguous()


def _num_inputs(library: Library, stacked: Tensor, weight_format: WeightFormat, has_blocks: bool) -> int:
    if not has_blocks:
        return stacked.shape[1]
    tail: int = library.row_bytes(int(weight_format), 0)
    block_bytes: int = library.row_bytes(int(weight_format), BLOCK) - tail
    return (stacked.shape[1] - tail) // block_bytes * BLOCK


def _checked_order(order: Tensor, num_inputs: int) -> Tensor:
    order = order.int().contiguous()
    if not torch.equal(order.sort().values, torch.arange(num_inputs, dtype=torch.int32)):
        raise ValueError(f"input_order must be a permutation of 0..{num_inputs - 1}")
    return order


def _gated_order(num_rows: int, panel: int) -> Tensor:
    """Return the row indices that alternate panels of gate and up rows; -1 pads the last panels."""
    half = num_rows // 2
    padded = torch.full((-(-half // panel) * panel,), -1)
    padded[:half] = torch.arange(half)
    gate = padded.view(-1, panel)
    up = torch.where(gate < 0, gate, gate + half)
    return torch.stack((gate, up), dim=1).flatten()
