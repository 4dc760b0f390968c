"""Many low-rank adapters in one batch: each row adds the product of its own adapter.

Rows come in tiles of 16. A program takes one tile and one adapter, leaves at once if no row of the tile uses it, and
else computes the whole tile and writes the rows that do. So nothing is sorted, and a row's bits do not depend on its
neighbours. Two passes: `_shrink` x A^T, kept in float32, and `_expand`, which adds that times B^T.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: Tensor, adapters: Tensor) -> None:
    """Add scaling[i] * (x @ a[i].T) @ b[i].T to the rows of y [M, N] whose entry of adapters is i; -1: none.

    Args:
        y: [M, N], changed in place.
        x: [M, K].
        a: [num_adapters, R, K], R at most 256; an adapter of lower rank is padded with zeros.
        b: [num_adapters, N, R].
        scaling: float32 [num_adapters].
        adapters: int32 [M].
    """
    num_rows, inner = x.shape
    num_adapters, rank, _ = a.shape
    outer = y.shape[1]
    if x.stride(1) != 1 or y.stride(1) != 1 or not a.is_contiguous() or not b.is_contiguous():
        raise ValueError("the last dimension is not contiguous")
    shrunk = torch.empty(num_rows, rank, dtype=torch.float32, device=x.device)
    block_r = max(16, triton.next_power_of_2(rank))
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    num_tiles = triton.cdiv(num_rows, _ROWS)
    _shrink[(num_tiles, num_adapters)](
        x,
        a,
        scaling,
        adapters,
        shrunk,
        num_rows,
        inner,
        x.stride(0),
        RANK=rank,
        BLOCK_R=block_r,
        BLOCK_K=256 if block_r <= 32 else 64,
        ROWS=_ROWS,
        PRECISION=precision,
        num_warps=4,
        num_stages=4 if block_r <= 128 else 2,
        enable_fp_fusion=True,
    )
    block_n = 128 if block_r <= 64 else 32
    _expand[(num_tiles, triton.cdiv(outer, block_n), num_adapters)](
        shrunk,
        b,
        adapters,
        y,
        num_rows,
        outer,
        y.stride(0),
        RANK=rank,
        BLOCK_R=block_r,
        BLOCK_N=block_n,
        ROWS=_ROWS,
        PRECISION=precision,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["adapters_ptr"])
def _shrink(
    x_ptr,
    a_ptr,
    scaling_ptr,
    adapters_ptr,
    shrunk_ptr,
    num_rows,
    inner,
    x_stride,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    adapter = tl.program_id(1)
    is_ours = tl.load(adapters_ptr + rows, mask=rows < num_rows, other=-1) == adapter
    if tl.sum(is_ours.to(tl.int32), 0) == 0:
        return
    ranks = tl.arange(0, BLOCK_R)
    steps = tl.arange(0, BLOCK_K)
    a_ptr += adapter.to(tl.int64) * RANK * inner
    acc = tl.zeros([ROWS, BLOCK_R], tl.float32)
    for k in range(0, inner, BLOCK_K):
        is_step = (k + steps < inner)[None, :]
        places = rows.to(tl.int64)[:, None] * x_stride + (k + steps)[None, :]
        x = tl.load(x_ptr + places, mask=is_ours[:, None] & is_step, other=0.0)
        a = tl.load(
            a_ptr + ranks[:, None] * inner + (k + steps)[None, :], mask=(ranks < RANK)[:, None] & is_step, other=0.0
        )
        acc = tl.dot(x, tl.trans(a.to(x.dtype)), acc, input_precision=PRECISION)
    acc *= tl.load(scaling_ptr + adapter)
    target = shrunk_ptr + rows.to(tl.int64)[:, None] * RANK + ranks[None, :]
    tl.store(target, acc, mask=is_ours[:, None] & (ranks < RANK)[None, :])


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["adapters_ptr"])
def _expand(
    shrunk_ptr,
    b_ptr,
    adapters_ptr,
    y_ptr,
    num_rows,
    outer,
    y_stride,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    adapter = tl.program_id(2)
    is_ours = tl.load(adapters_ptr + rows, mask=rows < num_rows, other=-1) == adapter
    if tl.sum(is_ours.to(tl.int32), 0) == 0:
        return
    ranks = tl.arange(0, BLOCK_R)
    channels = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_rank = (ranks < RANK)[None, :]
    shrunk = tl.load(
        shrunk_ptr + rows.to(tl.int64)[:, None] * RANK + ranks[None, :], mask=is_ours[:, None] & is_rank, other=0.0
    )
    places = adapter.to(tl.int64) * outer * RANK + channels[:, None] * RANK + ranks[None, :]
    b = tl.load(b_ptr + places, mask=(channels < outer)[:, None] & is_rank, other=0.0)
    target = y_ptr + rows.to(tl.int64)[:, None] * y_stride + channels[None, :]
    mask = is_ours[:, None] & (channels < outer)[None, :]
    added = tl.dot(shrunk.to(b.dtype), tl.trans(b), input_precision=PRECISION)
    y = tl.load(target, mask=mask, other=0.0)
    tl.store(target, (y.to(tl.float32) + added).to(y.dtype), mask=mask)
