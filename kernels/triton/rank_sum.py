"""All-reduce over the GPUs of a host in one launch: each GPU writes its part to memory that all can read, and adds all
parts.

NCCL's ring sends every part through every device. For the few kilobytes of a decode step, latency dominates; here it
consists of one write, one signal and one read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


class RankSum:
    """Sums over ranks that can address each other's memory. All ranks must make the same calls in the same order."""

    def __init__(self, parts: Tensor, signals: Tensor, rank: int, num_bytes: int, dtype: torch.dtype) -> None:
        """Create the operation on memory that all ranks have allocated.

        Args:
            parts: int64 [num_ranks], addresses of each rank's memory for parts, 2 * num_bytes each.
            signals: int64 [num_ranks], addresses of each rank's signals, `signal_bytes` each, initially 0.
            num_bytes: Maximum size of a sum in bytes, a multiple of 4096.
        """
        self._parts, self._signals, self._rank = parts, signals, rank
        self._capacity, self._dtype = num_bytes // dtype.itemsize, dtype
        # Kept on the device, so that a recorded launch can be replayed.
        self._turns = torch.zeros(triton.cdiv(self._capacity, _BLOCK), dtype=torch.int32, device=parts.device)

    def takes(self, x: Tensor) -> bool:
        """Return whether x is small enough and of the right type."""
        return x.dtype == self._dtype and 0 < x.numel() <= self._capacity

    def __call__(self, x: Tensor) -> Tensor:
        """Replace the contiguous tensor x by the sum of all ranks' x, and return it.

        Parts are added in the order of the ranks, and each intermediate sum is rounded to x's type, so all ranks get
        the same bits.
        """
        _sum[(triton.cdiv(x.numel(), _BLOCK),)](
            x,
            self._parts,
            self._signals,
            self._turns,
            x.numel(),
            CAPACITY=self._capacity,
            RANK=self._rank,
            NUM_RANKS=len(self._parts),
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
        return x


def signal_bytes(num_bytes: int, num_ranks: int) -> int:
    """Return the size of one rank's signals for sums of up to num_bytes."""
    # One int32 for each rank and each block of elements of the smallest size, 2 bytes.
    return -(-num_bytes // (2 * _BLOCK)) * num_ranks * 4


@triton.jit(do_not_specialize=["num_elements"])
def _sum(
    x_ptr,
    parts_ptr,
    signals_ptr,
    turns_ptr,
    num_elements,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    is_element = offsets < num_elements
    number = x_ptr.dtype.element_ty
    # Two sets of places alternate: when all ranks have begun a sum, none reads the set of the last but one any more.
    turn = tl.load(turns_ptr + program) + 1
    places = (turn & 1) * CAPACITY + offsets
    own = tl.load(parts_ptr + RANK).to(tl.pointer_type(number))
    tl.store(own + places, tl.load(x_ptr + offsets, mask=is_element, other=0.0), mask=is_element)
    # The whole part is written before the signals.
    tl.debug_barrier()
    for rank in tl.static_range(NUM_RANKS):
        theirs = tl.load(signals_ptr + rank).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + program * NUM_RANKS + RANK, turn, sem="release", scope="sys")
    mine = tl.load(signals_ptr + RANK).to(tl.pointer_type(tl.int32)) + program * NUM_RANKS
    for rank in tl.static_range(NUM_RANKS):
        # A rank may have begun the next sum already. The difference is right after an overflow, too.
        while tl.atomic_add(mine + rank, 0, sem="acquire", scope="sys") - turn < 0:
            pass
    tl.debug_barrier()
    first = tl.load(parts_ptr).to(tl.pointer_type(number))
    total = tl.load(first + places, mask=is_element, other=0.0, cache_modifier=".cg")
    for rank in tl.static_range(1, NUM_RANKS):
        other = tl.load(parts_ptr + rank).to(tl.pointer_type(number))
        part = tl.load(other + places, mask=is_element, other=0.0, cache_modifier=".cg")
        total = (total.to(tl.float32) + part.to(tl.float32)).to(number)
    tl.store(x_ptr + offsets, total, mask=is_element)
    tl.store(turns_ptr + program, turn)
