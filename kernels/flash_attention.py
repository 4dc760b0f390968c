"""Paged attention with the flash-attn packages, where an installed version supports the case."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_MAX_HEAD_DIM = 256
_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """One version of flash-attn.

    Attributes:
        version: 2, 3 or 4.
        function: That version's paged attention function.
        block_multiple: Block sizes are a multiple of this.
    """

    version: int
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    block_multiple: int

    def can_run(self, q: Tensor, k_cache: Tensor) -> bool:
        """Return whether this version supports these shapes and types."""
        return (
            q.dtype in _DTYPES
            and k_cache.dtype == q.dtype
            and q.shape[-1] % 8 == 0
            and q.shape[-1] <= _MAX_HEAD_DIM
            and k_cache.shape[1] % self.block_multiple == 0
        )

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
        softcap: float = 0.0,
        max_queries: int | None = None,
    ) -> Tensor:
        """Compute the same as `kernels.attention.paged_attention`."""
        # Bounds, so that nothing is read back from the device.
        most_queries = q.shape[0] - context_lens.shape[0] + 1 if max_queries is None else max_queries
        left = -1 if window is None else window - 1
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
                cu_seqlens_k=_starts(context_lens),
                max_seqlen_q=most_queries,
                max_seqlen_k=block_tables.shape[1] * k_cache.shape[1],
                softmax_scale=scale,
                softcap=softcap,
                causal=True,
                window_size=(left, -1 if window is None else 0),
                block_table=block_tables,
            )
        return out[0] if isinstance(out, tuple) else out


def _starts(lengths: Tensor) -> Tensor:
    starts = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, out=starts[1:])
    return starts


# version, module, function, block multiple. Version 4 is written primarily for Blackwell, version 3 only for Hopper.
_VERSIONS = {
    2: ("flash_attn", "flash_attn_varlen_func", 256),
    3: ("flash_attn_interface", "flash_attn_with_kvcache", 1),
    4: ("flash_attn.cute", "flash_attn_varlen_func", 128),
}


@functools.cache
def load_flash_attention(capability: tuple[int, int]) -> FlashAttention | None:
    """Return the installed version best suited to a device with this compute capability, or None."""
    order = (4, 2) if capability[0] >= 10 else (3, 4, 2) if capability[0] == 9 else (2,)
    for version in order:
        module_name, function_name, block_multiple = _VERSIONS[version]
        try:
            function = getattr(importlib.import_module(module_name), function_name)
        except (ImportError, AttributeError, OSError) as error:
            logger.debug("flash-attn %d is not usable: %s", version, error)
            continue
        return FlashAttention(version, cast("Callable[..., Tensor]", function), block_multiple)
    return None
