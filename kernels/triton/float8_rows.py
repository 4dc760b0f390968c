"""Rounds rows to float8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.scaled_linear import LARGEST_FLOAT8
from kernels.triton.dependent_launch import begin, options


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [M, K] as float8 e4m3, and the scales of its rows, float32 [M, 1]."""
    num_rows, size = x.shape
    if x.stride(1) != 1:
        raise ValueError("the last dimension is not contiguous")
    out = torch.empty(num_rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_rows, 1, device=x.device)
    block = triton.next_power_of_2(size)
    _quantize_rows[(num_rows,)](
        x,
        out,
        scale,
        size,
        x.stride(0),
        LARGEST=LARGEST_FLOAT8,
        BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
        enable_fp_fusion=False,
        **options(x.device),
    )
    return out, scale


@triton.jit
def _quantize_rows(
    x_ptr,
    out_ptr,
    scale_ptr,
    size,
    stride,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + columns, mask=columns < size, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), 0) / LARGEST
    tl.store(scale_ptr + row, scale)
    units = x / tl.where(scale == 0.0, 1.0, scale)
    tl.store(out_ptr + row * size + columns, units.to(out_ptr.dtype.element_ty), mask=columns < size)
