"""Sample each row's token under temperature, top-k, top-p and min-p, without reading anything back from the device.

The rules and the random numbers are those of the worker's sampler: a token is kept if its probability reaches a
threshold (ties with the last kept one are kept), and the one drawn is where the kept probabilities, summed in order of
token number, pass a uniform share of their sum. A probability that decides by less than the rounding of a float64 sum
may fall the other way.

Every pass over the vocabulary is divided into blocks, one program each, which leave a number for their block; the next
pass begins by joining those of its row in the order of blocks. So one row keeps as many processors busy as there are
blocks, and its bits depend on nothing but the row. A last program draws: it finds the block by the blocks' sums and
reads that block alone.

The threshold is the largest number at which some property still holds (enough tokens, or enough mass, at or above it).
Float32 numbers that are not negative are ordered as their bits are, so it is searched over the bits, four in each pass,
without sorting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.dependent_launch import begin, options

_BLOCK = 4096
_PART = 512
# The bits of 1.0, the largest probability, are below 2**30.
_SHIFTS = (28, 24, 20, 16, 12, 8, 4, 0)
_PIVOTS = tl.constexpr(16)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    sequence_indices: Tensor,
    positions: Tensor,
    *,
    has_top_k: bool = True,
    has_top_p: bool = True,
) -> Tensor:
    """Choose a token for each row of float32 logits [S, V] -> int32 [S]; all others are [S], on the same device.

    Args:
        logits: Finite or -inf, at least one finite in a row.
        temperature: float32; 0: the first of the highest.
        top_k: int32; 0: all.
        top_p: float32; 1: all.
        min_p: float32; least probability, as a share of the highest.
        seeds: int64 with the bits of the unsigned seed.
        sequence_indices: int32.
        positions: int32; the sequence's length, the number's place in its stream.
        has_top_k: Whether any top_k is not 0.
        has_top_p: Whether any top_p is not 1.
    """
    (num_rows, num_tokens), device = logits.shape, logits.device
    block = min(_BLOCK, triton.next_power_of_2(num_tokens))
    num_blocks = triton.cdiv(num_tokens, block)
    common = {"NUM_BLOCKS": num_blocks, "enable_fp_fusion": True, **options(device)}
    sizes = {"BLOCKS": triton.next_power_of_2(num_blocks), **common}
    grid = (num_rows, num_blocks)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=device)

    highest, places = empty(torch.float32, num_blocks), empty(torch.int32, num_blocks)
    weights, sums = empty(torch.float32, num_tokens), empty(torch.float32, num_blocks)
    _find_highest[grid](logits, highest, places, num_tokens, logits.stride(0), BLOCK=block, num_warps=8, **common)
    _weigh[grid](
        logits, temperature, highest, weights, sums, num_tokens, logits.stride(0), BLOCK=block, num_warps=8, **sizes
    )
    # Thresholds of top-k and top-p (bits), and the mass that top-p wants.
    thresholds = torch.zeros(num_rows, 2, dtype=torch.int32, device=device)
    wanted = empty(torch.float64)
    # Of two passes in turn: how many probabilities reach each pivot, and their sum, by block.
    counts, masses = empty(torch.int32, 2, num_blocks, 16), empty(torch.float64, 2, num_blocks, 16)
    # Of two passes in turn: the bits found so far, and count and mass of what is above the next number.
    found, counts_above, masses_above = empty(torch.int32, 2), empty(torch.int32, 2), empty(torch.float64, 2)
    state = (wanted, counts, masses, found, counts_above, masses_above)
    limits = (top_k, top_p)
    for search, is_used in enumerate((has_top_k, has_top_p)):
        for i, shift in enumerate(_SHIFTS if is_used else ()):
            _search[grid](
                temperature,
                *limits,
                weights,
                sums,
                *state,
                num_tokens,
                search,
                shift,
                i & 1,
                BLOCK=block,
                PART=min(_PART, block),
                num_warps=8,
                **sizes,
            )
        # The search of top-p begins with the mass that this leaves for it.
        if is_used or (search == 0 and has_top_p):
            last = (len(_SHIFTS) - 1) & 1
            _end_search[(num_rows,)](
                *limits, thresholds, *state, num_tokens, search, int(is_used), last, num_warps=4, **sizes
            )
    kept = empty(torch.float64, num_blocks)
    _keep[grid](temperature, min_p, weights, sums, thresholds, kept, num_tokens, BLOCK=block, num_warps=8, **sizes)
    out = empty(torch.int32)
    _draw[(num_rows,)](
        temperature,
        min_p,
        seeds,
        sequence_indices,
        positions,
        highest,
        places,
        weights,
        sums,
        thresholds,
        kept,
        out,
        num_tokens,
        BLOCK=block,
        num_warps=8,
        **sizes,
    )
    return out


@triton.jit
def _mix(x):
    """SplitMix64's finalizer."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, sequence_index, position):
    """Return the float64 number in [0, 1) of each (seed, sequence, position)."""
    mixed = _mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    mixed = _mix((mixed ^ sequence_index.to(tl.uint64)) + 0x9E3779B97F4A7C15)
    mixed = _mix((mixed ^ position.to(tl.uint64)) + 0x9E3779B97F4A7C15)
    return (mixed >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _joined(ptr, row, other, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the numbers of a row's blocks, padded with `other`."""
    blocks = tl.arange(0, BLOCKS)
    return tl.load(ptr + row * NUM_BLOCKS + blocks, mask=blocks < NUM_BLOCKS, other=other)


@triton.jit
def _block(ptr, row, block, stride, num_tokens, other, BLOCK: tl.constexpr):
    """Return the numbers of a block of a row, padded with `other` behind the vocabulary's end."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(ptr + row.to(tl.int64) * stride + columns, mask=columns < num_tokens, other=other)


@triton.jit
def _find_highest(
    logits_ptr,
    highest_ptr,
    places_ptr,
    num_tokens,
    stride,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write each block's highest logit and the first place of it."""
    begin(IS_DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    logits = _block(logits_ptr, row, block, stride, num_tokens, float("-inf"), BLOCK)
    tl.store(highest_ptr + row * NUM_BLOCKS + block, tl.max(logits, 0))
    tl.store(places_ptr + row * NUM_BLOCKS + block, block * BLOCK + tl.argmax(logits, 0))


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr"])
def _weigh(
    logits_ptr,
    temperature_ptr,
    highest_ptr,
    weights_ptr,
    sums_ptr,
    num_tokens,
    stride,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write each token's weight, of which the highest is 1, and each block's sum."""
    begin(IS_DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0.0:
        return
    highest = tl.max(_joined(highest_ptr, row, float("-inf"), NUM_BLOCKS, BLOCKS), 0)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    logits = _block(logits_ptr, row, block, stride, num_tokens, float("-inf"), BLOCK)
    weights = tl.exp((logits - highest) / temperature)
    tl.store(weights_ptr + row.to(tl.int64) * num_tokens + columns, weights, mask=columns < num_tokens)
    tl.store(sums_ptr + row * NUM_BLOCKS + block, tl.sum(weights, 0))


@triton.jit
def _probabilities(
    weights_ptr, sums_ptr, row, block, num_tokens, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Return a block's probabilities, with 0 past the vocabulary's end, and the sum of all weights."""
    total = tl.sum(_joined(sums_ptr, row, 0.0, NUM_BLOCKS, BLOCKS), 0)
    return _block(weights_ptr, row, block, num_tokens, num_tokens, 0.0, BLOCK) / total, total


@triton.jit
def _is_wanted(search, top_k, top_p, num_tokens):
    """Return whether a row needs this search: 0 is that of top-k, 1 that of top-p."""
    return ((top_k > 0) & (top_k < num_tokens)) if search == 0 else top_p < 1.0


@triton.jit
def _narrowed(
    wanted_ptr,
    counts_ptr,
    masses_ptr,
    found_ptr,
    counts_above_ptr,
    masses_above_ptr,
    row,
    search,
    top_k,
    parity,
    shift,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Return the state behind a pass: bits of the highest pivot that enough reach, count and mass above its next.

    Enough are top_k tokens, or for the search of top-p one token and the mass that it wants.
    """
    count = top_k if search == 0 else 1
    mass = tl.full([], 0.0, tl.float64)
    if search == 1:
        mass = tl.load(wanted_ptr + row)
    pivots = tl.arange(0, _PIVOTS)
    blocks = tl.arange(0, BLOCKS)[:, None]
    at = ((row * 2 + parity) * NUM_BLOCKS + blocks) * _PIVOTS + pivots[None, :]
    counts = tl.sum(tl.load(counts_ptr + at, mask=blocks < NUM_BLOCKS, other=0), 0)
    masses = tl.sum(tl.load(masses_ptr + at, mask=blocks < NUM_BLOCKS, other=0.0), 0)
    # The first pivot holds: it is what the pass before found.
    holds = ((counts >= count) & (masses >= mass) & ((pivots < 4) | (shift < 28))) | (pivots == 0)
    best = tl.max(tl.where(holds, pivots, 0), 0)
    is_next = pivots == best + 1
    is_last = best == _PIVOTS - 1
    count_above = tl.where(
        is_last, tl.load(counts_above_ptr + row * 2 + parity), tl.sum(tl.where(is_next, counts, 0), 0)
    )
    mass_above = tl.where(
        is_last, tl.load(masses_above_ptr + row * 2 + parity), tl.sum(tl.where(is_next, masses, 0.0), 0)
    )
    return tl.load(found_ptr + row * 2 + parity) + (best << shift), count_above, mass_above


# The parameters of rows come side by side in one copy, aligned as their number has it.
@triton.jit(
    do_not_specialize=["search", "shift", "parity"],
    do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr"],
)
def _search(
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    weights_ptr,
    sums_ptr,
    wanted_ptr,
    counts_ptr,
    masses_ptr,
    found_ptr,
    counts_above_ptr,
    masses_above_ptr,
    num_tokens,
    search,
    shift,
    parity,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write, for 16 numbers that differ in four bits, how many of a block's probabilities reach each, and their sum."""
    begin(IS_DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    top_k = tl.load(top_k_ptr + row)
    is_wanted = _is_wanted(search, top_k, tl.load(top_p_ptr + row), num_tokens)
    if (tl.load(temperature_ptr + row) <= 0.0) | (not is_wanted):
        return
    found = 0
    count_above = 0
    mass_above = tl.full([], 0.0, tl.float64)
    if shift < 28:
        found, count_above, mass_above = _narrowed(
            wanted_ptr,
            counts_ptr,
            masses_ptr,
            found_ptr,
            counts_above_ptr,
            masses_above_ptr,
            row,
            search,
            top_k,
            1 - parity,
            shift + 4,
            NUM_BLOCKS,
            BLOCKS,
        )
    if block == 0:
        tl.store(found_ptr + row * 2 + parity, found)
        tl.store(counts_above_ptr + row * 2 + parity, count_above)
        tl.store(masses_above_ptr + row * 2 + parity, mass_above)
    total = tl.sum(_joined(sums_ptr, row, 0.0, NUM_BLOCKS, BLOCKS), 0)
    pivots = tl.arange(0, _PIVOTS)
    # In the first pass the last pivots would exceed 31 bits. Nothing reaches the fifth.
    numbers = found + (tl.where(shift < 28, pivots, tl.minimum(pivots, 4)) << shift)
    counts = tl.zeros([_PIVOTS], tl.int32)
    masses = tl.zeros([_PIVOTS], tl.float64)
    # As many at a time as fit in registers beside 16 pivots.
    for start in range(block * BLOCK, block * BLOCK + BLOCK, PART):
        columns = start + tl.arange(0, PART)
        is_token = columns < num_tokens
        p = tl.load(weights_ptr + row.to(tl.int64) * num_tokens + columns, mask=is_token, other=0.0) / total
        bits = tl.where(is_token, p.to(tl.int32, bitcast=True), -1)
        # Most parts have nothing that the next pivots could change.
        if tl.max(bits, 0) >= found:
            reaches = bits[:, None] >= numbers[None, :]
            counts += tl.sum(reaches.to(tl.int32), 0)
            masses += tl.sum(tl.where(reaches, p[:, None].to(tl.float64), 0.0), 0)
    at = ((row * 2 + parity) * NUM_BLOCKS + block) * _PIVOTS
    tl.store(counts_ptr + at + pivots, counts)
    tl.store(masses_ptr + at + pivots, masses)


@triton.jit(
    do_not_specialize=["search", "is_used", "parity"], do_not_specialize_on_alignment=["top_k_ptr", "top_p_ptr"]
)
def _end_search(
    top_k_ptr,
    top_p_ptr,
    thresholds_ptr,
    wanted_ptr,
    counts_ptr,
    masses_ptr,
    found_ptr,
    counts_above_ptr,
    masses_above_ptr,
    num_tokens,
    search,
    is_used,
    parity,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write the threshold, and behind the search of top-k the mass that top-p wants of the tokens that are left."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    mass_left = tl.full([], 1.0, tl.float64)
    if _is_wanted(search, top_k, top_p, num_tokens) & (is_used != 0):
        found, count_above, mass_above = _narrowed(
            wanted_ptr,
            counts_ptr,
            masses_ptr,
            found_ptr,
            counts_above_ptr,
            masses_above_ptr,
            row,
            search,
            top_k,
            parity,
            0,
            NUM_BLOCKS,
            BLOCKS,
        )
        tl.store(thresholds_ptr + row * 2 + search, found)
        # The mass of exactly top_k tokens: those above the last one, and it as often as is left.
        least = found.to(tl.float32, bitcast=True).to(tl.float64)
        mass_left = mass_above + (top_k - count_above).to(tl.float64) * least
    if search == 0:
        tl.store(wanted_ptr + row, mass_left * top_p.to(tl.float64))


@triton.jit
def _kept(p, total, min_p, thresholds_ptr, row):
    """Return probabilities with 0 for those below the thresholds: float64."""
    by_k = tl.load(thresholds_ptr + row * 2).to(tl.float32, bitcast=True)
    by_p = tl.load(thresholds_ptr + row * 2 + 1).to(tl.float32, bitcast=True)
    threshold = tl.maximum(min_p / total, tl.maximum(by_k, by_p))
    return tl.where(p >= threshold, p, 0.0).to(tl.float64)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "min_p_ptr"])
def _keep(
    temperature_ptr,
    min_p_ptr,
    weights_ptr,
    sums_ptr,
    thresholds_ptr,
    kept_ptr,
    num_tokens,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write the sum of each block's kept probabilities."""
    begin(IS_DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    if tl.load(temperature_ptr + row) <= 0.0:
        return
    p, total = _probabilities(weights_ptr, sums_ptr, row, block, num_tokens, BLOCK, NUM_BLOCKS, BLOCKS)
    kept = _kept(p, total, tl.load(min_p_ptr + row), thresholds_ptr, row)
    tl.store(kept_ptr + row * NUM_BLOCKS + block, tl.sum(kept, 0))


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperature_ptr",
        "min_p_ptr",
        "seeds_ptr",
        "sequence_indices_ptr",
        "positions_ptr",
        "out_ptr",
    ]
)
def _draw(
    temperature_ptr,
    min_p_ptr,
    seeds_ptr,
    sequence_indices_ptr,
    positions_ptr,
    highest_ptr,
    places_ptr,
    weights_ptr,
    sums_ptr,
    thresholds_ptr,
    kept_ptr,
    out_ptr,
    num_tokens,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write the token where the kept probabilities pass the row's share of their sum, or the first of the highest."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0)
    if tl.load(temperature_ptr + row) <= 0.0:
        highest = _joined(highest_ptr, row, float("-inf"), NUM_BLOCKS, BLOCKS)
        tl.store(out_ptr + row, tl.load(places_ptr + row * NUM_BLOCKS + tl.argmax(highest, 0)))
        return
    by_block = _joined(kept_ptr, row, 0.0, NUM_BLOCKS, BLOCKS)
    passed = tl.cumsum(by_block, 0)
    number = uniform(tl.load(seeds_ptr + row), tl.load(sequence_indices_ptr + row), tl.load(positions_ptr + row))
    blocks = tl.arange(0, BLOCKS)
    target = tl.sum(by_block, 0) * number
    # The last block with weight, where rounding lets the target reach the sum of all.
    last = tl.max(tl.where(by_block > 0, blocks, 0), 0)
    block = tl.minimum(tl.sum((passed <= target).to(tl.int32), 0), last)
    target -= tl.sum(tl.where(blocks < block, by_block, 0.0), 0)
    p, total = _probabilities(weights_ptr, sums_ptr, row, block, num_tokens, BLOCK, NUM_BLOCKS, BLOCKS)
    p = _kept(p, total, tl.load(min_p_ptr + row), thresholds_ptr, row)
    places = tl.arange(0, BLOCK)
    last = tl.max(tl.where(p > 0, places, 0), 0)
    chosen = tl.minimum(tl.sum((tl.cumsum(p, 0) <= target).to(tl.int32), 0), last)
    tl.store(out_ptr + row, block * BLOCK + chosen)
