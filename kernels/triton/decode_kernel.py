"""Causal attention of single queries over block tables, with programs assigned to sequences by length.

Each sequence has one program per KV head. Additional programs, as many as fill the device, are distributed in
proportion to the sequences' numbers of key tiles, so a long sequence among short ones gets most of them. A program
determines its sequence from the lengths, on the device. The programs of a sequence write partial softmax states, and
the last one to finish merges them in the order of the keys, so it does not matter which one that is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention_tiles import empty_state, walk, write_partial, write_result
from kernels.triton.dependent_launch import begin


# These arguments change from step to step, and no new kernel should be compiled for each value.
@triton.jit(
    do_not_specialize=["num_sequences", "num_shares", "window", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "starts_ptr", "lens_ptr"],
)
def decode(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    state_ptr,
    arrived_ptr,
    tables_ptr,
    starts_ptr,
    lens_ptr,
    num_sequences,
    num_shares,
    score_scale,
    window,
    softcap,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    scale_stride_block,
    scale_stride_token,
    table_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: (sequences + shares, KV heads). Sequences that have not one query are left out.

    arrived_ptr: int32 zeros by sequence and KV head, which are zeros again behind the kernel.
    """
    begin(IS_DEPENDENT)
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)

    # With at least this many tiles each, no more programs are wanted than there are.
    num_tiles = 0
    for first in range(0, num_sequences, BLOCK_B):
        tiles, is_single = _tiles(
            starts_ptr, lens_ptr, first, num_sequences, window, BLOCK_B, BLOCK_N, HAS_WINDOW, IS_CHUNKED
        )
        num_tiles += tl.sum(tiles, 0)
    tiles_each = tl.maximum((num_tiles + num_shares - 1) // num_shares, 1)
    sequence = -1
    split = 0
    num_splits = 0
    end = 0
    for first in range(0, num_sequences, BLOCK_B):
        tiles, is_single = _tiles(
            starts_ptr, lens_ptr, first, num_sequences, window, BLOCK_B, BLOCK_N, HAS_WINDOW, IS_CHUNKED
        )
        counts = tl.where(is_single, tl.maximum((tiles + tiles_each - 1) // tiles_each, 1), 0)
        ends = end + tl.cumsum(counts, 0)
        is_ours = (program < ends) & (program >= ends - counts)
        sequence = tl.maximum(sequence, tl.max(tl.where(is_ours, first + tl.arange(0, BLOCK_B), -1), 0))
        split = tl.maximum(split, tl.max(tl.where(is_ours, program - (ends - counts), 0), 0))
        num_splits = tl.maximum(num_splits, tl.max(tl.where(is_ours, counts, 0), 0))
        end += tl.sum(counts, 0)
    if sequence < 0:
        return

    token = tl.load(starts_ptr + sequence).to(tl.int64)
    num_keys = tl.load(lens_ptr + sequence)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    is_row = rows < GROUP
    heads = kv_head * GROUP + rows
    is_element = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    q = tl.load(
        q_ptr + token * q_stride_token + heads[:, None] * q_stride_head + dims[None, :], mask=is_element, other=0.0
    )
    end_tile = (num_keys + BLOCK_N - 1) // BLOCK_N
    first_tile = _first_tile(num_keys, window, BLOCK_N, HAS_WINDOW, IS_CHUNKED) + split * tiles_each
    end_tile = tl.minimum(end_tile, first_tile + tiles_each)
    # No tile before it needs a mask; with a window all of them do.
    full_end = tl.minimum(tl.maximum(num_keys // BLOCK_N, first_tile), end_tile)
    if HAS_WINDOW:
        full_end = first_tile
    positions = tl.zeros([BLOCK_M], tl.int32) + (num_keys - 1)
    top, total, acc = empty_state(BLOCK_M, BLOCK_D)
    top, total, acc = walk(
        top,
        total,
        acc,
        q,
        positions,
        first_tile,
        full_end,
        end_tile,
        num_keys,
        k_ptr + kv_head * cache_stride_head,
        v_ptr + kv_head * cache_stride_head,
        k_scale_ptr + kv_head,
        v_scale_ptr + kv_head,
        tables_ptr + tl.cast(sequence, tl.int64) * table_stride,
        cache_stride_block,
        cache_stride_token,
        scale_stride_block,
        scale_stride_token,
        score_scale,
        window,
        softcap,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        BLOCK_SIZE,
        HAS_WINDOW,
        IS_CHUNKED,
        HAS_SOFTCAP,
        IS_QUANTIZED,
        PRECISION,
    )

    out_ptr += token * out_stride_token + kv_head * GROUP * HEAD_DIM
    if num_splits == 1:
        out = out_ptr + (rows * HEAD_DIM)[:, None] + dims[None, :]
        write_result(out, top, total, acc, sinks_ptr + heads, is_row, is_element, HAS_SINKS)
    else:
        places = (program * num_kv_heads + kv_head).to(tl.int64) * GROUP + rows
        write_partial(partial_ptr, state_ptr, places, top, total, acc, is_row, is_element, HEAD_DIM, BLOCK_D)
        # All threads have written before one of them says so.
        tl.debug_barrier()
        arrived = arrived_ptr + sequence * num_kv_heads + kv_head
        if tl.atomic_add(arrived, 1, sem="acq_rel") == num_splits - 1:
            tl.store(arrived, 0)
            _join(
                partial_ptr,
                state_ptr,
                sinks_ptr + kv_head * GROUP,
                out_ptr,
                (program - split) * num_kv_heads + kv_head,
                num_kv_heads,
                num_splits,
                HEAD_DIM,
                BLOCK_D,
                GROUP,
                BLOCK_G,
                BLOCK_SPLITS,
                HAS_SINKS,
            )


@triton.jit
def _first_tile(num_keys, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr):
    """Return the first key tile that a sequence's last position sees."""
    first_tile = num_keys * 0
    if IS_CHUNKED:
        first_tile = tl.maximum(num_keys - 1, 0) // window * window // BLOCK_N
    elif HAS_WINDOW:
        first_tile = tl.maximum(num_keys - window, 0) // BLOCK_N
    return first_tile


@triton.jit
def _tiles(
    starts_ptr,
    lens_ptr,
    first,
    num_sequences,
    window,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
):
    """Return, for sequences from `first` on, the key tiles of those with one query, else 0, and which have one."""
    sequences = first + tl.arange(0, BLOCK_B)
    is_any = sequences < num_sequences
    lens = tl.load(lens_ptr + sequences, mask=is_any, other=0)
    starts = tl.load(starts_ptr + sequences, mask=is_any, other=0)
    is_single = tl.load(starts_ptr + sequences + 1, mask=is_any, other=0) - starts == 1
    tiles = (lens + BLOCK_N - 1) // BLOCK_N - _first_tile(lens, window, BLOCK_N, HAS_WINDOW, IS_CHUNKED)
    return tl.where(is_single, tiles, 0), is_single


@triton.jit
def _join(
    partial_ptr,
    state_ptr,
    sinks_ptr,
    out_ptr,
    first,
    spacing,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Write what the softmax states at `first`, `first + spacing`, ... give together, several splits at a time."""
    rows = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    is_row = rows < GROUP
    top, total, acc = empty_state(BLOCK_G, BLOCK_D)
    for start in range(0, num_splits, BLOCK_SPLITS):
        splits = start + tl.arange(0, BLOCK_SPLITS)
        places = (first + splits * spacing).to(tl.int64)[:, None] * GROUP + rows[None, :]
        is_state = (splits < num_splits)[:, None] & is_row[None, :]
        # Other processors wrote these, so this one's own cache is passed by.
        tops = tl.load(state_ptr + places * 2, mask=is_state, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(state_ptr + places * 2 + 1, mask=is_state, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            partial_ptr + places[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=is_state[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        highest = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        factors = tl.exp2(tops - safe[None, :])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(totals * factors, 0)
        acc = acc * shrink[:, None] + tl.sum(parts * factors[:, :, None], 0)
        top = highest
    out = out_ptr + (rows * HEAD_DIM)[:, None] + dims[None, :]
    is_element = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    write_result(out, top, total, acc, sinks_ptr + rows, is_row, is_element, HAS_SINKS)
