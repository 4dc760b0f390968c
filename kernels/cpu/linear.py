"""Linear layers over packed, perhaps quantized weights."""

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from kernels.cpu.library import Library, LinearStruct
from kernels.cpu.threads import ThreadPool


class WeightFormat(IntEnum):
    """How weights are held in memory; the numbers are those of csrc/formats.h."""

    F32 = 0
    BF16 = 1
    INT8 = 2  # one scale for each output channel
    Q4_1 = 3  # GGUF blocks of 32 weights with a float16 scale and minimum
    Q8_0 = 4  # GGUF blocks of 32 weights with a float16 scale

    @property
    def is_gguf(self) -> bool:
        """Whether weights come as GGUF blocks."""
        return self in (WeightFormat.Q4_1, WeightFormat.Q8_0)


class InputFormat(IntEnum):
    """What a layer's input is rounded to, 32 numbers to a scale; the numbers are those of csrc/quantized_rows.h."""

    F32 = 0  # not rounded
    INT8 = 1
    INT16 = 2  # as exact as float32 sums, and faster


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
    ) -> None:
        """Stack the parts along N and pack them; they are not needed afterwards.

        A part is a float tensor [N, K], or for Q4_1 and Q8_0 the uint8 rows of GGUF blocks [N, K / 32 * block bytes].
        bias is [sum of N]. With is_gated the parts are the gate and up weights of a feed-forward layer, which the
        decoder multiplies into N outputs. Each row of the input is rounded to input_format where the processor has
        integer products for the weights: INT16 for all quantized ones, INT8 for Q4_1 and with VNNI all;
        rounds_input says whether it is.
        """
        stacked = torch.cat([_rows(part, weight_format) for part in parts])
        self.num_outputs = stacked.shape[0]
        self.num_inputs = _num_inputs(stacked, weight_format)
        self.format = weight_format
        self.is_gated = is_gated
        self.rounds_input = library.has_integer_products(int(weight_format), int(input_format))
        if is_gated and (len(parts) != 2 or parts[0].shape != parts[1].shape or bias is not None):
            raise ValueError("a gated layer has two parts of one shape and no bias")
        order = _gated_order(self.num_outputs, library.panel()) if is_gated else torch.arange(self.num_outputs)
        order = order.int()
        sizes = (int(weight_format), len(order), self.num_inputs)
        self.packed = torch.empty(library.packed_bytes(*sizes), dtype=torch.uint8)
        self.bias = None if bias is None else bias.float().contiguous()
        if self.bias is not None and self.bias.shape != (self.num_outputs,):
            raise ValueError(f"bias is {list(self.bias.shape)}: expected [{self.num_outputs}]")
        library.pack(sizes[0], stacked.data_ptr(), *sizes[1:], order.data_ptr(), self.packed.data_ptr())
        bias_pointer = None if self.bias is None else self.bias.data_ptr()
        self.struct = LinearStruct(self.packed.data_ptr(), bias_pointer, *sizes[1:], sizes[0], int(input_format))

    def __call__(self, x: Tensor, threads: ThreadPool) -> Tensor:
        """Return x [M, K] times the weights, plus bias -> [M, N], float32."""
        if self.is_gated:
            raise ValueError("a gated layer runs inside a decoder only")
        if x.dtype != torch.float32 or x.shape[1:] != (self.num_inputs,) or not x.is_contiguous():
            raise ValueError(f"x is {x.dtype} {list(x.shape)}: expected contiguous float32 [M, {self.num_inputs}]")
        out = torch.empty(x.shape[0], self.num_outputs)
        threads.library.linear(threads.handle, ctypes.byref(self.struct), x.shape[0], x.data_ptr(), out.data_ptr())
        return out


def _rows(part: Tensor, weight_format: WeightFormat) -> Tensor:
    if weight_format.is_gguf and part.dtype != torch.uint8:
        raise ValueError(f"{weight_format.name} weights are {part.dtype}: expected uint8 rows of GGUF blocks")
    return part.contiguous() if weight_format.is_gguf else part.float().contiguous()


def _num_inputs(stacked: Tensor, weight_format: WeightFormat) -> int:
    if not weight_format.is_gguf:
        return stacked.shape[1]
    blocks, rest = divmod(stacked.shape[1], GGUF_BLOCK_BYTES[weight_format])
    if rest:
        raise ValueError(f"a row of {stacked.shape[1]} bytes is not made of {weight_format.name} blocks")
    return blocks * BLOCK


def _gated_order(num_rows: int, panel: int) -> Tensor:
    """Return the rows with panels of gate and up in turn; -1 fills the last panels."""
    half = num_rows // 2
    padded = torch.full((-(-half // panel) * panel,), -1)
    padded[:half] = torch.arange(half)
    gate = padded.view(-1, panel)
    up = torch.where(gate < 0, gate, gate + half)
    return torch.stack((gate, up), dim=1).flatten()
