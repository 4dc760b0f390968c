"""Linear layers where each row has its own choice of many matrices, also with a gated activation.

Rows are sorted by their matrix on the device. Each matrix's rows fill tiles of their own, the last of them perhaps in
part; how many tiles there are is bounded by the shapes, so nothing is read back, and programs of tiles that no matrix
needs leave at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import SWIGLU_LIMIT, SWIGLU_SLOPE, Activation
from kernels.triton.linear import FEW_ROWS, SOME_ROWS, write_tile


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    num_repeats: int = 1,
    is_batch_invariant: bool = False,
) -> Tensor:
    """Return row i as `x[i // num_repeats] @ weight[experts[i]].T + bias[experts[i]]` -> [R, N].

    With an activation, N is 2F, gate first, and the result is `activate` of that, [R, F]. Gates and ups are rounded to
    x's type before the activation, so the bits are those of the two operations one after the other.

    Args:
        x: [R / num_repeats, K].
        weight: [E, N, K].
        experts: int32 [R].
        bias: [E, N].
        num_repeats: Rows of the result that share a row of x.
        is_batch_invariant: A row's bits then do not depend on the others: the tiles are always the same.
    """
    num_rows, (num_experts, outer, inner) = experts.shape[0], weight.shape
    if activation is not None:
        outer //= 2
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("the last dimension is not contiguous")
    launch = FEW_ROWS if num_rows <= 16 * num_experts and not is_batch_invariant else SOME_ROWS
    counts = (experts[:, None] == torch.arange(num_experts, device=x.device, dtype=experts.dtype)).sum(0)
    ends, order = counts.cumsum(0), experts.argsort(stable=True)
    tile_ends = ((counts + launch.block_m - 1) // launch.block_m).cumsum(0)
    out = torch.empty(num_rows, outer, dtype=x.dtype, device=x.device)
    most_tiles = min(num_rows, num_rows // launch.block_m + num_experts)
    _grouped[(most_tiles, triton.cdiv(outer, launch.block_n))](
        x,
        weight,
        bias if bias is not None else x,
        order.int(),
        ends.int(),
        tile_ends.int(),
        out,
        num_experts,
        outer,
        inner,
        x.stride(0),
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


@triton.jit
def _grouped(
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    ends_ptr,
    tile_ends_ptr,
    out_ptr,
    num_experts,
    outer,
    inner,
    x_stride,
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
    # The first expert whose tiles end behind ours.
    low = 0
    high = num_experts
    while low < high:
        middle = (low + high) // 2
        if tl.load(tile_ends_ptr + middle) <= tile:
            low = middle + 1
        else:
            high = middle
    if low == num_experts:
        return
    expert = low
    first_tile = tl.load(tile_ends_ptr + expert - 1, mask=expert > 0, other=0)
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
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
