"""The linear layer: over int8 weights, and with an order of summation that does not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Launch:
    """Tile sizes: rows of x, output channels, inner dimension."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


FEW_ROWS = Launch(16, 32, 128, 4, 5)
SOME_ROWS = Launch(64, 64, 64, 4, 4)
MANY_ROWS = Launch(128, 128, 64, 8, 3)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`: x [M, K], weight [N, K], bias [N] -> [M, N].

    Batch-invariant: a row's bits do not depend on M or on its place, because the tiles are always the same.
    """
    return _run(x, weight, None, bias, SOME_ROWS)


def quantized_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, is_batch_invariant: bool = False
) -> Tensor:
    """Return `x @ (weight * scale[:, None]).T + bias`: weight int8 [N, K], scale float32 [N].

    The tiles suit M, unless rows may not depend on it.
    """
    if is_batch_invariant:
        return _run(x, weight, scale, bias, SOME_ROWS)
    num_rows = x.shape[0]
    launch = FEW_ROWS if num_rows <= 16 else SOME_ROWS if num_rows <= 64 else MANY_ROWS
    return _run(x, weight, scale, bias, launch)


def _run(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, launch: Launch) -> Tensor:
    (num_rows, inner), outer = x.shape, weight.shape[0]
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("the last dimension is not contiguous")
    out = torch.empty(num_rows, outer, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_rows, launch.block_m), triton.cdiv(outer, launch.block_n))
    stages = launch.num_stages if x.element_size() <= 2 else 2
    _linear[grid](
        x,
        weight,
        scale if scale is not None else x,
        bias if bias is not None else x,
        out,
        num_rows,
        outer,
        inner,
        x.stride(0),
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        IS_QUANTIZED=scale is not None,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=launch.num_warps,
        num_stages=stages,
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outer,
    inner,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: row tiles first, so that programs that share weights run together."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    is_row = rows < num_rows
    is_channel = channels < outer
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + steps[None, :]
    weight_ptrs = weight_ptr + channels.to(tl.int64)[:, None] * inner + steps[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, inner, BLOCK_K):
        is_step = (k + steps < inner)[None, :]
        x = tl.load(x_ptrs + k, mask=is_row[:, None] & is_step, other=0.0)
        weight = tl.load(weight_ptrs + k, mask=is_channel[:, None] & is_step, other=0.0)
        acc = tl.dot(x, tl.trans(weight.to(x.dtype)), acc, input_precision=PRECISION)
    if IS_QUANTIZED:
        acc *= tl.load(scale_ptr + channels, mask=is_channel, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * outer + channels[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_channel[None, :])
