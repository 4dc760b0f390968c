"""Root-mean-square layer norm, with and without a residual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.dependent_launch import begin, options

# Minimum number of elements per program, for short rows (one head each).
_ELEMENTS = 2048


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of x [..., H] to unit root mean square, then by weight [H]; the mean is taken in float32."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual), all [M, H]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float) -> None:
    if x.dim() > 3 or x.stride(-1) != 1 or (residual is not None and residual.stride(-1) != 1):
        raise ValueError("rows of two or three dimensions, the last one contiguous, are supported")
    size = x.shape[-1]
    num_inner = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.numel() // size
    block = triton.next_power_of_2(size)
    rows = max(1, _ELEMENTS // block)
    _norm[(triton.cdiv(num_rows, rows),)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        total if total is not None else out,
        num_rows,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        residual.stride(0) if residual is not None else 0,
        eps,
        NUM_INNER=num_inner,
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        ADDS=residual is not None,
        num_warps=min(16, max(4, block // 512)),
        enable_fp_fusion=False,
        **options(x.device),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_rows,
    x_stride_outer,
    x_stride_inner,
    residual_stride,
    eps,
    NUM_INNER: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    begin(IS_DEPENDENT)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    is_element = (rows < num_rows)[:, None] & is_column[None, :]
    sources = (rows // NUM_INNER) * x_stride_outer + (rows % NUM_INNER) * x_stride_inner
    x = tl.load(x_ptr + sources[:, None] + columns[None, :], mask=is_element, other=0.0)
    targets = rows[:, None] * SIZE + columns[None, :]
    wide = x.to(tl.float32)
    if ADDS:
        residual = tl.load(
            residual_ptr + rows[:, None] * residual_stride + columns[None, :], mask=is_element, other=0.0
        )
        # What is normed is the sum as it is kept, rounded.
        x = (wide + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + targets, x, mask=is_element)
        wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    normed = (wide * inverse[:, None]).to(x.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
    tl.store(out_ptr + targets, normed.to(x.dtype), mask=is_element)
