"""Causal attention over block tables: the kernels.

A program processes the queries of one KV head's group (`GROUP` heads) at `BLOCK_Q` adjacent positions as the rows of
one matrix, and iterates over key tiles with an online softmax. Tiles are counted from key 0, so which keys are in the
same matrix product does not depend on the rest of the batch. The keys of a single query (decode), or of a tile of few
queries over a long context, may be split over programs, each of which writes a partial softmax state; `combine` merges
these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention_tiles import add_sink, empty_state, merge, walk, write_partial, write_result


# These arguments change from step to step, and no new kernel should be compiled for each value.
@triton.jit(
    do_not_specialize=["num_sequences", "window", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "starts_ptr", "lens_ptr"],
)
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    state_ptr,
    tables_ptr,
    starts_ptr,
    lens_ptr,
    num_sequences,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SEGMENT_TILES: tl.constexpr,
    IS_DECODE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: (sequences, KV heads, splits) with IS_DECODE, which takes the sequences of one query only; else
    (query tiles, KV heads, splits), which leaves those out. Partial states are by sequence, or else by token.

    With SEGMENT_TILES, keys are taken in segments of that many tiles whose states are joined in order, whether one
    program takes them all or, when decoding, each split is one segment. With IS_CHUNKED, window is a
    chunk's length.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if IS_DECODE:
        sequence = index
        first_query = 0
    else:
        # A sequence has at most its queries // BLOCK_Q + 1 tiles; find the last sequence that begins at or before ours.
        sequence = _last_beginning(starts_ptr, num_sequences, index, BLOCK_Q, 1)
        first_query = (index - tl.load(starts_ptr + sequence) // BLOCK_Q - sequence) * BLOCK_Q
    start = tl.load(starts_ptr + sequence)
    num_queries = tl.load(starts_ptr + sequence + 1) - start
    if IS_DECODE:
        if num_queries != 1:
            return
    elif num_queries == 1:
        return
    if first_query >= num_queries:
        return

    num_keys = tl.load(lens_ptr + sequence)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (queries < num_queries)
    lowest = num_keys - num_queries + first_query
    positions = num_keys - num_queries + queries
    tokens = (start + queries).to(tl.int64)
    is_element = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    q = tl.load(
        q_ptr + tokens[:, None] * q_stride_token + heads[:, None] * q_stride_head + dims[None, :],
        mask=is_element,
        other=0.0,
    )

    # Keys that some row of the tile sees; no tile before full_end needs a mask.
    num_seen = tl.minimum(lowest + BLOCK_Q, num_keys)
    first_tile = 0
    if IS_CHUNKED:
        first_tile = lowest // window * window // BLOCK_N
    elif HAS_WINDOW:
        first_tile = tl.maximum(lowest - window + 1, 0) // BLOCK_N
    end_tile = (num_seen + BLOCK_N - 1) // BLOCK_N
    full_end = (lowest + 1) // BLOCK_N
    if IS_DECODE and SEGMENT_TILES > 0:
        first_tile = tl.maximum(first_tile, split * SEGMENT_TILES)
        end_tile = tl.minimum(end_tile, (split + 1) * SEGMENT_TILES)
        # `combine` reads no state past the last key's segment.
        if IS_SPLIT and split * SEGMENT_TILES * BLOCK_N >= num_keys:
            return
    elif IS_SPLIT:
        tiles_each = (end_tile - first_tile + tl.num_programs(2) - 1) // tl.num_programs(2)
        first_tile += split * tiles_each
        end_tile = tl.minimum(end_tile, first_tile + tiles_each)
    if HAS_WINDOW:
        full_end = first_tile

    k_ptr += kv_head * cache_stride_head
    v_ptr += kv_head * cache_stride_head
    k_scale_ptr += kv_head
    v_scale_ptr += kv_head
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    top, total, acc = empty_state(BLOCK_M, BLOCK_D)
    # One turn, unless segments are joined here.
    num_turns = 1
    first_segment = 0
    if SEGMENT_TILES > 0 and not IS_DECODE:
        first_segment = first_tile // SEGMENT_TILES
        num_turns = (end_tile + SEGMENT_TILES - 1) // SEGMENT_TILES - first_segment
    for turn in range(num_turns):
        turn_first = first_tile
        turn_end = end_tile
        if SEGMENT_TILES > 0 and not IS_DECODE:
            turn_first = tl.maximum(first_tile, (first_segment + turn) * SEGMENT_TILES)
            turn_end = tl.minimum(end_tile, (first_segment + turn + 1) * SEGMENT_TILES)
        turn_full = tl.minimum(tl.maximum(full_end, turn_first), turn_end)
        new_top, new_total, new_acc = empty_state(BLOCK_M, BLOCK_D)
        new_top, new_total, new_acc = walk(
            new_top,
            new_total,
            new_acc,
            q,
            positions,
            turn_first,
            turn_full,
            turn_end,
            num_keys,
            k_ptr,
            v_ptr,
            k_scale_ptr,
            v_scale_ptr,
            table_ptr,
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
        if SEGMENT_TILES > 0 and not IS_DECODE:
            top, total, acc = merge(top, total, acc, new_top, new_total, new_acc)
        else:
            top, total, acc = new_top, new_total, new_acc

    if IS_SPLIT:
        if IS_DECODE:
            places = (sequence * tl.num_programs(1) * GROUP + heads).to(tl.int64) * tl.num_programs(2) + split
        else:
            places = (tokens * (tl.num_programs(1) * GROUP) + heads) * tl.num_programs(2) + split
        write_partial(partial_ptr, state_ptr, places, top, total, acc, is_row, is_element, HEAD_DIM, BLOCK_D)
    else:
        out = out_ptr + tokens[:, None] * out_stride_token + (heads * HEAD_DIM)[:, None] + dims[None, :]
        write_result(out, top, total, acc, sinks_ptr + heads, is_row, is_element, HAS_SINKS)


@triton.jit
def _last_beginning(starts_ptr, num_sequences, index, SCALE: tl.constexpr, SPACING: tl.constexpr):
    """Return the last sequence i with starts[i] // SCALE + i * SPACING <= index."""
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // SCALE + middle * SPACING <= index:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(
    do_not_specialize=["num_splits", "num_sequences"], do_not_specialize_on_alignment=["starts_ptr", "lens_ptr"]
)
def combine(
    partial_ptr,
    state_ptr,
    sinks_ptr,
    out_ptr,
    starts_ptr,
    lens_ptr,
    num_splits,
    num_sequences,
    out_stride_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Join the splits of each single query; grid: (sequences, heads). Without IS_DECODE, of all other queries; grid:
    (tokens, heads).

    With SEGMENT_KEYS, splits are segments of that many keys, and those that have keys are joined one after another.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    if IS_DECODE:
        sequence = row
        token = tl.load(starts_ptr + sequence)
        if tl.load(starts_ptr + sequence + 1) - token != 1:
            return
    else:
        token = row
        if token >= tl.load(starts_ptr + num_sequences):
            return
        sequence = _last_beginning(starts_ptr, num_sequences, token, 1, 0)
        if tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence) == 1:
            return
    dims = tl.arange(0, BLOCK_D)
    first = (row * tl.num_programs(1) + head).to(tl.int64) * num_splits
    if SEGMENT_KEYS > 0:
        top, total, acc = empty_state(1, BLOCK_D)
        one = tl.arange(0, 1)
        for split in range((tl.load(lens_ptr + sequence) + SEGMENT_KEYS - 1) // SEGMENT_KEYS):
            place = first + split + one
            other_top = tl.load(state_ptr + place * 2)
            other_total = tl.load(state_ptr + place * 2 + 1)
            other_acc = tl.load(
                partial_ptr + place[:, None] * HEAD_DIM + dims[None, :], mask=dims[None, :] < HEAD_DIM, other=0.0
            )
            top, total, acc = merge(top, total, acc, other_top, other_total, other_acc)
        if HAS_SINKS:
            total, acc = add_sink(top, total, acc, tl.load(sinks_ptr + head + one) * 1.4426950408889634)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        result = tl.reshape(acc, [BLOCK_D])
    else:
        splits = tl.arange(0, BLOCK_SPLITS)
        is_split = splits < num_splits
        tops = tl.load(state_ptr + (first + splits) * 2, mask=is_split, other=float("-inf"))
        totals = tl.load(state_ptr + (first + splits) * 2 + 1, mask=is_split, other=0.0)
        highest = tl.max(tops, 0)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head) * 1.4426950408889634
            highest = tl.maximum(highest, sink)
        factors = tl.exp2(tops - tl.where(highest == float("-inf"), 0.0, highest))
        total = tl.sum(totals * factors, 0)
        if HAS_SINKS:
            total += tl.exp2(sink - highest)
        parts = tl.load(
            partial_ptr + (first + splits)[:, None] * HEAD_DIM + dims[None, :],
            mask=is_split[:, None] & (dims[None, :] < HEAD_DIM),
            other=0.0,
        )
        result = tl.sum(parts * factors[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out = out_ptr + token.to(tl.int64) * out_stride_token + head * HEAD_DIM + dims
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
