"""Quantized weights in the layout of the GPU kernels: codes, and one scale per group of columns."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.cpu.blocks import MXFP4_LEVELS, fields_bytes, levels_of_blocks
from kernels.cpu.linear import WeightFormat

# Kinds of codes; the four-bit ones come first.
KINDS = ("int4", "float4", "uint8", "int8", "float8")
_KINDS = {
    WeightFormat.Q4_1: "int4",
    WeightFormat.INT4: "int4",
    WeightFormat.Q4_K: "int4",
    WeightFormat.MXFP4: "float4",
    WeightFormat.AFFINE8: "uint8",
    WeightFormat.Q8_0: "int8",
    WeightFormat.Q6_K: "int8",
    WeightFormat.FP8: "float8",
}


_MAX_GROUP = 128


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A matrix [N, K] with elements level * scale + minimum.

    Attributes:
        kind: One of KINDS.
        codes: uint8 [N, bytes]; four-bit codes take 16 bytes per 32 columns, as in `WeightFormat`, others a byte each.
        scale: [N, K / group].
        minimum: [N, K / group]; None means zero.
        group: Number of columns that share a scale.
        num_columns: K.
        row_scale: Float32 [N], if all groups of each row of a float8 matrix have the same scale.
    """

    kind: str
    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    group: int
    num_columns: int
    row_scale: Tensor | None = None

    def dense(self) -> Tensor:
        """Return the dequantized weights, float32 [N, K]."""
        codes = self.codes
        if self.kind in KINDS[:2]:
            blocks = torch.unflatten(codes, 1, (-1, 16))
            codes = torch.cat((blocks & 15, blocks >> 4), dim=-1).flatten(1)
        if self.kind == "float4":
            levels = _float4_levels(codes.device)[codes.long()]
        elif self.kind in ("int8", "float8"):
            levels = codes.view(torch.int8 if self.kind == "int8" else torch.float8_e4m3fn).float()
        else:
            levels = codes.float()
        groups = torch.arange(levels.shape[1], device=codes.device) // self.group
        weights = levels * self.scale.float()[:, groups]
        if self.minimum is not None:
            weights = weights + self.minimum.float()[:, groups]
        return weights[:, : self.num_columns]

    def to(self, device: torch.device) -> BlockWeight:
        """Return a copy on another device."""
        minimum = None if self.minimum is None else self.minimum.to(device)
        row_scale = None if self.row_scale is None else self.row_scale.to(device)
        return replace(
            self, codes=self.codes.to(device), scale=self.scale.to(device), minimum=minimum, row_scale=row_scale
        )


@functools.cache
def _float4_levels(device: torch.device) -> Tensor:
    """Return the value of each code; the copy to the device, which cannot be recorded, is made once."""
    return torch.tensor(MXFP4_LEVELS, dtype=torch.float32, device=device)


def block_weight(rows: Tensor, weight_format: WeightFormat, num_columns: int) -> BlockWeight | None:
    """Convert rows of blocks to codes and scales; return None if the format is not a block format."""
    if weight_format not in _KINDS:
        return None
    size, num_bytes = fields_bytes(weight_format)
    codes = torch.unflatten(rows, 1, (-1, num_bytes))[..., size:].flatten(1).contiguous()
    levels, scale, minimum = levels_of_blocks(rows, weight_format)
    group, scale = levels.shape[-1], scale.flatten(1)
    minimum = None if minimum is None else minimum.flatten(1)
    while group < _MAX_GROUP and _has_pairs(scale) and (minimum is None or _has_pairs(minimum)):
        group, scale = group * 2, scale[:, ::2]
        minimum = None if minimum is None else minimum[:, ::2]
    minimum = None if minimum is None else _smallest(minimum)
    kind, row_scale = _KINDS[weight_format], None
    if kind == "float8" and torch.equal(scale, scale[:, :1].expand_as(scale)):
        row_scale = scale[:, 0].float().contiguous()
    return BlockWeight(kind, codes, _smallest(scale), minimum, group, num_columns, row_scale)


def _has_pairs(values: Tensor) -> bool:
    return values.shape[1] % 2 == 0 and torch.equal(values[:, ::2], values[:, 1::2])


def _smallest(values: Tensor) -> Tensor:
    """Return the same values in the smallest floating-point type that represents them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(values.to(dtype).float(), values):
            return values.to(dtype)
    return values.contiguous()
