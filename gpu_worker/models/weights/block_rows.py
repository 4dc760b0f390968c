"""Converts quantized matrices, given as levels and scales, to rows of blocks in the kernels' formats."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.models.weights.weight import Weight

BLOCK = 32
_ZERO_BITS = 9


def blocks_per_scale(scale: Tensor, num_columns: int) -> Tensor:
    """Expand scales [N, groups], which cover equal numbers of columns, to one scale per block: [N, blocks]. Raises
    ValueError if the group size is not a multiple of the block size.
    """
    num_blocks = -(-num_columns // BLOCK)
    if scale.shape[1] in (1, num_blocks):
        return scale.expand(-1, num_blocks)
    group, rest = divmod(num_columns, scale.shape[1])
    if rest or group % BLOCK:
        raise ValueError(
            f"{scale.shape[1]} scales for {num_columns} columns: the group size must be a multiple of {BLOCK}"
        )
    return scale.repeat_interleave(group // BLOCK, dim=1)


def int4_weight(levels: Tensor, scale: Tensor, zero: Tensor, input_order: Tensor | None = None) -> Weight:
    """Return the matrix scale * (levels - zero) in a four-bit format.

    Args:
        levels: uint8 [N, K], at most 15.
        scale: [N, groups]; 16-bit floats are kept exactly, float32 numbers with the first 15 bits of the mantissa.
        zero: Integers [N, groups], 0 to 16.
    """
    num_columns = levels.shape[1]
    words = blocks_per_scale(scale.float(), num_columns).contiguous().view(torch.int32)
    rounded = (words + (1 << (_ZERO_BITS - 1))) >> _ZERO_BITS << _ZERO_BITS
    fields = (rounded | blocks_per_scale(zero.int(), num_columns))[..., None].view(torch.uint8)
    blocks = _blocks(levels)
    rows = torch.cat((fields, blocks[..., :16] | blocks[..., 16:] << 4), dim=-1)
    return Weight("int4", rows.flatten(1), num_columns, input_order)


def affine8_weight(levels: Tensor, scale: Tensor, zero: Tensor, input_order: Tensor | None = None) -> Weight:
    """Return the matrix scale * (levels - zero); levels are uint8 [N, K], scale and zero [N, groups]."""
    num_columns = levels.shape[1]
    scales, minimums = scale.float(), -(scale.float() * zero.float())
    fields = torch.stack([blocks_per_scale(values, num_columns) for values in (scales, minimums)], dim=-1)
    rows = torch.cat((fields.contiguous().view(torch.uint8), _blocks(levels)), dim=-1)
    return Weight("affine8", rows.flatten(1), num_columns, input_order)


def int8_weight(levels: Tensor, scale: Tensor) -> Weight:
    """Return the matrix scale * levels; levels are int8 [N, K], scale [N, 1]."""
    codes = _blocks(levels.view(torch.uint8)).flatten(1)
    return Weight("int8_rows", torch.cat((codes, _bytes(scale)), dim=1), levels.shape[1])


def fp8_weight(levels: Tensor, scale: Tensor, input_order: Tensor | None = None) -> Weight:
    """Return the matrix scale * levels; levels are float8_e4m3fn [N, K], scale [N, groups]."""
    num_columns = levels.shape[1]
    fields = _bytes(blocks_per_scale(scale, num_columns)[..., None])
    rows = torch.cat((fields, _blocks(levels.view(torch.uint8))), dim=-1)
    return Weight("fp8", rows.flatten(1), num_columns, input_order)


def mxfp4_weight(codes: Tensor, exponents: Tensor) -> Weight:
    """Return the matrix of E2M1 codes, uint8 [N, K]; each group of 32 shares an E8M0 exponent byte, [N, K / 32]."""
    blocks = _blocks(codes)
    rows = torch.cat((exponents[..., None], blocks[..., :16] | blocks[..., 16:] << 4), dim=-1)
    return Weight("mxfp4", rows.flatten(1), codes.shape[1])


def _blocks(levels: Tensor) -> Tensor:
    """Reshape [N, K] to [N, blocks, 32], padding with zeros."""
    return torch.unflatten(torch.nn.functional.pad(levels, (0, -levels.shape[1] % BLOCK)), 1, (-1, BLOCK))


def _bytes(values: Tensor) -> Tensor:
    return values.float().contiguous().view(torch.uint8)
