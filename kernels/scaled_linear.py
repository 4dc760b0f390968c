"""The linear layer over float8 weights with a scale per row, multiplied in float8: the inputs are rounded as well.

Every row of the input gets a scale that maps its largest magnitude to the largest float8 number, 448. Rounding to the
three mantissa bits of e4m3 changes an element by up to 1/16 of its magnitude or, for elements smaller than 1/28,672 of
the row's largest magnitude, by up to 1/16 of that limit. Products are summed in float32 and rounded once, to the
input's type.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.block_weight import BlockWeight

LARGEST_FLOAT8 = 448.0
# Float8 matrix multiplication on a device requires sizes that are multiples of this.
_ALIGNMENT = 16
QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [M, K] as float8 e4m3, and the scales of its rows, float32 [M, 1]."""
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True) / LARGEST_FLOAT8
    return (wide / torch.where(scale == 0, 1.0, scale)).to(torch.float8_e4m3fn), scale


def can_scale(x: Tensor, weight: BlockWeight) -> bool:
    """Return whether `scaled_linear` supports x [M, K] and this weight."""
    outer, num_bytes = weight.codes.shape
    return (
        weight.row_scale is not None
        and x.dtype == torch.bfloat16
        and num_bytes == weight.num_columns
        and outer % _ALIGNMENT == num_bytes % _ALIGNMENT == 0
    )


def scaled_linear(
    x: Tensor, weight: BlockWeight, bias: Tensor | None = None, quantize: QuantizeRows = quantize_rows
) -> Tensor:
    """Return `x @ weight.T + bias` with the rows of x rounded to float8: x [M, K], bias [N] -> [M, N]."""
    assert weight.row_scale is not None
    units, scale = quantize(x)
    matrix = weight.codes.view(torch.float8_e4m3fn).t()
    out: Tensor = torch._scaled_mm(units, matrix, scale, weight.row_scale.view(1, -1), out_dtype=x.dtype)
    return out if bias is None else out + bias
