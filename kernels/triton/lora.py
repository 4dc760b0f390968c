"""Applies many LoRA adapters in one batch: the output of each row's own adapter is added to the row.

Rows are processed in tiles of 16. A program processes the n-th distinct adapter of one tile: it exits immediately if
the tile has fewer adapters; otherwise it computes the whole tile and writes the rows of that adapter. Therefore nothing
is sorted, the launch does not depend on which adapters are used, and a row's bits do not depend on other rows. There
are two passes: `_shrink` computes x A^T, kept in float32, and `_expand` multiplies that by B and adds it to y. Ranks
are processed 16 at a time up to the adapter's rank, so one kernel supports all ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.dependent_launch import begin, options

_ROWS = 16
_RANKS = 16
_NOBODY = tl.constexpr(0x7FFFFFFF)


def add_lora(y: Tensor, x: Tensor, values: Tensor, table: Tensor, slots: Tensor, max_rank: int) -> None:
    """For each row, add the output of its LoRA adapter for x to y; see `kernels.add_lora`."""
    num_rows, inner = x.shape
    outer = y.shape[1]
    if x.stride(1) != 1 or y.stride(1) != 1 or table.stride(1) != 1:
        raise ValueError("the last dimension is not contiguous")
    shrunk = torch.empty(num_rows, max_rank, dtype=torch.float32, device=x.device)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    num_tiles, num_places = triton.cdiv(num_rows, _ROWS), min(_ROWS, table.shape[0])
    _shrink[(num_tiles, num_places, triton.cdiv(max_rank, _RANKS))](
        x,
        values,
        table,
        slots,
        shrunk,
        num_rows,
        inner,
        x.stride(0),
        table.stride(0),
        max_rank,
        BLOCK_K=256,
        RANKS=_RANKS,
        ROWS=_ROWS,
        PRECISION=precision,
        num_warps=4,
        num_stages=4,
        enable_fp_fusion=True,
        **options(x.device),
    )
    block_n = 128
    _expand[(num_tiles, triton.cdiv(outer, block_n), num_places)](
        shrunk,
        values,
        table,
        slots,
        y,
        num_rows,
        inner,
        outer,
        y.stride(0),
        table.stride(0),
        max_rank,
        BLOCK_N=block_n,
        RANKS=_RANKS,
        ROWS=_ROWS,
        PRECISION=precision,
        num_warps=4,
        enable_fp_fusion=True,
        **options(x.device),
    )


@triton.jit
def _nth_slot(slots, n):
    """Return the n-th smallest of the different slots of a tile, not counting -1; _NOBODY if there are fewer."""
    found = -1
    for _ in range(n + 1):
        found = tl.min(tl.where(slots > found, slots, _NOBODY), 0)
    return found


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr"])
def _shrink(
    x_ptr,
    values_ptr,
    table_ptr,
    slots_ptr,
    shrunk_ptr,
    num_rows,
    inner,
    x_stride,
    table_stride,
    shrunk_stride,
    BLOCK_K: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    begin(IS_DEPENDENT)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    slot = _nth_slot(slots, tl.program_id(1))
    if slot == _NOBODY:
        return
    rank = tl.load(table_ptr + slot.to(tl.int64) * table_stride + 1).to(tl.int32)
    ranks = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    if tl.program_id(2) * RANKS >= rank:
        return
    # Matrices start at multiples of 8 numbers.
    values_ptr += tl.multiple_of(tl.load(table_ptr + slot.to(tl.int64) * table_stride), 8)
    is_ours = slots == slot
    steps = tl.arange(0, BLOCK_K)
    acc = tl.zeros([ROWS, RANKS], tl.float32)
    for k in range(0, inner, BLOCK_K):
        is_step = (k + steps < inner)[None, :]
        places = rows.to(tl.int64)[:, None] * x_stride + (k + steps)[None, :]
        x = tl.load(x_ptr + places, mask=is_ours[:, None] & is_step, other=0.0)
        a = tl.load(
            values_ptr + ranks[:, None] * inner + (k + steps)[None, :],
            mask=(ranks < rank)[:, None] & is_step,
            other=0.0,
        )
        acc = tl.dot(x, tl.trans(a.to(x.dtype)), acc, input_precision=PRECISION)
    target = shrunk_ptr + rows.to(tl.int64)[:, None] * shrunk_stride + ranks[None, :]
    tl.store(target, acc, mask=is_ours[:, None] & (ranks < rank)[None, :])


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr"])
def _expand(
    shrunk_ptr,
    values_ptr,
    table_ptr,
    slots_ptr,
    y_ptr,
    num_rows,
    inner,
    outer,
    y_stride,
    table_stride,
    shrunk_stride,
    BLOCK_N: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    begin(IS_DEPENDENT)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    slot = _nth_slot(slots, tl.program_id(2))
    if slot == _NOBODY:
        return
    rank = tl.load(table_ptr + slot.to(tl.int64) * table_stride + 1).to(tl.int32)
    if rank == 0:
        return
    values_ptr += tl.multiple_of(tl.load(table_ptr + slot.to(tl.int64) * table_stride), 8)
    values_ptr += rank.to(tl.int64) * inner
    is_ours = slots == slot
    channels = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    added = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for first in range(0, rank, RANKS):
        ranks = first + tl.arange(0, RANKS)
        places = rows.to(tl.int64)[:, None] * shrunk_stride + ranks[None, :]
        shrunk = tl.load(shrunk_ptr + places, mask=is_ours[:, None] & (ranks < rank)[None, :], other=0.0)
        b = tl.load(
            values_ptr + ranks[:, None] * outer + channels[None, :],
            mask=(ranks < rank)[:, None] & (channels < outer)[None, :],
            other=0.0,
        )
        added = tl.dot(shrunk.to(b.dtype), b, added, input_precision=PRECISION)
    target = y_ptr + rows.to(tl.int64)[:, None] * y_stride + channels[None, :]
    mask = is_ours[:, None] & (channels < outer)[None, :]
    y = tl.load(target, mask=mask, other=0.0)
    tl.store(target, (y.to(tl.float32) + added).to(y.dtype), mask=mask)
