"""Implementations of paged attention from other packages: the cases they support, and the block sizes they accept."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

HALVES = (torch.float16, torch.bfloat16)
# Blocks are copied for a call only if its block tables hold at most this many keys for each query.
_MAX_COPIED_KEYS = 4


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The properties of a call that decide whether an implementation supports it.

    Attributes:
        dtype, kv_dtype: Types of the queries, and of the cached keys and values.
        num_heads, num_kv_heads, head_dim, block_size: Sizes of the model and of its cache.
        has_single_queries: Whether each sequence has one query.
        keys_per_query: How many keys the block tables hold for each query, on average.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    softcap: float = 0.0
    has_single_queries: bool = False
    keys_per_query: float = 1.0


class AttentionBackend(Protocol):
    """Paged attention from another package."""

    @property
    def name(self) -> str:
        """Name and version, for logs."""

    def refusal(self, case: AttentionCase) -> str | None:
        """Return the requirement that `case` does not meet; None if the implementation supports the case."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int | None,
        softcap: float,
        max_queries: int | None,
        /,
    ) -> Tensor:
        """Compute the same as `kernels.attention.paged_attention`."""


def refusal_of_types(case: AttentionCase) -> str | None:
    """Return the unmet requirement of kernels that read keys and values in the queries' 16-bit type; None if met."""
    if case.dtype not in HALVES:
        return f"16-bit activations, not {_name(case.dtype)}"
    if case.kv_dtype != case.dtype:
        return f"a KV cache in {_name(case.dtype)}, not {_name(case.kv_dtype)}"
    return None


def refusal_of_blocks(case: AttentionCase, multiple: int) -> str | None:
    """Return the unmet requirement of kernels whose blocks are multiples of `multiple` tokens; None if it is met.

    `join_blocks` handles smaller blocks, but its copies only pay off if there are enough queries for each key.
    """
    if case.block_size % multiple == 0:
        return None
    if multiple % case.block_size or case.has_single_queries:
        return f"blocks of a multiple of {multiple} tokens, not {case.block_size}"
    if case.keys_per_query > _MAX_COPIED_KEYS:
        return f"at most {_MAX_COPIED_KEYS} keys for each query, not {case.keys_per_query:g}, to copy small blocks"
    return None


def join_blocks(caches: tuple[Tensor, Tensor], block_tables: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy the blocks of each sequence next to each other, so that several of them make one of `size` tokens; return
    the copied caches and their block tables. block_size must divide `size`, or be a multiple of `size`; in the latter
    case, nothing is copied.
    """
    block_size = caches[0].shape[1]
    if block_size % size == 0:
        return *caches, block_tables
    num_sequences, width = block_tables.shape
    padded = functional.pad(block_tables, (0, -width % (size // block_size)))
    k_cache, v_cache = (cache[padded.flatten()].view(-1, size, *cache.shape[2:]) for cache in caches)
    numbers = torch.arange(k_cache.shape[0], dtype=block_tables.dtype, device=block_tables.device)
    return k_cache, v_cache, numbers.view(num_sequences, -1)


def split_blocks(caches: tuple[Tensor, Tensor], block_tables: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """View each block of the caches [num_blocks, block_size, Hk, D] as several blocks of `size` tokens; return the
    caches and the block tables of these smaller blocks. `size` must divide block_size.
    """
    factor = caches[0].shape[1] // size
    if factor > 1:
        parts = _count(factor, block_tables.dtype, block_tables.device)
        block_tables = torch.add(parts, block_tables[:, :, None], alpha=factor).flatten(1)
    k_cache, v_cache = (cache.view(-1, size, *cache.shape[2:]) for cache in caches)
    return k_cache, v_cache, block_tables


@functools.cache
def _count(number: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the integers from 0 to `number` - 1; the first call must not be recorded."""
    return torch.arange(number, dtype=dtype, device=device)


def starts_of(lengths: Tensor) -> Tensor:
    """Return the start of each sequence, given their int32 lengths, and the end of the last one."""
    starts = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, out=starts[1:])
    return starts


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
