"""Implementations of paged attention from other packages: the cases they support, and the block sizes they accept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The properties of a call that decide whether an implementation supports it.

    Attributes:
        dtype, kv_dtype: Types of the queries, and of the cached keys and values.
        num_heads, num_kv_heads, head_dim, block_size: Sizes of the model and of its cache.
        softcap: Soft cap of the scores; 0 means none.
        has_single_queries: Whether each sequence has one query.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    softcap: float = 0.0
    has_single_queries: bool = False


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
    """Return the unmet requirement of kernels that read keys and values in the 16-bit type of the queries; None if it
    is met.
    """
    if case.dtype not in HALVES:
        return f"16-bit activations, not {_name(case.dtype)}"
    if case.kv_dtype != case.dtype:
        return f"a KV cache in {_name(case.dtype)}, not {_name(case.kv_dtype)}"
    return None


def split_blocks(caches: tuple[Tensor, Tensor], block_tables: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """View each block of the caches [num_blocks, block_size, Hk, D] as several blocks of `size` tokens; return the
    caches and the block tables of these smaller blocks. `size` must divide block_size.
    """
    factor = caches[0].shape[1] // size
    if factor > 1:
        parts = torch.arange(factor, dtype=block_tables.dtype, device=block_tables.device)
        block_tables = (block_tables[:, :, None] * factor + parts).flatten(1)
    k_cache, v_cache = (cache.view(-1, size, *cache.shape[2:]) for cache in caches)
    return k_cache, v_cache, block_tables


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
