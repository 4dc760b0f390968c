"""Sample each row's token under temperature, top-k, top-p and min-p, without reading anything back from the device.

The rules and the random numbers are those of the worker's sampler: a token is kept if its probability reaches a
threshold (ties with the last kept one are kept), and the one drawn is where the kept probabilities, summed in order of
token number, pass a uniform share of their sum. A probability that decides by less than the rounding of a float64 sum
may fall the other way.

The threshold is the largest number at which some property still holds (enough tokens, or enough mass, at or above it).
Float32 numbers that are not negative are ordered as their bits are, so it is searched over the bits, a quarter of the
range left after each pass, without sorting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_NUM_BITS = 30
# Above the bits of 1.0, the largest probability.
_HIGHEST = tl.constexpr(0x3F800001)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    sequence_indices: Tensor,
    positions: Tensor,
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
    """
    num_rows, num_tokens = logits.shape
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    probabilities = torch.empty(num_rows, num_tokens, dtype=torch.float32, device=logits.device)
    _sample[(num_rows,)](
        logits,
        probabilities,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        sequence_indices,
        positions,
        out,
        num_tokens,
        logits.stride(0),
        BLOCK=min(_BLOCK, triton.next_power_of_2(num_tokens)),
        NUM_PASSES=_NUM_BITS // 2,
        num_warps=16,
        enable_fp_fusion=True,
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
def _count_and_mass(ptr, num_tokens, pivots, BLOCK: tl.constexpr):
    """Return how many probabilities reach each of pivots [4] (bits), and their float64 sum."""
    counts = tl.zeros([4], tl.int32)
    masses = tl.zeros([4], tl.float64)
    for start in range(0, num_tokens, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        p = tl.load(ptr + columns, mask=columns < num_tokens, other=-1.0)
        reaches = p.to(tl.int32, bitcast=True)[:, None] >= pivots[None, :]
        counts += tl.sum(reaches.to(tl.int32), 0)
        masses += tl.sum(tl.where(reaches, p[:, None].to(tl.float64), 0.0), 0)
    return counts, masses


@triton.jit
def _highest_reaching(ptr, num_tokens, count, mass, BLOCK: tl.constexpr, NUM_PASSES: tl.constexpr):
    """Bits of the largest number that at least `count` probabilities, with a sum of at least `mass`, reach."""
    low = 0
    high = _HIGHEST
    quarters = tl.arange(0, 4)
    for _ in range(NUM_PASSES + 1):
        width = (high - low + 3) // 4
        pivots = tl.minimum(low + quarters * width, high)
        counts, masses = _count_and_mass(ptr, num_tokens, pivots, BLOCK)
        # The property holds at `low` and for a run of pivots from there.
        holds = (counts >= count) & (masses >= mass) & (pivots < high)
        low = tl.max(tl.where(holds | (quarters == 0), pivots, low), 0)
        high = tl.minimum(high, low + width)
    return low


# The parameters of rows come side by side in one copy, aligned as their number has it.
@triton.jit(
    do_not_specialize_on_alignment=[
        "temperature_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "min_p_ptr",
        "seeds_ptr",
        "sequence_indices_ptr",
        "positions_ptr",
        "out_ptr",
    ]
)
def _sample(
    logits_ptr,
    probabilities_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    sequence_indices_ptr,
    positions_ptr,
    out_ptr,
    num_tokens,
    stride,
    BLOCK: tl.constexpr,
    NUM_PASSES: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    ptr = probabilities_ptr + row.to(tl.int64) * num_tokens
    temperature = tl.load(temperature_ptr + row)
    highest = float("-inf")
    best = 0
    for start in range(0, num_tokens, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + columns, mask=columns < num_tokens, other=float("-inf"))
        block_highest = tl.max(logits, 0)
        if block_highest > highest:
            best = start + tl.argmax(logits, 0)
            highest = block_highest
    if temperature <= 0.0:
        tl.store(out_ptr + row, best)
        return

    total = 0.0
    for start in range(0, num_tokens, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + columns, mask=columns < num_tokens, other=float("-inf"))
        weights = tl.exp((logits - highest) / temperature)
        total += tl.sum(weights, 0)
    for start in range(0, num_tokens, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + columns, mask=columns < num_tokens, other=float("-inf"))
        tl.store(ptr + columns, tl.exp((logits - highest) / temperature) / total, mask=columns < num_tokens)
    tl.debug_barrier()

    threshold = tl.load(min_p_ptr + row) / total
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    mass = tl.full([], 1.0, tl.float64)
    if (top_k > 0) & (top_k < num_tokens):
        bits = _highest_reaching(ptr, num_tokens, top_k, tl.full([], 0.0, tl.float64), BLOCK, NUM_PASSES)
        least = bits.to(tl.float32, bitcast=True)
        threshold = tl.maximum(threshold, least)
        # The mass of exactly top_k tokens: those above the last one, and it as often as is left.
        counts, masses = _count_and_mass(ptr, num_tokens, bits + 1 + tl.zeros([4], tl.int32), BLOCK)
        mass = tl.max(masses, 0) + (top_k - tl.max(counts, 0)).to(tl.float64) * least.to(tl.float64)
    if top_p < 1.0:
        bits = _highest_reaching(ptr, num_tokens, 1, mass * top_p.to(tl.float64), BLOCK, NUM_PASSES)
        threshold = tl.maximum(threshold, bits.to(tl.float32, bitcast=True))

    kept = tl.full([], 0.0, tl.float64)
    for start in range(0, num_tokens, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        p = tl.load(ptr + columns, mask=columns < num_tokens, other=0.0)
        kept += tl.sum(tl.where(p >= threshold, p, 0.0).to(tl.float64), 0)
    number = uniform(tl.load(seeds_ptr + row), tl.load(sequence_indices_ptr + row), tl.load(positions_ptr + row))
    target = kept * number
    passed = tl.full([], 0.0, tl.float64)
    chosen = 0
    for start in range(0, num_tokens, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        p = tl.load(ptr + columns, mask=columns < num_tokens, other=0.0)
        p = tl.where(p >= threshold, p, 0.0).to(tl.float64)
        sums = passed + tl.cumsum(p, 0)
        chosen += tl.sum(((sums <= target) & (columns < num_tokens)).to(tl.int32), 0)
        passed += tl.sum(p, 0)
    tl.store(out_ptr + row, tl.minimum(chosen, num_tokens - 1))
