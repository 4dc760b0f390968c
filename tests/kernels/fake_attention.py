"""Stand-ins for flash-attn and FlashInfer.

They check their arguments as the packages do, and compute what the packages' documentation specifies, in float64, from
the paged cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels import exact
from tests.kernels.paged import PagedBatch

HALVES = (torch.float16, torch.bfloat16)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Stand in for flash_attn.flash_attn_varlen_func, version 2."""
    assert softmax_scale is not None
    assert block_table is not None
    _check_halves(q, k, v, 256)
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    _check_ints(cu_seqlens_q, cu_seqlens_k)
    assert cu_seqlens_k.shape == cu_seqlens_q.shape
    _check_table(block_table, len(cu_seqlens_q) - 1)
    lens = cu_seqlens_k.diff().int()
    assert cu_seqlens_k[0] == 0
    assert int(lens.max()) <= max_seqlen_k <= block_table.shape[1] * k.shape[1]
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q <= q.shape[0]
    window = _window(window_size, causal)
    return _attention(q, k, v, block_table, cu_seqlens_q, lens, softmax_scale, window, softcap)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Stand in for flash_attn_interface.flash_attn_with_kvcache, version 3, with queries of different lengths and any
    block size.
    """
    _check_halves(q, k_cache, v_cache, 256)
    _check_ints(cache_seqlens, cu_seqlens_q)
    _check_table(page_table, len(cache_seqlens))
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    window = _window(window_size, causal)
    return _attention(q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens, softmax_scale, window, softcap)


def cute_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: None = None,
    *,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """Stand in for flash_attn.cute.flash_attn_varlen_func, version 4. If the left end of the window is given, `causal`
    is ignored.
    """
    _check_halves(q, k, v, 128)
    assert k.shape[1] == 128, "other sizes are copied row by row"
    _check_ints(cu_seqlens_q, seqused_k)
    _check_table(page_table, len(seqused_k))
    left, right = window_size
    assert causal or right == 0
    sizes = (-1 if left is None else left, 0)
    window = _window(sizes, is_causal=True)
    return _attention(q, k, v, page_table, cu_seqlens_q, seqused_k, softmax_scale, window, softcap), None


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    kv_layout: str = "HND",
) -> Tensor:
    """Stand in for flashinfer.decode.trtllm_batch_decode_with_kv_cache, with one query per sequence."""
    assert kv_layout == "NHD"
    assert bmm2_scale == 1.0
    assert query.shape[0] == len(seq_lens)
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32)
    sizes = (seq_lens, max_seq_len, bmm1_scale, window_left)
    return _flashinfer(query, kv_cache, workspace_buffer, block_tables, starts, *sizes)


def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    kv_layout: str = "HND",
) -> Tensor:
    """Stand in for flashinfer.prefill.trtllm_batch_context_with_kv_cache."""
    assert kv_layout == "NHD"
    assert bmm2_scale == 1.0
    assert batch_size == len(seq_lens)
    _check_ints(cum_seq_lens_q, cum_seq_lens_kv)
    assert int(cum_seq_lens_q.diff().max()) <= max_q_len
    assert cum_seq_lens_kv.tolist() == [0, *seq_lens.cumsum(0).tolist()]
    sizes = (seq_lens, max_kv_len, bmm1_scale, window_left)
    return _flashinfer(query, kv_cache, workspace_buffer, block_tables, cum_seq_lens_q, *sizes)


def _flashinfer(
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    lens: Tensor,
    most_keys: int,
    scale: float,
    window_left: int,
) -> Tensor:
    keys, values = kv_cache
    _check_halves(query, keys, values, 256)
    assert query.is_contiguous()
    assert query.shape[2] in (64, 128, 256)
    assert query.shape[1] // keys.shape[2] <= 16
    assert keys.shape[1] in (16, 32, 64)
    assert workspace.dtype == torch.uint8
    assert not workspace.any(), "must be zero before the first use"
    _check_ints(lens)
    assert int(lens.min()) > 0
    assert int(lens.max()) <= most_keys
    _check_table(block_tables, len(lens))
    window = None if window_left < 0 else window_left + 1
    return _attention(query, keys, values, block_tables, starts, lens, scale, window, 0.0)


def _check_halves(q: Tensor, k: Tensor, v: Tensor, max_head_dim: int) -> None:
    assert q.dtype in HALVES
    assert q.dtype == k.dtype == v.dtype
    assert k.shape == v.shape
    assert q.dim() == 3
    assert k.dim() == 4
    assert q.shape[1] % k.shape[2] == 0
    assert q.shape[2] == k.shape[3] <= max_head_dim
    assert q.shape[2] % 8 == 0
    assert all(tensor.stride(-1) == 1 for tensor in (q, k, v))


def _check_ints(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def _check_table(table: Tensor, num_sequences: int) -> None:
    assert table.dtype == torch.int32
    assert table.stride(-1) == 1
    assert table.dim() == 2
    assert len(table) == num_sequences


def _window(sizes: tuple[int, int], is_causal: bool) -> int | None:
    left, right = sizes
    assert is_causal or right == 0, "keys after the query would be attended to"
    return None if left < 0 else left + 1


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    starts: Tensor,
    lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float,
) -> Tensor:
    batch = PagedBatch(starts, lens, tables, torch.empty(0), torch.empty(0), k.shape[0])
    return exact.attention(q, k, v, batch, scale, window, softcap).to(q.dtype)
