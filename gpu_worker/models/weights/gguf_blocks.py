"""Converts GGUF's block types to the kernels' block formats without loss.

ggml defines the types (ggml-common.h, ggml-quants.c); the `gguf` package implements them in numpy.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import torch
from torch import Tensor

from gpu_worker.models.weights.weight import WeightFormat

_Type = gguf.GGMLQuantizationType


def from_gguf(kind: gguf.GGMLQuantizationType, rows: Tensor) -> tuple[WeightFormat, Tensor] | None:
    """Convert a matrix, given as rows of GGUF blocks (uint8); return its format and rows, or None if there is no format
    for it.

    The result is also None if a Q4_0 scale is so large that the corresponding minimum of Q4_1 overflows.
    """
    if kind not in _CONVERSIONS:
        return None
    weight_format, convert = _CONVERSIONS[kind]
    if convert is None:
        return weight_format, rows
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    made = convert(torch.unflatten(rows, 1, (-1, block_bytes)))
    return None if made is None else (weight_format, made.flatten(1))


def _halves(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float16)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _nibbles(values: Tensor) -> Tensor:
    """Pack values of at most 15 into nibbles: [..., 32] -> [..., 16]."""
    return values[..., :16] | values[..., 16:] << 4


def _q4_0(blocks: Tensor) -> Tensor | None:
    minimum = _halves(blocks[..., :2]) * -8
    if not bool(minimum.isfinite().all()):
        return None
    return torch.cat((blocks[..., :2], _bytes(minimum), blocks[..., 2:]), dim=-1)


def _five_bits(low: Tensor, high: Tensor) -> Tensor:
    """Unpack five-bit values from nibbles `low` [..., 16] and high bits, one per weight, [..., 4] -> [..., 32]."""
    bits = high[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return torch.cat((low & 15, low >> 4), dim=-1) | bits.flatten(-2) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    levels = _five_bits(blocks[..., 6:], blocks[..., 2:6]).view(torch.int8) - 16
    return torch.cat((blocks[..., :2], _bytes(levels)), dim=-1)


def _q5_1(blocks: Tensor) -> Tensor:
    scales = _halves(blocks[..., :4]).float()
    return torch.cat((_bytes(scales), _five_bits(blocks[..., 8:], blocks[..., 4:8])), dim=-1)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 12 bytes [..., 12] into eight scales and eight minimums of six bits each."""
    a, b, c = torch.split(packed, 4, dim=-1)
    scales = torch.cat((a & 63, c & 15 | a >> 6 << 4), dim=-1)
    minimums = torch.cat((b & 63, c >> 4 | b >> 6 << 4), dim=-1)
    return scales, minimums


def _k_nibbles(packed: Tensor) -> Tensor:
    """Unpack 128 bytes into [..., 8, 32]: the low nibbles of 32 bytes are one block, the high nibbles the next."""
    pairs = torch.unflatten(packed, -1, (4, 1, 32))
    return torch.cat((pairs & 15, pairs >> 4), dim=-2).flatten(-3, -2)


def _q4_k(blocks: Tensor) -> Tensor:
    units, (scales, minimums) = blocks[..., None, :4].expand(*blocks.shape[:-1], 8, 4), _k_scales(blocks[..., 4:16])
    levels = _nibbles(_k_nibbles(blocks[..., 16:]))
    return torch.cat((units, scales[..., None], minimums[..., None], levels), dim=-1)


def _q5_k(blocks: Tensor) -> Tensor:
    units, (scales, minimums) = _halves(blocks[..., :4]).float(), _k_scales(blocks[..., 4:16])
    fields = torch.stack((units[..., :1] * scales, -(units[..., 1:] * minimums)), dim=-1)
    bits = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return torch.cat((_bytes(fields), _k_nibbles(blocks[..., 48:]) | bits << 4), dim=-1)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high = (
        torch.unflatten(blocks[..., :128], -1, (2, 1, 2, 32)),
        torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32)),
    )
    nibbles = torch.cat((low & 15, low >> 4), dim=-3).flatten(-3, -2)  # [..., 2, 4, 32]
    bits = high >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    levels = (nibbles | bits << 4).view(torch.int8) - 32
    return _two_scales(blocks[..., 208:], blocks[..., 192:208], levels.flatten(-3, -2))


def _q3_k(blocks: Tensor) -> Tensor:
    low = torch.unflatten(blocks[..., 32:96], -1, (2, 1, 32)) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    is_high = blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    levels = low.flatten(-3, -2).view(torch.int8) - 4 * (1 - is_high.view(torch.int8))
    packed = blocks[..., 96:108]
    low_scales = torch.cat((packed[..., :8] & 15, packed[..., :8] >> 4), dim=-1)
    high_scales = packed[..., None, 8:] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    scales = (low_scales | high_scales.flatten(-2) << 4).view(torch.int8) - 32
    return _two_scales(blocks[..., 108:], _bytes(scales), levels)


def _two_scales(unit: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    """Build blocks with two scales each from a float16 unit [..., 2], 16 scale bytes and signed levels [..., 8, 32]."""
    units = unit[..., None, :].expand(*unit.shape[:-1], 8, 2)
    return torch.cat((units, torch.unflatten(scales, -1, (8, 2)), _bytes(levels)), dim=-1)


_CONVERSIONS: dict[gguf.GGMLQuantizationType, tuple[WeightFormat, Callable[[Tensor], Tensor | None] | None]] = {
    _Type.Q4_0: ("q4", _q4_0),
    _Type.Q4_1: ("q4", None),
    _Type.Q5_0: ("q8", _q5_0),
    _Type.Q5_1: ("affine8", _q5_1),
    _Type.Q8_0: ("q8", None),
    _Type.Q3_K: ("q6_k", _q3_k),
    _Type.Q4_K: ("q4_k", _q4_k),
    _Type.Q5_K: ("affine8", _q5_k),
    _Type.Q6_K: ("q6_k", _q6_k),
    _Type.MXFP4: ("mxfp4", None),
}
