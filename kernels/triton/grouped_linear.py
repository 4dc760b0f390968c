"""Linear layers in which each row chooses one of many matrices, optionally with a gated activation; and weighted sums.

Rows are sorted by matrix on the device. A tile has rows of one matrix only, and the last tile of a matrix may be partly
filled. The shapes give an upper bound of the number of tiles, so nothing is read back from the device; programs of
unused tiles exit immediately.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import SWIGLU_LIMIT, SWIGLU_SLOPE, Activation
from kernels.triton.linear import FEW_ROWS, SOME_ROWS, write_tile

# Number of rows that a program reads when sorting, and number of columns that a program adds in the sum.
_SORTED_ROWS = 1024
_SUMMED_COLUMNS = 1024


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    num_repeats: int = 1,
    is_batch_invariant: bool = False,
    is_partial: bool = False,
) -> Tensor:
    """Return row i as `x[i // num_repeats] @ weight[experts[i]].T + bias[experts[i]]` -> [R, N].

    With an activation, N is 2F, gate first, and the result is `activate` of that, [R, F]. Gates and ups are rounded to
    x's type before the activation, so the result is bit-identical to that of the two separate operations.

    Args:
        x: [R / num_repeats, K].
        weight: [E, N, K].
        experts: int32 [R], 0 to E; rows with E have no matrix.
        bias: [E, N].
        num_repeats: Rows of the result that share a row of x.
        is_batch_invariant: Whether a row's bits must not depend on other rows; the tile sizes are then constant.
        is_partial: Whether rows without a matrix are set to 0; otherwise their contents are undefined.
    """
    num_rows, (num_experts, outer, inner) = experts.shape[0], weight.shape
    if activation is not None:
        outer //= 2
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("the last dimension is not contiguous")
    launch = FEW_ROWS if num_rows <= 16 * num_experts and not is_batch_invariant else SOME_ROWS
    order = torch.empty(num_rows, dtype=torch.int32, device=x.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    _sort[num_experts,](experts, order, ends, num_rows, BLOCK=_SORTED_ROWS, enable_fp_fusion=False)
    out = (torch.zeros if is_partial else torch.empty)(num_rows, outer, dtype=x.dtype, device=x.device)
    most_tiles = min(num_rows, num_rows // launch.block_m + num_experts)
    _grouped[(most_tiles, triton.cdiv(outer, launch.block_n))](
        x,
        weight,
        bias if bias is not None else x,
        order,
        ends,
        out,
        num_experts,
        outer,
        inner,
        x.stride(0),
        MOST_EXPERTS=triton.next_power_of_2(num_experts),
        NUM_REPEATS=num_repeats,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation or "",
        LIMIT=SWIGLU_LIMIT,
        SLOPE=SWIGLU_SLOPE,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=launch.num_warps,
        num_stages=launch.num_stages if x.element_size() <= 2 else 2,
        enable_fp_fusion=True,
    )
    return out


def weighted_sum(parts: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum of parts[:, i] * weights[:, i] over i; without weights, the sum of parts[:, i] -> [M, N].

    parts [M, A, N], weights [M, A]. The parts are added in order, in float32, so that a row's bits do not depend on the
    number of rows.
    """
    num_rows, num_parts, num_columns = parts.shape
    if not parts.is_contiguous() or not (weights is None or weights.is_contiguous()):
        raise ValueError("the parts or weights are not contiguous")
    out = torch.empty(num_rows, num_columns, dtype=parts.dtype, device=parts.device)
    _sum[num_rows, triton.cdiv(num_columns, _SUMMED_COLUMNS)](
        parts,
        parts if weights is None else weights,
        out,
        num_columns,
        NUM_PARTS=num_parts,
        HAS_WEIGHTS=weights is not None,
        BLOCK=_SUMMED_COLUMNS,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _sort(experts_ptr, order_ptr, ends_ptr, num_rows, BLOCK: tl.constexpr):
    """Write the rows of each expert, in order, and where they end. Grid: experts."""
    expert = tl.program_id(0)
    steps = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_rows, BLOCK):
        chosen = tl.load(experts_ptr + start + steps, mask=start + steps < num_rows, other=expert + 1)
        before += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(ends_ptr + expert, place + tl.sum(own, 0))
    for start in range(0, num_rows, BLOCK):
        chosen = tl.load(experts_ptr + start + steps, mask=start + steps < num_rows, other=expert + 1)
        is_own = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(is_own, 0) - 1, start + steps, mask=is_own != 0)
        place += tl.sum(is_own, 0)


@triton.jit
def _sum(
    parts_ptr,
    weights_ptr,
    out_ptr,
    num_columns,
    NUM_PARTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: rows, blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        place = row * NUM_PARTS + part
        value = tl.load(parts_ptr + place * num_columns + columns, mask=is_column, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value *= tl.load(weights_ptr + place)
        total += value
    tl.store(out_ptr + row * num_columns + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _grouped(
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    ends_ptr,
    out_ptr,
    num_experts,
    outer,
    inner,
    x_stride,
    MOST_EXPERTS: tl.constexpr,
    NUM_REPEATS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: tiles of rows, tiles of channels.

    With ACTIVATION the rows of a matrix that follow the first `outer`, the gates, are the ups.
    """
    tile = tl.program_id(0)
    numbers = tl.arange(0, MOST_EXPERTS)
    ends = tl.load(ends_ptr + numbers, mask=numbers < num_experts, other=0)
    starts = tl.load(ends_ptr + numbers - 1, mask=(numbers > 0) & (numbers < num_experts), other=0)
    num_tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    # The first expert whose tiles end behind ours.
    expert = tl.sum(((tl.cumsum(num_tiles, 0) <= tile) & (numbers < num_experts)).to(tl.int32), 0)
    if expert == num_experts:
        return
    first_tile = tl.sum(tl.where(numbers < expert, num_tiles, 0), 0)
    first = tl.sum(tl.where(numbers == expert, starts, 0), 0)
    places = first + (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = places < tl.load(ends_ptr + expert)
    rows = tl.load(order_ptr + places, mask=is_row, other=0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    is_channel = channels < outer
    x_ptrs = x_ptr + (rows // NUM_REPEATS)[:, None] * x_stride + steps[None, :]
    first_channel = tl.cast(expert, tl.int64) * outer
    if ACTIVATION != "":
        first_channel *= 2
    matrix_ptr = weight_ptr + first_channel * inner
    weight_ptrs = matrix_ptr + channels.to(tl.int64)[:, None] * inner + steps[None, :]
    up_ptrs = weight_ptrs + tl.cast(outer, tl.int64) * inner
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, inner, BLOCK_K):
        is_step = (k + steps < inner)[None, :]
        x = tl.load(x_ptrs + k, mask=is_row[:, None] & is_step, other=0.0)
        weight = tl.load(weight_ptrs + k, mask=is_channel[:, None] & is_step, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
        if ACTIVATION != "":
            weight = tl.load(up_ptrs + k, mask=is_channel[:, None] & is_step, other=0.0)
            up = tl.dot(x, tl.trans(weight), up, input_precision=PRECISION)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + first_channel + channels
        acc += tl.load(bias_ptrs, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "":
            up += tl.load(bias_ptrs + outer, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    write_tile(acc, up, out_ptr, rows, outer, is_row, is_channel, BLOCK_N, ACTIVATION, LIMIT, SLOPE)
