"""Attention with FlashInfer, if it is installed: decode steps (one query per sequence), and on Blackwell prompts and
mixed steps as well.

FlashInfer's other functions are planned on the host from the lengths of the sequences, which the host does not have
when a step is replayed from a graph; these functions read lengths and block tables on the device.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kernels.attention_backend import AttentionCase, refusal_of_types, split_blocks, starts_of

logger = logging.getLogger(__name__)

_HEAD_DIMS = (64, 128, 256)
_MAX_GROUP = 16
# Block sizes that FlashInfer's kernels for Hopper and for Blackwell support, largest first.
_BLOCK_SIZES = (64, 32, 16)
_WORKSPACE_BYTES = 256 << 20
# Compute capabilities (major versions) for which FlashInfer has kernels for single queries, and for prompts.
_CAPABILITIES = (9, 10, 12)
_PROMPT_CAPABILITIES = (10,)


@dataclass(frozen=True, slots=True)
class FlashInferAttention:
    """FlashInfer's attention.

    Attributes:
        decode: flashinfer.decode.trtllm_batch_decode_with_kv_cache.
        prefill: flashinfer.prefill.trtllm_batch_context_with_kv_cache; None on devices for which it has no kernels.
    """

    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor] | None = None

    @property
    def name(self) -> str:
        """Name for logs."""
        return "FlashInfer"

    def refusal(self, case: AttentionCase) -> str | None:
        """Return the requirement that `case` does not meet; None if FlashInfer supports the case."""
        group = case.num_heads // case.num_kv_heads
        if (reason := refusal_of_types(case)) is not None:
            return reason
        if case.head_dim not in _HEAD_DIMS:
            return f"heads of 64, 128 or 256 elements, not {case.head_dim}"
        if group > _MAX_GROUP:
            return f"at most {_MAX_GROUP} query heads for each KV head, not {group}"
        if case.softcap:
            return "scores without a soft cap"
        if case.block_size % _BLOCK_SIZES[-1]:
            return f"blocks of a multiple of {_BLOCK_SIZES[-1]} tokens, not {case.block_size}"
        if not case.has_single_queries and self.prefill is None:
            return "one query for each sequence"
        return None

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
        size = next(size for size in _BLOCK_SIZES if k_cache.shape[1] % size == 0)
        k_cache, v_cache, block_tables = split_blocks((k_cache, v_cache), block_tables, size)
        # Padding sequences have no keys, and their output is not used.
        lengths, most_keys = context_lens.clamp(min=1), block_tables.shape[1] * size
        window_left = -1 if window is None else window - 1
        num_sequences = context_lens.shape[0]
        if q.shape[0] == num_sequences and max_queries in (None, 1):
            return self.decode(
                query=q.contiguous(),
                kv_cache=(k_cache, v_cache),
                workspace_buffer=_workspace(q.device),
                block_tables=block_tables,
                seq_lens=lengths,
                max_seq_len=most_keys,
                bmm1_scale=scale,
                bmm2_scale=1.0,
                window_left=window_left,
                kv_layout="NHD",
            )
        assert self.prefill is not None
        return self.prefill(
            query=q.contiguous(),
            kv_cache=(k_cache, v_cache),
            workspace_buffer=_workspace(q.device),
            block_tables=block_tables,
            seq_lens=lengths,
            # An upper bound, so that no lengths are read back from the device.
            max_q_len=q.shape[0] - num_sequences + 1 if max_queries is None else max_queries,
            max_kv_len=most_keys,
            bmm1_scale=scale,
            bmm2_scale=1.0,
            batch_size=num_sequences,
            cum_seq_lens_q=query_starts,
            cum_seq_lens_kv=starts_of(lengths),
            window_left=window_left,
            kv_layout="NHD",
        )


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    """Return FlashInfer's scratch memory, which must be zero before its first use."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@functools.cache
def load_flashinfer(capability: tuple[int, int]) -> FlashInferAttention | None:
    """Return FlashInfer's attention if it is installed and supports a device with this compute capability."""
    if capability[0] not in _CAPABILITIES:
        return None
    decode = _find("flashinfer.decode", "trtllm_batch_decode_with_kv_cache")
    prefill = None
    if capability[0] in _PROMPT_CAPABILITIES:
        prefill = _find("flashinfer.prefill", "trtllm_batch_context_with_kv_cache")
    return FlashInferAttention(decode, prefill) if decode is not None else None


def _find(module_name: str, function_name: str) -> Callable[..., Tensor] | None:
    try:
        return cast("Callable[..., Tensor]", getattr(importlib.import_module(module_name), function_name))
    except (ImportError, AttributeError, OSError) as error:
        logger.debug("FlashInfer's %s is not usable: %s", function_name, error)
        return None
