"""The linear layer over blocks of quantized weights, unpacked in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import SWIGLU_LIMIT, SWIGLU_SLOPE, Activation
from kernels.block_weight import KINDS, BlockWeight
from kernels.triton.dependent_launch import begin, capability, options
from kernels.triton.linear import launch_for, write_tile

# Compute capability from which a GPU converts float8 numbers itself.
_FLOAT8_CAPABILITY = 89


def block_linear(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    is_batch_invariant: bool = False,
) -> Tensor:
    """Return `x @ weight.T + bias`: x [M, K], bias [N] -> [M, N]; weights are rounded to x's type before they are used.

    With an activation, return `activate` of that; as in `gated_linear`. The tiles suit M, unless rows may not depend on
    it.
    """
    num_rows, inner = x.shape
    if x.stride(1) != 1 or inner != weight.num_columns:
        raise ValueError(f"x is {list(x.shape)}: expected [M, {weight.num_columns}] with contiguous rows")
    launch = launch_for(num_rows, is_gated=activation is not None, is_batch_invariant=is_batch_invariant)
    outer = weight.codes.shape[0] // (1 if activation is None else 2)
    out = torch.empty(num_rows, outer, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_rows, launch.block_m), triton.cdiv(outer, launch.block_n))
    _block_linear[grid](
        x,
        weight.codes,
        weight.scale,
        weight.scale if weight.minimum is None else weight.minimum,
        x if bias is None else bias,
        out,
        num_rows,
        outer,
        inner,
        x.stride(0),
        weight.codes.shape[1],
        weight.scale.shape[1],
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=64,
        KIND=KINDS.index(weight.kind),
        GROUP=weight.group,
        HAS_MINIMUM=weight.minimum is not None,
        HAS_BIAS=bias is not None,
        HAS_FLOAT8=weight.kind == "float8" and capability(x.device) >= _FLOAT8_CAPABILITY,
        ACTIVATION=activation or "",
        LIMIT=SWIGLU_LIMIT,
        SLOPE=SWIGLU_SLOPE,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=launch.num_warps,
        num_stages=2,
        enable_fp_fusion=True,
        **options(x.device),
    )
    return out


@triton.jit
def _levels(codes, KIND: tl.constexpr, HAS_FLOAT8: tl.constexpr):
    """Return what codes stand for before they are scaled; KIND is a place in KINDS."""
    if HAS_FLOAT8:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    codes = codes.to(tl.int32)
    if KIND == 1:  # E2M1, doubled
        exponent, mantissa = (codes >> 1) & 3, codes & 1
        magnitude = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
        return tl.where(codes > 7, -magnitude, magnitude).to(tl.float32)
    if KIND == 3:
        return ((codes << 24) >> 24).to(tl.float32)
    if KIND == 4:  # E4M3: a float's exponent counts 120 more, and the minimum changes subnormal ones alone
        value = (((codes & 127) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.minimum(value, 2.0 * value - 0.015625)
        return tl.where(codes > 127, -value, value)
    return codes.to(tl.float32)


@triton.jit
def _weights(
    code_rows,
    scale_rows,
    minimum_rows,
    columns,
    is_weight,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_FLOAT8: tl.constexpr,
):
    """Return a tile of the matrix in float32, given pointers to the begin of its rows' codes, scales and minimums."""
    if KIND <= 1:  # of 32 weights, byte i has weights i and i + 16
        places = columns // 32 * 16 + columns % 16
        codes = tl.load(code_rows + places[None, :], mask=is_weight, other=0).to(tl.int32)
        codes = (codes >> (columns % 32 // 16 * 4)[None, :]) & 15
    else:
        codes = tl.load(code_rows + columns[None, :], mask=is_weight, other=0)
    groups = (columns // GROUP)[None, :]
    scale = tl.load(scale_rows + groups, mask=is_weight, other=0.0).to(tl.float32)
    weight = _levels(codes, KIND, HAS_FLOAT8) * scale
    if HAS_MINIMUM:
        weight += tl.load(minimum_rows + groups, mask=is_weight, other=0.0).to(tl.float32)
    return weight


@triton.jit(do_not_specialize=["num_rows"])
def _block_linear(
    x_ptr,
    codes_ptr,
    scale_ptr,
    minimum_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outer,
    inner,
    x_stride,
    row_bytes,
    num_groups,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FLOAT8: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid and order of gates and ups: as of `_linear`."""
    begin(IS_DEPENDENT)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_channel = rows < num_rows, channels < outer
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    code_rows = codes_ptr + channels.to(tl.int64)[:, None] * row_bytes
    group_rows = channels.to(tl.int64)[:, None] * num_groups
    up_codes = tl.cast(outer, tl.int64) * row_bytes
    up_groups = tl.cast(outer, tl.int64) * num_groups
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        is_column = (columns < inner)[None, :]
        is_weight = is_channel[:, None] & is_column
        x = tl.load(x_rows + columns[None, :], mask=is_row[:, None] & is_column, other=0.0)
        weight = _weights(
            code_rows,
            scale_ptr + group_rows,
            minimum_ptr + group_rows,
            columns,
            is_weight,
            KIND,
            GROUP,
            HAS_MINIMUM,
            HAS_FLOAT8,
        )
        acc = tl.dot(x, tl.trans(weight.to(x.dtype)), acc, input_precision=PRECISION)
        if ACTIVATION != "":
            weight = _weights(
                code_rows + up_codes,
                scale_ptr + group_rows + up_groups,
                minimum_ptr + group_rows + up_groups,
                columns,
                is_weight,
                KIND,
                GROUP,
                HAS_MINIMUM,
                HAS_FLOAT8,
            )
            up = tl.dot(x, tl.trans(weight.to(x.dtype)), up, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "":
            up += tl.load(bias_ptr + outer + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    write_tile(acc, up, out_ptr, rows, outer, is_row, is_channel, BLOCK_N, ACTIVATION, LIMIT, SLOPE)
