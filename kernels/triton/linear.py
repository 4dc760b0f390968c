"""The linear layer with int8 weights, with a gated activation, and in a batch-invariant form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import SWIGLU_LIMIT, SWIGLU_SLOPE, Activation
from kernels.triton.activation import gated
from kernels.triton.dependent_launch import begin, options


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
# For int8 weights and 16-bit inputs, measured on an H100; with float32 inputs, these tiles spill registers.
_SOME_UNIT_ROWS = Launch(64, 32, 128, 4, 4)
_SOME_GATED_UNIT_ROWS = Launch(64, 128, 64, 8, 4)
MANY_ROWS = Launch(128, 128, 64, 8, 3)
# A program computes both the gates and the ups of its channels.
MANY_GATED_ROWS = Launch(128, 64, 64, 8, 3)


def _launch_for(num_rows: int, *, is_gated: bool, has_units: bool, is_batch_invariant: bool) -> Launch:
    """Return the tile sizes for this many rows of x; if batch-invariant, they are the same for any number of rows."""
    if is_batch_invariant:
        return SOME_ROWS
    if num_rows > SOME_ROWS.block_m:
        return MANY_GATED_ROWS if is_gated else MANY_ROWS
    if num_rows <= FEW_ROWS.block_m:
        return FEW_ROWS
    if has_units:
        return _SOME_GATED_UNIT_ROWS if is_gated else _SOME_UNIT_ROWS
    return SOME_ROWS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`: x [M, K], weight [N, K], bias [N] -> [M, N].

    This is batch-invariant: a row's bits do not depend on M or on the row's position, because the tile sizes are
    constant.
    """
    return _run(x, weight, None, bias, is_batch_invariant=True)


def quantized_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, is_batch_invariant: bool = False
) -> Tensor:
    """Return `x @ (weight * scale[:, None]).T + bias`: weight int8 [N, K], scale float32 [N].

    Tile sizes are chosen for M, unless the result must be batch-invariant.
    """
    return _run(x, weight, scale, bias, is_batch_invariant=is_batch_invariant)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    is_batch_invariant: bool = False,
) -> Tensor:
    """Return `activate` of the linear layer with weight [2F, K], gate first -> [M, F]; with a scale it is int8.

    Gates and ups are rounded to x's type before the activation, so batch-invariant results are bit-identical to those
    of the two separate operations.
    """
    return _run(x, weight, scale, bias, activation, is_batch_invariant=is_batch_invariant)


def _run(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    activation: Activation | None = None,
    *,
    is_batch_invariant: bool,
) -> Tensor:
    (num_rows, inner), outer = x.shape, weight.shape[0] // (1 if activation is None else 2)
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("the last dimension is not contiguous")
    launch = _launch_for(
        num_rows,
        is_gated=activation is not None,
        has_units=scale is not None and x.element_size() == 2,
        is_batch_invariant=is_batch_invariant,
    )
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
        ACTIVATION=activation or "",
        LIMIT=SWIGLU_LIMIT,
        SLOPE=SWIGLU_SLOPE,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=launch.num_warps,
        num_stages=stages,
        enable_fp_fusion=True,
        **options(x.device),
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
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: row tiles first, so that programs that share weights run together.

    With ACTIVATION the rows of the weight that follow the first `outer`, the gates, are the ups.
    """
    begin(IS_DEPENDENT)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    is_row = rows < num_rows
    is_channel = channels < outer
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + steps[None, :]
    weight_ptrs = weight_ptr + channels.to(tl.int64)[:, None] * inner + steps[None, :]
    up_ptrs = weight_ptrs + tl.cast(outer, tl.int64) * inner
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, inner, BLOCK_K):
        is_step = (k + steps < inner)[None, :]
        x = tl.load(x_ptrs + k, mask=is_row[:, None] & is_step, other=0.0)
        weight = tl.load(weight_ptrs + k, mask=is_channel[:, None] & is_step, other=0.0)
        acc = tl.dot(x, tl.trans(weight.to(x.dtype)), acc, input_precision=PRECISION)
        if ACTIVATION != "":
            weight = tl.load(up_ptrs + k, mask=is_channel[:, None] & is_step, other=0.0)
            up = tl.dot(x, tl.trans(weight.to(x.dtype)), up, input_precision=PRECISION)
    acc = _finished(acc, scale_ptr + channels, bias_ptr + channels, is_channel, IS_QUANTIZED, HAS_BIAS)
    if ACTIVATION != "":
        channels += outer
        up = _finished(up, scale_ptr + channels, bias_ptr + channels, is_channel, IS_QUANTIZED, HAS_BIAS)
    write_tile(acc, up, out_ptr, rows, outer, is_row, is_channel, BLOCK_N, ACTIVATION, LIMIT, SLOPE)


@triton.jit
def _finished(acc, scale_ptrs, bias_ptrs, is_channel, IS_QUANTIZED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return sums of products times the scale of their channel, plus its bias."""
    if IS_QUANTIZED:
        acc *= tl.load(scale_ptrs, mask=is_channel, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptrs, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def write_tile(
    acc,
    up,
    out_ptr,
    rows,
    outer,
    is_row,
    is_channel,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
):
    """Write a tile of the output: `acc`, or with ACTIVATION what it makes of the gates `acc` and `up`."""
    element = out_ptr.dtype.element_ty
    if ACTIVATION != "":
        acc = gated(acc.to(element), up.to(element), ACTIVATION, LIMIT, SLOPE)
    channels = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    out = out_ptr + rows.to(tl.int64)[:, None] * outer + channels[None, :]
    tl.store(out, acc.to(element), mask=is_row[:, None] & is_channel[None, :])
