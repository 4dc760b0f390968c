"""Dequantizes rows of weight blocks in PyTorch; `WeightFormat` defines the byte format."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.linear import BLOCK, WeightFormat

_FIELD_BYTES = {
    WeightFormat.Q4_1: 4,
    WeightFormat.Q8_0: 2,
    WeightFormat.INT4: 4,
    WeightFormat.Q4_K: 6,
    WeightFormat.MXFP4: 1,
    WeightFormat.AFFINE8: 8,
    WeightFormat.Q6_K: 4,
    WeightFormat.FP8: 4,
}
_NIBBLES = frozenset({WeightFormat.Q4_1, WeightFormat.INT4, WeightFormat.Q4_K, WeightFormat.MXFP4})
ZERO_MASK = 0x1FF  # bits of INT4's scales that hold the zero point
# Values of the E2M1 codes, times two.
MXFP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def fields_bytes(weight_format: WeightFormat) -> tuple[int, int]:
    """Return the size in bytes of the fields of a block, and of the whole block."""
    return _FIELD_BYTES[weight_format], block_bytes(weight_format)


def block_bytes(weight_format: WeightFormat) -> int:
    """Return the size in bytes of a block of 32 weights."""
    return _FIELD_BYTES[weight_format] + (BLOCK // 2 if weight_format in _NIBBLES else BLOCK)


def levels_of_blocks(rows: Tensor, weight_format: WeightFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return levels q, scales s and minimums m for rows uint8 [N, blocks * bytes]: the weights are q * s + m.

    q is float32 [N, blocks, 32 / G, G] and s and m are [N, blocks, 32 / G, 1]; if m is None, the minimums are zero.
    """
    size = _FIELD_BYTES[weight_format]
    blocks = torch.unflatten(rows, 1, (-1, block_bytes(weight_format)))
    fields, codes = blocks[..., :size].contiguous(), blocks[..., size:]
    if weight_format in _NIBBLES:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    signed = codes.contiguous().view(torch.int8).float() if weight_format not in _NIBBLES else None
    levels, minimum = codes.float(), None
    halves, floats = (fields.view(dtype).float() if size % n == 0 else fields for dtype, n in _VIEWS)
    if weight_format == WeightFormat.Q4_1:
        scale, minimum = halves[..., :1], halves[..., 1:]
    elif weight_format == WeightFormat.AFFINE8:
        scale, minimum = floats[..., :1], floats[..., 1:]
    elif weight_format == WeightFormat.INT4:
        words = fields.view(torch.int32)
        scale = (words & ~ZERO_MASK).view(torch.float32)
        minimum = -(scale * (words & ZERO_MASK).float())
    elif weight_format == WeightFormat.Q4_K:
        scale = halves[..., :1] * fields[..., 4:5].float()
        minimum = -(halves[..., 1:2] * fields[..., 5:].float())
    elif weight_format == WeightFormat.MXFP4:
        levels = torch.tensor(MXFP4_LEVELS, dtype=torch.float32)[codes.long()]
        scale = torch.ldexp(torch.full_like(fields, 0.5, dtype=torch.float32), fields.int() - 127)
    elif weight_format == WeightFormat.FP8:
        levels, scale = codes.contiguous().view(torch.float8_e4m3fn).float(), floats
    else:
        assert signed is not None
        levels, scale = signed, halves[..., :1]
    if weight_format == WeightFormat.Q6_K:
        scale = halves[..., :1] * fields[..., 2:].contiguous().view(torch.int8).float()
        return torch.unflatten(levels, -1, (2, -1)), scale[..., None], None
    return levels[..., None, :], scale[..., None], None if minimum is None else minimum[..., None]


_VIEWS = ((torch.float16, 2), (torch.float32, 4))


def dequantize_blocks(rows: Tensor, weight_format: WeightFormat, num_columns: int) -> Tensor:
    """Dequantize rows of blocks, or INT8 rows with a scale at their end, to float32 [N, num_columns]."""
    if weight_format == WeightFormat.INT8:
        return rows[:, :num_columns].contiguous().view(torch.int8) * rows[:, -4:].contiguous().view(torch.float32)
    levels, scale, minimum = levels_of_blocks(rows, weight_format)
    weights = levels * scale
    return (weights if minimum is None else weights + minimum).flatten(1)[:, :num_columns].contiguous()


def round_to_int16(weight: Tensor) -> Tensor:
    """Return the values that `weight` [N, K] has after conversion to INT16.

    The scale of each 32 weights is such that their levels sum to at most 65,504, so that products with 16-bit inputs
    fit into 32 bits. Most bfloat16 weights are represented exactly: all but those far below the mean magnitude of their
    block.
    """
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % BLOCK))
    blocks = padded.view(len(weight), -1, BLOCK).double()
    sizes = blocks.abs()
    bound = torch.maximum(sizes.sum(2, keepdim=True) / 65504, sizes.amax(2, keepdim=True) / 8191)
    scale = torch.exp2(torch.frexp(bound).exponent.double())
    rounded: Tensor = ((blocks / scale).round() * scale).float()
    return rounded.flatten(1)[:, : weight.shape[1]]


def random_blocks(
    weight_format: WeightFormat, num_rows: int, num_columns: int, generator: torch.Generator | None = None
) -> Tensor:
    """Return rows of blocks with random levels, and with scales that give the weights magnitudes around 1."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    def floats(dtype: torch.dtype, count: int, most: float) -> Tensor:
        return ((torch.rand(*shape, count, generator=generator) - 0.5) * 2 * most).to(dtype).view(torch.uint8)

    shape = (num_rows, -(-num_columns // BLOCK))
    codes = integers(0, 256, *shape, block_bytes(weight_format) - _FIELD_BYTES[weight_format]).to(torch.uint8)
    if weight_format == WeightFormat.FP8:
        codes[codes & 127 == 127] = 0  # avoids NaN
        fields = [floats(torch.float32, 1, 1 / 64)]
    elif weight_format == WeightFormat.MXFP4:
        fields = [integers(124, 130, *shape, 1).to(torch.uint8)]
    elif weight_format == WeightFormat.INT4:
        scale = (torch.rand(*shape, 1, generator=generator) / 4).bfloat16().float()
        fields = [(scale.view(torch.int32) | integers(0, 17, *shape, 1)).view(torch.uint8)]
    elif weight_format == WeightFormat.AFFINE8:
        fields = [floats(torch.float32, 1, 1 / 64), floats(torch.float32, 1, 2)]
    elif weight_format == WeightFormat.Q4_K:
        units = floats(torch.float16, 2, 1 / 64)[:, ::8].repeat_interleave(8, dim=1)[:, : shape[1]]
        fields = [units, integers(0, 64, *shape, 2).to(torch.uint8)]
    elif weight_format == WeightFormat.Q6_K:
        fields = [floats(torch.float16, 1, 1 / 4096), integers(0, 256, *shape, 2).to(torch.uint8)]
    else:
        fields = [floats(torch.float16, 2 if weight_format == WeightFormat.Q4_1 else 1, 1 / 8)]
    return torch.cat((*fields, codes), dim=-1).flatten(1)
