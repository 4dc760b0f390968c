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
without sorting. No threshold is below a row's floor, which is known before the search: the least probability of the
top_k most likely tokens, each taken from another small group of tokens, or one below which all tokens together weigh
less than top-p leaves out. So only the tokens that reach the floor are copied and searched. Usually they are a few
hundred: then a single program finds both thresholds, and the passes of the search skip the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.dependent_launch import begin, num_processors, options

_BLOCK = 4096
_PART = 512
# Tokens of a group of which only the highest weight counts for the floor.
_GROUP = 128
# Most candidates of a row that one program searches.
_FEW = 1024
# Programs for each processor in passes over candidates, so that rows that skip them are skipped soon.
_PROGRAMS_PER_PROCESSOR = 16
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
    num_programs = _PROGRAMS_PER_PROCESSOR * num_processors(device)
    shared_grid = (num_rows, max(1, min(num_blocks, num_programs // num_rows)))

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=device)

    highest, places = empty(torch.float32, num_blocks), empty(torch.int32, num_blocks)
    weights, sums = empty(torch.float32, num_tokens), empty(torch.float32, num_blocks)
    group = min(_GROUP, block)
    groups = num_blocks * block // group
    peaks = empty(torch.float32, groups)
    _find_highest[grid](logits, highest, places, num_tokens, logits.stride(0), BLOCK=block, num_warps=8, **common)
    _weigh[grid](
        logits,
        temperature,
        highest,
        weights,
        sums,
        peaks,
        num_tokens,
        logits.stride(0),
        BLOCK=block,
        GROUP=group,
        num_warps=8,
        **sizes,
    )
    limits = (top_k, top_p)
    is_searched = has_top_k or has_top_p
    # Bits of each row's floor, or -1 if it needs no search, and whether it has too many candidates for one program; the
    # candidates of each block, and their number. Without a search nothing reads them.
    floors, has_many, num_candidates = empty(torch.int32), empty(torch.int32), empty(torch.int32, num_blocks)
    candidates = empty(torch.float32, num_blocks * block) if is_searched else weights
    # Thresholds of top-k and top-p (bits), and the mass that top-p wants.
    thresholds = torch.zeros(num_rows, 2, dtype=torch.int32, device=device)
    wanted = empty(torch.float64)
    if is_searched:
        _find_floor[(num_rows,)](
            temperature,
            *limits,
            peaks,
            sums,
            floors,
            num_tokens,
            GROUPS=groups,
            PADDED=triton.next_power_of_2(groups),
            num_warps=8,
            **sizes,
        )
        _gather[grid](weights, sums, floors, candidates, num_candidates, num_tokens, BLOCK=block, num_warps=8, **sizes)
        _search_few[(num_rows,)](
            *limits,
            candidates,
            num_candidates,
            floors,
            has_many,
            thresholds,
            num_tokens,
            BLOCK=block,
            FEW=min(_FEW, triton.next_power_of_2(num_tokens)),
            num_warps=16,
            **sizes,
        )
    # Of two passes in turn: how many probabilities reach each pivot, and their sum, by block.
    counts, masses = empty(torch.int32, 2, num_blocks, 16), empty(torch.float64, 2, num_blocks, 16)
    # Of two passes in turn: the bits found so far, and count and mass of what is above the next number.
    found, counts_above, masses_above = empty(torch.int32, 2), empty(torch.int32, 2), empty(torch.float64, 2)
    state = (has_many, floors, wanted, counts, masses, found, counts_above, masses_above)
    for search, is_used in enumerate((has_top_k, has_top_p)):
        for i, shift in enumerate(_SHIFTS if is_used else ()):
            _search[shared_grid](
                *limits,
                candidates,
                num_candidates,
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
    _keep[shared_grid](
        temperature,
        min_p,
        weights,
        sums,
        floors,
        candidates,
        num_candidates,
        thresholds,
        kept,
        num_tokens,
        BLOCK=block,
        PART=min(_PART, block),
        IS_SEARCHED=is_searched,
        num_warps=8,
        **sizes,
    )
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
    peaks_ptr,
    num_tokens,
    stride,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write each token's weight, of which the highest is 1, each block's sum, and each group's highest weight."""
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
    groups = tl.arange(0, BLOCK // GROUP)
    peaks = tl.max(tl.reshape(weights, [BLOCK // GROUP, GROUP]), 1)
    tl.store(peaks_ptr + (row * NUM_BLOCKS + block) * (BLOCK // GROUP) + groups, peaks)


@triton.jit
def _total(sums_ptr, row, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the sum of a row's weights."""
    return tl.sum(_joined(sums_ptr, row, 0.0, NUM_BLOCKS, BLOCKS), 0)


@triton.jit
def _probabilities(weights_ptr, total, row, block, num_tokens, BLOCK: tl.constexpr):
    """Return a block's probabilities, with 0 past the vocabulary's end."""
    return _block(weights_ptr, row, block, num_tokens, num_tokens, 0.0, BLOCK) / total


@triton.jit
def _is_wanted(search, top_k, top_p, num_tokens):
    """Return whether a row needs this search: 0 is that of top-k, 1 that of top-p."""
    return ((top_k > 0) & (top_k < num_tokens)) if search == 0 else top_p < 1.0


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr"])
def _find_floor(
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    peaks_ptr,
    sums_ptr,
    floors_ptr,
    num_tokens,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write the bits of a number that is not above the row's thresholds, or -1 if the row needs no search."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    has_top_k = _is_wanted(0, top_k, top_p, num_tokens)
    is_searched = has_top_k | _is_wanted(1, top_k, top_p, num_tokens)
    if (tl.load(temperature_ptr + row) <= 0.0) | (not is_searched):
        tl.store(floors_ptr + row, -1)
        return
    floor = 0
    if has_top_k:
        # The threshold of top-p is not below that of top-k, because the tokens kept by top-k have all the mass.
        groups = tl.arange(0, PADDED)
        peaks = tl.load(peaks_ptr + row * GROUPS + groups, mask=groups < GROUPS, other=0.0)
        peaks /= _total(sums_ptr, row, NUM_BLOCKS, BLOCKS)
        bits = tl.where(groups < GROUPS, peaks.to(tl.int32, bitcast=True), -1)
        for i in range(8):
            numbers = _numbers(floor, 28 - 4 * i)
            counts = tl.sum((bits[:, None] >= numbers[None, :]).to(tl.int32), 0)
            floor = tl.max(tl.where((counts >= top_k) | (tl.arange(0, _PIVOTS) == 0), numbers, 0), 0)
    else:
        # Half of what top-p leaves out, so that rounding of the sums does not matter.
        floor = (tl.maximum(1.0 - top_p - 1e-4, 0.0) * 0.5 / num_tokens).to(tl.int32, bitcast=True)
    tl.store(floors_ptr + row, floor)


@triton.jit
def _gather(
    weights_ptr,
    sums_ptr,
    floors_ptr,
    candidates_ptr,
    num_candidates_ptr,
    num_tokens,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write a block's probabilities that reach the floor one after the other, in the order of tokens."""
    begin(IS_DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    floor = tl.load(floors_ptr + row)
    if floor < 0:
        return
    total = _total(sums_ptr, row, NUM_BLOCKS, BLOCKS)
    p = _probabilities(weights_ptr, total, row, block, num_tokens, BLOCK)
    is_token = block * BLOCK + tl.arange(0, BLOCK) < num_tokens
    reaches = is_token & (p.to(tl.int32, bitcast=True) >= floor)
    count = tl.sum(reaches.to(tl.int32), 0)
    tl.store(num_candidates_ptr + row * NUM_BLOCKS + block, count)
    if count > 0:
        places = tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + (row.to(tl.int64) * NUM_BLOCKS + block) * BLOCK + places, p, mask=reaches)


@triton.jit
def _best(counts, masses, count, mass, before, floor, shift, count_above, mass_above):
    """Return the state behind a pass: bits of the highest pivot that enough reach, count and mass above its next.

    Enough are `count` tokens with `mass`. `before` has the bits found so far, which the pivots follow at `shift`.
    """
    pivots = tl.arange(0, _PIVOTS)
    # What does not reach the floor was not counted. The first pivot holds: it is what the pass before found.
    holds = ((counts >= count) & (masses >= mass)) | (before + (pivots << shift) <= floor)
    holds = (holds & ((pivots < 4) | (shift < 28))) | (pivots == 0)
    best = tl.max(tl.where(holds, pivots, 0), 0)
    is_next = pivots == best + 1
    is_last = best == _PIVOTS - 1
    count_above = tl.where(is_last, count_above, tl.sum(tl.where(is_next, counts, 0), 0))
    mass_above = tl.where(is_last, mass_above, tl.sum(tl.where(is_next, masses, 0.0), 0))
    return before + (best << shift), count_above, mass_above


@triton.jit
def _numbers(found, shift):
    """Return the pivots of a pass. In the first one the last would exceed 31 bits, and nothing reaches the fifth."""
    pivots = tl.arange(0, _PIVOTS)
    return found + (tl.where(shift < 28, pivots, tl.minimum(pivots, 4)) << shift)


@triton.jit
def _counted(p, bits, numbers):
    """Return how many probabilities reach each number, and their sum."""
    reaches = bits[:, None] >= numbers[None, :]
    return tl.sum(reaches.to(tl.int32), 0), tl.sum(tl.where(reaches, p[:, None].to(tl.float64), 0.0), 0)


@triton.jit
def _mass_left(found, count_above, mass_above, top_k):
    """Return the mass of exactly top_k tokens: those above the last one, and it as often as is left."""
    return mass_above + (top_k - count_above).to(tl.float64) * found.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _threshold(p, bits, count, mass, floor):
    """Return the bits of the highest number that `count` probabilities with `mass` reach, count and mass above it."""
    found = 0
    count_above = 0
    mass_above = tl.full([], 0.0, tl.float64)
    for i in range(8):
        shift = 28 - 4 * i
        counts, masses = _counted(p, bits, _numbers(found, shift))
        found, count_above, mass_above = _best(
            counts, masses, count, mass, found, floor, shift, count_above, mass_above
        )
    return found, count_above, mass_above


@triton.jit(do_not_specialize_on_alignment=["top_k_ptr", "top_p_ptr"])
def _search_few(
    top_k_ptr,
    top_p_ptr,
    candidates_ptr,
    num_candidates_ptr,
    floors_ptr,
    has_many_ptr,
    thresholds_ptr,
    num_tokens,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write the thresholds of a row with at most FEW candidates, and whether it has more."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0)
    floor = tl.load(floors_ptr + row)
    counts = _joined(num_candidates_ptr, row, 0, NUM_BLOCKS, BLOCKS)
    num_candidates = tl.sum(counts, 0)
    has_many = (floor >= 0) & (num_candidates > FEW)
    tl.store(has_many_ptr + row, has_many.to(tl.int32))
    if (floor < 0) | has_many:
        return
    # The candidates of all blocks, one after the other.
    places = tl.arange(0, FEW)
    is_candidate = places < num_candidates
    is_behind = tl.cumsum(counts, 0)[None, :] <= places[:, None]
    blocks = tl.sum(is_behind.to(tl.int32), 1)
    offsets = places - tl.sum(tl.where(is_behind, counts[None, :], 0), 1)
    at = (row.to(tl.int64) * NUM_BLOCKS + blocks) * BLOCK + offsets
    p = tl.load(candidates_ptr + at, mask=is_candidate, other=0.0)
    bits = tl.where(is_candidate, p.to(tl.int32, bitcast=True), -1)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    mass_left = tl.full([], 1.0, tl.float64)
    if _is_wanted(0, top_k, top_p, num_tokens):
        found, count_above, mass_above = _threshold(p, bits, top_k, tl.full([], 0.0, tl.float64), floor)
        tl.store(thresholds_ptr + row * 2, found)
        mass_left = _mass_left(found, count_above, mass_above, top_k)
    if _is_wanted(1, top_k, top_p, num_tokens):
        found, count_above, mass_above = _threshold(p, bits, 1, mass_left * top_p.to(tl.float64), floor)
        tl.store(thresholds_ptr + row * 2 + 1, found)


@triton.jit
def _narrowed(
    floors_ptr,
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
    """Return `_best` of a pass, whose numbers its programs left by block.

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
    before, floor = tl.load(found_ptr + row * 2 + parity), tl.load(floors_ptr + row)
    count_above, mass_above = tl.load(counts_above_ptr + row * 2 + parity), tl.load(masses_above_ptr + row * 2 + parity)
    return _best(counts, masses, count, mass, before, floor, shift, count_above, mass_above)


@triton.jit
def _part(candidates_ptr, block, start, num_candidates, BLOCK: tl.constexpr, PART: tl.constexpr):
    """Return the next candidates of a block, numbered over all rows, padded with 0, and which are not padding."""
    places = start + tl.arange(0, PART)
    is_candidate = places < num_candidates
    return tl.load(candidates_ptr + block.to(tl.int64) * BLOCK + places, mask=is_candidate, other=0.0), is_candidate


# The parameters of rows come side by side in one copy, aligned as their number has it.
@triton.jit(do_not_specialize=["search", "shift", "parity"], do_not_specialize_on_alignment=["top_k_ptr", "top_p_ptr"])
def _search(
    top_k_ptr,
    top_p_ptr,
    candidates_ptr,
    num_candidates_ptr,
    has_many_ptr,
    floors_ptr,
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
    """Write, for 16 numbers that differ in four bits, how many of a block's candidates reach each, and their sum."""
    begin(IS_DEPENDENT)
    row, program = tl.program_id(0), tl.program_id(1)
    top_k = tl.load(top_k_ptr + row)
    is_wanted = _is_wanted(search, top_k, tl.load(top_p_ptr + row), num_tokens)
    if (tl.load(has_many_ptr + row) == 0) | (not is_wanted):
        return
    found = 0
    count_above = 0
    mass_above = tl.full([], 0.0, tl.float64)
    if shift < 28:
        found, count_above, mass_above = _narrowed(
            floors_ptr,
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
    if program == 0:
        tl.store(found_ptr + row * 2 + parity, found)
        tl.store(counts_above_ptr + row * 2 + parity, count_above)
        tl.store(masses_above_ptr + row * 2 + parity, mass_above)
    numbers = _numbers(found, shift)
    for block in range(program, NUM_BLOCKS, tl.num_programs(1)):
        counts = tl.zeros([_PIVOTS], tl.int32)
        masses = tl.zeros([_PIVOTS], tl.float64)
        num_candidates = tl.load(num_candidates_ptr + row * NUM_BLOCKS + block)
        # As many at a time as fit in registers beside 16 pivots.
        for start in range(0, num_candidates, PART):
            p, is_candidate = _part(candidates_ptr, row * NUM_BLOCKS + block, start, num_candidates, BLOCK, PART)
            bits = tl.where(is_candidate, p.to(tl.int32, bitcast=True), -1)
            # Most parts have nothing that the next pivots could change.
            if tl.max(bits, 0) >= found:
                more_counts, more_masses = _counted(p, bits, numbers)
                counts += more_counts
                masses += more_masses
        at = ((row * 2 + parity) * NUM_BLOCKS + block) * _PIVOTS + tl.arange(0, _PIVOTS)
        tl.store(counts_ptr + at, counts)
        tl.store(masses_ptr + at, masses)


@triton.jit(
    do_not_specialize=["search", "is_used", "parity"], do_not_specialize_on_alignment=["top_k_ptr", "top_p_ptr"]
)
def _end_search(
    top_k_ptr,
    top_p_ptr,
    thresholds_ptr,
    has_many_ptr,
    floors_ptr,
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
    if tl.load(has_many_ptr + row) == 0:
        return
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    mass_left = tl.full([], 1.0, tl.float64)
    if _is_wanted(search, top_k, top_p, num_tokens) & (is_used != 0):
        found, count_above, mass_above = _narrowed(
            floors_ptr,
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
        mass_left = _mass_left(found, count_above, mass_above, top_k)
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
    floors_ptr,
    candidates_ptr,
    num_candidates_ptr,
    thresholds_ptr,
    kept_ptr,
    num_tokens,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    IS_SEARCHED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write the sum of each block's kept probabilities."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0)
    if tl.load(temperature_ptr + row) <= 0.0:
        return
    min_p = tl.load(min_p_ptr + row)
    is_searched = IS_SEARCHED and tl.load(floors_ptr + row) >= 0
    total = _total(sums_ptr, row, NUM_BLOCKS, BLOCKS)
    for block in range(tl.program_id(1), NUM_BLOCKS, tl.num_programs(1)):
        mass = tl.full([], 0.0, tl.float64)
        if is_searched:
            num_candidates = tl.load(num_candidates_ptr + row * NUM_BLOCKS + block)
            for start in range(0, num_candidates, PART):
                p, _ = _part(candidates_ptr, row * NUM_BLOCKS + block, start, num_candidates, BLOCK, PART)
                mass += tl.sum(_kept(p, total, min_p, thresholds_ptr, row), 0)
        else:
            p = _probabilities(weights_ptr, total, row, block, num_tokens, BLOCK)
            mass = tl.sum(_kept(p, total, min_p, thresholds_ptr, row), 0)
        tl.store(kept_ptr + row * NUM_BLOCKS + block, mass)


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
    total = _total(sums_ptr, row, NUM_BLOCKS, BLOCKS)
    p = _probabilities(weights_ptr, total, row, block, num_tokens, BLOCK)
    p = _kept(p, total, tl.load(min_p_ptr + row), thresholds_ptr, row)
    places = tl.arange(0, BLOCK)
    last = tl.max(tl.where(p > 0, places, 0), 0)
    chosen = tl.minimum(tl.sum((tl.cumsum(p, 0) <= target).to(tl.int32), 0), last)
    tl.store(out_ptr + row, block * BLOCK + chosen)
