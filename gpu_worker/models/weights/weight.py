"""A weight matrix and its storage format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import gguf
import torch
from torch import Tensor

from kernels import BlockWeight, block_weight
from kernels.cpu import WeightFormat as KernelFormat
from kernels.cpu import dequantize_blocks

WeightFormat = Literal[
    "f32", "bf16", "int8", "int8_rows", "q4", "q8", "int4", "q4_k", "mxfp4", "affine8", "q6_k", "fp8", "mixed"
]
# Formats that consist of rows of bytes, as defined by the CPU kernels.
BLOCK_FORMATS: dict[WeightFormat, KernelFormat] = {
    "int8_rows": KernelFormat.INT8,
    "q4": KernelFormat.Q4_1,
    "q8": KernelFormat.Q8_0,
    "int4": KernelFormat.INT4,
    "q4_k": KernelFormat.Q4_K,
    "mxfp4": KernelFormat.MXFP4,
    "affine8": KernelFormat.AFFINE8,
    "q6_k": KernelFormat.Q6_K,
    "fp8": KernelFormat.FP8,
}
# Formats to which others can be converted.
_TARGETS: dict[WeightFormat, gguf.GGMLQuantizationType] = {
    "q4": gguf.GGMLQuantizationType.Q4_1,
    "q8": gguf.GGMLQuantizationType.Q8_0,
}
_BLOCK_SIZE = 32
_MAX_RUNS = 8


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [num_rows, num_columns]; its rows are output channels.

    Attributes:
        format: f32; bf16; int8 with a scale per row; one of BLOCK_FORMATS; or mixed, if its parts have different
            formats.
        source: Floats [num_rows, num_columns], not yet rounded to `format`; uint8 [num_rows, bytes of a row] for
            BLOCK_FORMATS; empty for mixed.
        input_order: int64 [num_columns]; column i of `source` is column input_order[i] of the matrix; None means column
            i.
        parts: Parts of a mixed matrix, stacked by rows.
    """

    format: WeightFormat
    source: Tensor
    num_columns: int
    input_order: Tensor | None = None
    parts: tuple[Weight, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (num_rows, num_columns)."""
        return sum(part.shape[0] for part in self.parts) or self.source.shape[0], self.num_columns

    def dense(self) -> Tensor:
        """Return the dequantized values, float32 [num_rows, num_columns]."""
        if self.parts:
            return torch.cat([part.dense() for part in self.parts])
        values = self._values()
        if self.input_order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.input_order, values)

    def _values(self) -> Tensor:
        if self.format in BLOCK_FORMATS:
            return dequantize_blocks(self.source, BLOCK_FORMATS[self.format], self.num_columns)
        values = self.source.float()
        if self.format == "bf16":
            return values.bfloat16().float()
        if self.format == "int8":
            scale = values.abs().amax(dim=1, keepdim=True) / 127
            inverse = torch.where(scale > 0, 1 / scale, 0)
            return (values * inverse).round() * scale
        return values

    def take(self, rows: Tensor) -> Weight:
        """Return the given rows, in that order."""
        if not self.parts:
            return Weight(self.format, self.source[rows], self.num_columns, self.input_order)
        ends = torch.tensor([part.shape[0] for part in self.parts]).cumsum(0)
        owners = torch.bucketize(rows, ends, right=True)
        runs, counts = torch.unique_consecutive(owners, return_counts=True)
        if len(runs) > _MAX_RUNS:
            return Weight("f32", self.dense()[rows], self.num_columns)
        starts = ends - torch.tensor([part.shape[0] for part in self.parts])
        pieces = zip(runs.tolist(), torch.split(rows, counts.tolist()), strict=True)
        return stack([self.parts[owner].take(piece - starts[owner]) for owner, piece in pieces])

    def converted(self, target: WeightFormat) -> Weight:
        """Return the same matrix in another format."""
        if target == self.format or (target == "q4" and self.num_columns % _BLOCK_SIZE):
            return self
        if target in _TARGETS:
            blocks = gguf.quants.quantize(self.dense().numpy(), _TARGETS[target])
            return Weight(target, torch.from_numpy(blocks), self.num_columns)
        return Weight(target, self.dense(), self.num_columns)

    def as_blocks(self) -> list[tuple[BlockWeight, Tensor | None]]:
        """Return the parts in the GPU kernels' layout, each with its input_order; empty if a part is not in blocks."""
        made = [
            (block_weight(part.source, BLOCK_FORMATS[part.format], part.num_columns), part.input_order)
            for part in self.parts or (self,)
            if part.format in BLOCK_FORMATS
        ]
        blocks = [(blocks, order) for blocks, order in made if blocks is not None]
        return blocks if len(blocks) == (len(self.parts) or 1) else []

    def gate_and_up(self) -> tuple[Weight, Weight]:
        """Return the upper and the lower half in a common format and input order, or in f32 if these differ."""
        whole = Weight("f32", self.dense(), self.num_columns) if self.parts else self
        first, second = whole.source.chunk(2)
        order = whole.input_order
        return Weight(whole.format, first, self.num_columns, order), Weight(
            whole.format, second, self.num_columns, order
        )


def stack(weights: Sequence[Weight]) -> Weight:
    """Stack matrices by rows; with different formats, the result is mixed if some are block formats, otherwise f32."""
    parts = [part for weight in weights for part in weight.parts or (weight,)]
    first = parts[0]
    if all(_is_alike(part, first) for part in parts):
        if len(parts) == 1:
            return first
        return Weight(first.format, torch.cat([p.source for p in parts]), first.num_columns, first.input_order)
    if any(part.format in BLOCK_FORMATS for part in parts):
        return Weight("mixed", torch.empty(0), first.num_columns, parts=tuple(parts))
    return Weight("f32", torch.cat([part.dense() for part in parts]), first.num_columns)


def _is_alike(a: Weight, b: Weight) -> bool:
    if a.format != b.format or a.source.dtype != b.source.dtype or (a.input_order is None) != (b.input_order is None):
        return False
    return a.input_order is None or b.input_order is None or torch.equal(a.input_order, b.input_order)
