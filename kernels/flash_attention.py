"""Paged attention with the flash-attn packages, if an installed version supports the case."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from kernels.attention_backend import (
    AttentionCase,
    join_blocks,
    refusal_of_blocks,
    refusal_of_types,
    split_blocks,
    starts_of,
)

logger = logging.getLogger(__name__)

# Maximum head size, and number of which the block size must be a multiple, by version. Version 4 reads a block of 128
# tokens in one copy, so a larger block is passed to it as several. For prompts, smaller blocks are copied into larger
# ones.
_MAX_HEAD_DIM = {2: 256, 3: 256, 4: 128}
_BLOCK_MULTIPLE = {2: 256, 3: 1, 4: 128}


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """One version of flash-attn.

    Attributes:
        function: The paged attention function of this version.
    """

    version: int
    function: Callable[..., Tensor | tuple[Tensor, ...]]

    @property
    def name(self) -> str:
        """Name and version, for logs."""
        return f"flash-attn {self.version}"

    def refusal(self, case: AttentionCase) -> str | None:
        """Return the requirement that `case` does not meet; None if this version supports the case."""
        longest = _MAX_HEAD_DIM[self.version]
        if (reason := refusal_of_types(case)) is not None:
            return reason
        if case.head_dim % 8 or case.head_dim > longest:
            return f"heads of a multiple of 8 elements, at most {longest}, not {case.head_dim}"
        return refusal_of_blocks(case, _BLOCK_MULTIPLE[self.version])

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
    ) -> Tensor:
        """Compute the same attention as `kernels.attention.paged_attention`."""
        # Upper bounds, so that no lengths are read back from the device.
        most_queries = q.shape[0] - context_lens.shape[0] + 1 if max_queries is None else max_queries
        left = -1 if window is None else window - 1
        k_cache, v_cache, block_tables = join_blocks((k_cache, v_cache), block_tables, _BLOCK_MULTIPLE[self.version])
        if self.version == 3:
            out = self.function(
                q,
                k_cache,
                v_cache,
                cache_seqlens=context_lens,
                page_table=block_tables,
                cu_seqlens_q=query_starts,
                max_seqlen_q=most_queries,
                softmax_scale=scale,
                softcap=softcap,
                causal=True,
                window_size=(left, -1 if window is None else 0),
            )
        elif self.version == 4:
            k_cache, v_cache, block_tables = split_blocks((k_cache, v_cache), block_tables, _BLOCK_MULTIPLE[4])
            out = self.function(
                q,
                k_cache,
                v_cache,
                cu_seqlens_q=query_starts,
                seqused_k=context_lens,
                page_table=block_tables,
                softmax_scale=scale,
                softcap=softcap,
                causal=window is None,
                window_size=(None, None) if window is None else (left, 0),
            )
        else:
            out = self.function(
                q,
                k_cache,
                v_cache,
                cu_seqlens_q=query_starts,
                cu_seqlens_k=starts_of(context_lens),
                max_seqlen_q=most_queries,
                max_seqlen_k=block_tables.shape[1] * k_cache.shape[1],
                softmax_scale=scale,
                softcap=softcap,
                causal=True,
                window_size=(left, -1 if window is None else 0),
                block_table=block_tables,
            )
        return out[0] if isinstance(out, tuple) else out


# Version, module and function. Version 3 runs on Hopper only; version 4 supports a paged cache on Blackwell only.
_VERSIONS = {
    2: ("flash_attn", "flash_attn_varlen_func"),
    3: ("flash_attn_interface", "flash_attn_with_kvcache"),
    4: ("flash_attn.cute", "flash_attn_varlen_func"),
}


@functools.cache
def load_flash_attention(capability: tuple[int, int]) -> FlashAttention | None:
    """Return the installed version that suits a device with this compute capability best, or None."""
    order = (4, 2) if capability[0] in (10, 11) else (3, 2) if capability[0] == 9 else (2,)
    for version in order:
        module_name, function_name = _VERSIONS[version]
        try:
            function = getattr(importlib.import_module(module_name), function_name)
        except (ImportError, AttributeError, OSError) as error:
            logger.debug("flash-attn %d is not usable: %s", version, error)
            continue
        return FlashAttention(version, cast("Callable[..., Tensor]", function))
    return None
