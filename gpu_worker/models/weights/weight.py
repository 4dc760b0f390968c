"""A weight matrix and the form in which it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import gguf
import torch
from torch import Tensor

WeightFormat = Literal["f32", "bf16", "int8", "q4", "q8"]
# Formats of GGUF that are computed with as they are.
BLOCK_TYPES: dict[WeightFormat, gguf.GGMLQuantizationType] = {
    "q4": gguf.GGMLQuantizationType.Q4_1,
    "q8": gguf.GGMLQuantizationType.Q8_0,
}
_BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [num_rows, num_columns]; rows are output channels.

    Attributes:
        format: f32; bf16; int8 with a scale per row; q4 and q8: blocks of 32 as in GGUF's Q4_1 and Q8_0.
        source: Floats [num_rows, num_columns], not yet rounded to `format`; for q4 and q8 uint8
            [num_rows, bytes of a row's blocks].
    """

    format: WeightFormat
    source: Tensor
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, num_columns)."""
        return self.source.shape[0], self.num_columns

    def dense(self) -> Tensor:
        """The values that `format` stands for, float32 [num_rows, num_columns]."""
        if self.format in BLOCK_TYPES:
            return torch.from_numpy(gguf.quants.dequantize(self.source.numpy(), BLOCK_TYPES[self.format]))
        values = self.source.float()
        if self.format == "bf16":
            return values.bfloat16().float()
        if self.format == "int8":
            scale = values.abs().amax(dim=1, keepdim=True) / 127
            inverse = torch.where(scale > 0, 1 / scale, 0)
            return (values * inverse).round() * scale
        return values

    def take(self, rows: Tensor) -> Weight:
        """The rows of the given numbers, in that order."""
        return Weight(self.format, self.source[rows], self.num_columns)

    def converted(self, target: WeightFormat) -> Weight:
        """The same matrix kept in another format."""
        if target == self.format or (target == "q4" and self.num_columns % _BLOCK_SIZE):
            return self
        if target in BLOCK_TYPES:
            blocks = gguf.quants.quantize(self.dense().numpy(), BLOCK_TYPES[target])
            return Weight(target, torch.from_numpy(blocks), self.num_columns)
        return Weight(target, self.dense(), self.num_columns)


def stack(parts: Sequence[Weight]) -> Weight:
    """The parts' rows one below another; parts of different formats become f32."""
    if len(parts) == 1:
        return parts[0]
    formats = {part.format for part in parts}
    if len(formats) == 1 and len({part.source.dtype for part in parts}) == 1:
        return Weight(parts[0].format, torch.cat([part.source for part in parts]), parts[0].num_columns)
    return Weight("f32", torch.cat([part.dense() for part in parts]), parts[0].num_columns)
