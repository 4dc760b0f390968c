"""Causal attention over block tables: operations of a program on key tiles and softmax states."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def empty_state(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the softmax state of rows that have seen no key."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK_D], tl.float32)


@triton.jit
def merge(top, total, acc, other_top, other_total, other_acc):
    """Join two softmax states: highest score (base 2) and sum of weights [R], weighted values [R, D]."""
    highest = tl.maximum(top, other_top)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    ours = tl.exp2(top - safe)
    others = tl.exp2(other_top - safe)
    return highest, total * ours + other_total * others, acc * ours[:, None] + other_acc * others[:, None]


@triton.jit
def add_sink(top, total, acc, sink):
    """Add to softmax states a score [R] that has no value."""
    highest = tl.maximum(top, sink)
    shrink = tl.exp2(top - highest)
    return total * shrink + tl.exp2(sink - highest), acc * shrink[:, None]


@triton.jit
def write_result(out_ptrs, top, total, acc, sinks_ptrs, is_row, is_element, HAS_SINKS: tl.constexpr):
    """Write the weighted means of softmax states, with their sinks; zeros for rows that have seen no key (padding)."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptrs, mask=is_row, other=0.0) * 1.4426950408889634
        total, acc = add_sink(top, total, acc, sink)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptrs, acc.to(out_ptrs.dtype.element_ty), mask=is_element)


@triton.jit
def write_partial(
    partial_ptr, state_ptr, places, top, total, acc, is_row, is_element, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Write softmax states at these places, for another program to join."""
    dims = tl.arange(0, BLOCK_D)
    tl.store(partial_ptr + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_element)
    tl.store(state_ptr + places * 2, top, mask=is_row)
    tl.store(state_ptr + places * 2 + 1, total, mask=is_row)


@triton.jit
def _bend(scores, softcap):
    """Return softcap * tanh(scores / softcap), in units of log(2)."""
    # tanh by exp2 of a negative number, which cannot overflow.
    shrunk = tl.exp2(tl.abs(scores) * (-2 * 1.4426950408889634 / softcap))
    size = softcap * 1.4426950408889634 * (1 - shrunk) / (1 + shrunk)
    return tl.where(scores < 0, -size, size)


@triton.jit
def walk(
    top,
    total,
    acc,
    q,
    positions,
    first_tile,
    full_end,
    end_tile,
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
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add key tiles first_tile..end_tile - 1 to a softmax state; every row sees all keys of those before full_end.

    With a window none is before full_end.
    """
    for half in tl.static_range(1 if HAS_WINDOW else 0, 2):
        top, total, acc = _walk_half(
            top,
            total,
            acc,
            q,
            positions,
            full_end if half == 1 else first_tile,
            end_tile if half == 1 else full_end,
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
            half == 1,
            PRECISION,
        )
    return top, total, acc


@triton.jit
def _walk_half(
    top,
    total,
    acc,
    q,
    positions,
    first_tile,
    end_tile,
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
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add key tiles first_tile..end_tile - 1; without IS_MASKED every row sees all of these keys."""
    dims = tl.arange(0, BLOCK_D)
    for tile in range(first_tile, end_tile):
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if IS_MASKED:
            is_key = keys < num_keys
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        else:
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE).to(tl.int64)
        rows = blocks * cache_stride_block + (keys % BLOCK_SIZE) * cache_stride_token
        places = rows[:, None] + dims[None, :]
        if HEAD_DIM == BLOCK_D:
            k = tl.load(k_ptr + places)
        else:
            k = tl.load(k_ptr + places, mask=dims[None, :] < HEAD_DIM, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * score_scale
        if IS_QUANTIZED:
            scale_places = blocks * scale_stride_block + (keys % BLOCK_SIZE) * scale_stride_token
            scores *= tl.load(k_scale_ptr + scale_places)[None, :]
        if HAS_SOFTCAP:
            scores = _bend(scores, softcap)
        if IS_MASKED:
            is_seen = keys[None, :] <= positions[:, None]
            if IS_CHUNKED:
                is_seen = is_seen & (keys[None, :] >= positions[:, None] // window * window)
            elif HAS_WINDOW:
                is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        top = highest
        # Memory past the last key may hold anything, NaN included, so it is not read.
        if IS_MASKED:
            v = tl.load(v_ptr + places, mask=is_key[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
        elif HEAD_DIM == BLOCK_D:
            v = tl.load(v_ptr + places)
        else:
            v = tl.load(v_ptr + places, mask=dims[None, :] < HEAD_DIM, other=0.0)
        if IS_QUANTIZED:
            if IS_MASKED:
                weights *= tl.load(v_scale_ptr + scale_places, mask=is_key, other=0.0)[None, :]
            else:
                weights *= tl.load(v_scale_ptr + scale_places)[None, :]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
    return top, total, acc
