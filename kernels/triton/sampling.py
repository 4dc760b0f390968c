"""Sample one token per row with temperature, top-k, top-p and min-p, without copying anything back to the host.

The rules and random numbers are the same as in the worker's sampler: a token is kept if its probability reaches a
threshold (ties with the last kept token are kept). The sampled token is the first one at which the cumulative sum of
the kept probabilities, in order of token id, exceeds a uniform random number times their total. Results can differ from
the worker's sampler only if a comparison depends on the rounding of a float64 sum.

Every pass over the vocabulary is divided into blocks. One program per block writes a partial result; the next pass
begins by combining the partial results of its row in block order. Therefore a single row occupies as many processors as
there are blocks, and its result depends bit for bit only on the row. The final program samples: it finds the block from
the blocks' sums, and reads only that block.

A threshold is the largest number for which enough tokens, or enough probability mass, are at or above it. Nonnegative
float32 numbers have the same order as their bit patterns, so the search determines the bits of the threshold, four per
pass, without sorting. Before the search, each row gets a floor, a lower bound of its thresholds. With top-k, tokens are
divided into small groups, and the floor is the k-th largest of the groups' maxima. With top-p alone, it is a
probability so low that all tokens below it have less mass than top-p excludes. Only the tokens that reach the floor,
the candidates, are copied and searched. There are usually a few hundred: then a single program finds both thresholds,
and the passes of the search skip the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.dependent_launch import begin, num_processors, options

_BLOCK = 4096
_PART = 512
# Number of tokens per group; the floor is computed from the highest weight of each group.
_GROUP = 128
# Maximum number of candidates in a row that a single program searches.
_FEW = 1024
# Number of programs per processor in passes over candidates: enough that rows without a search cost little time.
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
    """Sample a token for each row of float32 logits [S, V] -> int32 [S]. The other tensors are [S], on the same device.

    Args:
        logits: Finite or -inf; each row has at least one finite logit.
        temperature: float32; 0: greedy, the first token with the highest logit.
        top_k: int32; 0: no limit.
        top_p: float32; 1: no limit.
        min_p: float32; minimum probability relative to the highest.
        seeds: int64 with the bits of the unsigned 64-bit seeds.
        sequence_indices: int32.
        positions: int32; the sequence's length, which is the index of the random number in its stream.
        has_top_k: Whether top_k is not 0 in any row.
        has_top_p: Whether top_p is not 1 in any row.
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
    # floors: the bits of each row's floor, or -1 if the row needs no search. has_many: whether the row has too many
    # candidates for one program. candidates, num_candidates: the candidates of each block. Only the search reads them.
    floors, has_many, num_candidates = empty(torch.int32), empty(torch.int32), empty(torch.int32, num_blocks)
    candidates = empty(torch.float32, num_blocks * block) if is_searched else weights
    # The bits of the thresholds for top-k and top-p, and the mass that top-p requires.
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
    # For each block, the number of probabilities that reach each pivot, and their sum. Two passes alternate.
    counts, masses = empty(torch.int32, 2, num_blocks, 16), empty(torch.float64, 2, num_blocks, 16)
    # The bits found so far, and the number and mass of the probabilities above the next pivot. Two passes alternate.
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
        # This computes the mass that top-p requires, with which its search begins.
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
    """Apply the finalizer of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, sequence_index, position):
    """Return the random float64 number in [0, 1) for each seed, sequence index and position."""
    mixed = _mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    mixed = _mix((mixed ^ sequence_index.to(tl.uint64)) + 0x9E3779B97F4A7C15)
    mixed = _mix((mixed ^ position.to(tl.uint64)) + 0x9E3779B97F4A7C15)
    return (mixed >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _joined(ptr, row, other, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr):
    """Load a row's partial results, one per block, padded with `other`."""
    blocks = tl.arange(0, BLOCKS)
    return tl.load(ptr + row * NUM_BLOCKS + blocks, mask=blocks < NUM_BLOCKS, other=other)


@triton.jit
def _block(ptr, row, block, stride, num_tokens, other, BLOCK: tl.constexpr):
    """Load a block of a row, padded with `other` after the end of the vocabulary."""
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
    """Write each block's highest logit and the first token that has it."""
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
    """Write each token's weight (the row's highest is 1), each block's sum, and each group's highest weight."""
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
    """Return a block's probabilities, padded with 0 after the end of the vocabulary."""
    return _block(weights_ptr, row, block, num_tokens, num_tokens, 0.0, BLOCK) / total


@triton.jit
def _is_wanted(search, top_k, top_p, num_tokens):
    """Return whether a row needs this search: 0 is the search for top-k, 1 for top-p."""
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
    """Write the bits of a lower bound of the row's thresholds, or -1 if the row needs no search."""
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
        # top-p only considers the tokens that top-k keeps, so its threshold is not below that of top-k.
        groups = tl.arange(0, PADDED)
        peaks = tl.load(peaks_ptr + row * GROUPS + groups, mask=groups < GROUPS, other=0.0)
        peaks /= _total(sums_ptr, row, NUM_BLOCKS, BLOCKS)
        bits = tl.where(groups < GROUPS, peaks.to(tl.int32, bitcast=True), -1)
        for i in range(8):
            numbers = _numbers(floor, 28 - 4 * i)
            counts = tl.sum((bits[:, None] >= numbers[None, :]).to(tl.int32), 0)
            floor = tl.max(tl.where((counts >= top_k) | (tl.arange(0, _PIVOTS) == 0), numbers, 0), 0)
    else:
        # Half of the mass that top-p excludes, so that rounding of the sums does not matter.
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
    """Write the probabilities of a block that reach the floor contiguously, in token order."""
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
    """Return the state after a pass: the bits of the highest pivot that at least `count` tokens with a total mass of at
    least `mass` reach, and the count and mass of the tokens that reach the next pivot.

    `before` has the bits found by previous passes; `shift` is the position of the four bits in which the pivots differ.
    """
    pivots = tl.arange(0, _PIVOTS)
    # Tokens below the floor were not counted. The first pivot always qualifies: the previous pass found it.
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
    """Return the pivots of a pass. In the first pass only four are needed; the last ones would exceed 31 bits."""
    pivots = tl.arange(0, _PIVOTS)
    return found + (tl.where(shift < 28, pivots, tl.minimum(pivots, 4)) << shift)


@triton.jit
def _counted(p, bits, numbers):
    """Return the number of probabilities that reach each pivot, and their sum."""
    reaches = bits[:, None] >= numbers[None, :]
    return tl.sum(reaches.to(tl.int32), 0), tl.sum(tl.where(reaches, p[:, None].to(tl.float64), 0.0), 0)


@triton.jit
def _mass_left(found, count_above, mass_above, top_k):
    """Return the mass of exactly top_k tokens: those above the threshold, and enough at the threshold."""
    return mass_above + (top_k - count_above).to(tl.float64) * found.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _threshold(p, bits, count, mass, floor):
    """Return the bits of the highest number that at least `count` probabilities with a total of at least `mass` reach,
    and the count and mass of the probabilities above it.
    """
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
    """Write whether a row has more than FEW candidates, and its thresholds if it does not."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0)
    floor = tl.load(floors_ptr + row)
    counts = _joined(num_candidates_ptr, row, 0, NUM_BLOCKS, BLOCKS)
    num_candidates = tl.sum(counts, 0)
    has_many = (floor >= 0) & (num_candidates > FEW)
    tl.store(has_many_ptr + row, has_many.to(tl.int32))
    if (floor < 0) | has_many:
        return
    # Concatenate the candidates of all blocks.
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
    """Return `_best` of a pass from its partial results.

    The search for top-k requires top_k tokens, the search for top-p one token and the mass in `wanted_ptr`.
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
    """Return the next candidates of a block, padded with 0, and their mask; blocks are numbered across all rows."""
    places = start + tl.arange(0, PART)
    is_candidate = places < num_candidates
    return tl.load(candidates_ptr + block.to(tl.int64) * BLOCK + places, mask=is_candidate, other=0.0), is_candidate


# The rows' parameters are copied to the device as one buffer, so their alignment depends on the number of rows.
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
    """Write the number and sum of each block's candidates that reach each pivot; the 16 pivots differ in four bits."""
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
        # Take as many at a time as fit in registers with 16 pivots.
        for start in range(0, num_candidates, PART):
            p, is_candidate = _part(candidates_ptr, row * NUM_BLOCKS + block, start, num_candidates, BLOCK, PART)
            bits = tl.where(is_candidate, p.to(tl.int32, bitcast=True), -1)
            # In most parts no candidate reaches the pivots.
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
    """Write the threshold, and after the search for top-k the mass that top-p requires of the remaining tokens."""
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
    """Return the probabilities as float64, with 0 for those below the thresholds."""
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
    """Write the sampled token, or with temperature 0 the first token with the highest logit."""
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
    # The last block with a kept probability; rounding may let the target reach the total.
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
