"""Causal attention over a paged cache in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

QUERY_TILE = 8
KEY_TILE = 128
QUERY_TILES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class _Mask:
    """Determines which keys each query attends to, and the soft cap of the scores."""

    window: int | None
    chunk: int | None
    softcap: float
    num_sink_tokens: int


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    *,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    num_sink_tokens: int = 0,
) -> Tensor:
    """Compute attention of each query over the keys of its own sequence at or before its position -> [M, Hq, Dv].

    q [M, Hq, D] holds the sequences' queries one after another: sequence i has rows query_starts[i]:query_starts[i + 1]
    (query_starts [B + 1]), which are the last of its context_lens[i] positions. Position p is in block block_tables[i,
    p // block_size] of the caches [num_blocks, block_size, Hk, D]. With a window, a query sees only that many keys,
    including its own. With a softcap c above 0, scores s become c * tanh(s / c). sinks [Hq] are attention sinks: one
    extra logit per query head, without a value vector. With a chunk, a query sees no keys before the last multiple of
    the chunk size. In addition to its window a query sees the first num_sink_tokens keys. The heads of the values may
    be narrower, [..., Dv].

    The bits of a query's output do not depend on the other queries of the call: keys are processed in tiles counted
    from position 0 and queries in tiles of constant height, so each matrix product always has the same shape.
    """
    out = torch.zeros(*q.shape[:-1], v_cache.shape[-1], dtype=q.dtype, device=q.device)
    mask = _Mask(window, chunk, softcap, num_sink_tokens)
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    for i, length in enumerate(lengths):
        begin, end = starts[i], starts[i + 1]
        if not length:
            out[begin:end] = 0  # padding
        elif begin < end:
            keys = _gather(k_cache, block_tables[i], length)
            values = _gather(v_cache, block_tables[i], length)
            out[begin:end] = _attend(q[begin:end], keys, values, length, scale, mask, sinks)
    return out


def _gather(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """Return a sequence's keys or values as float32 tiles [num_tiles, Hk, KEY_TILE, D], zero beyond its end."""
    block_size = cache.shape[1]
    blocks = block_table[: -(-length // block_size)].long()
    rows = cache[blocks].flatten(0, 1)[:length].float()
    rows = functional.pad(rows, (0, 0, 0, 0, 0, -length % KEY_TILE))
    return rows.view(-1, KEY_TILE, *rows.shape[1:]).transpose(1, 2).contiguous()


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, length: int, scale: float, mask: _Mask, sinks: Tensor | None
) -> Tensor:
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    padded = functional.pad(q.float() * scale, (0, 0, 0, 0, 0, -num_queries % QUERY_TILE))
    # [tile, query in tile, kv head, head of its group, D] -> [tile, kv head, query and head, D]
    tiles = padded.view(-1, QUERY_TILE, num_kv_heads, num_heads // num_kv_heads, head_dim).transpose(1, 2).flatten(2, 3)
    # The added column of ones makes the product with the values also compute the sum of the weights.
    values = functional.pad(values, (0, 1), value=1.0)
    positions = torch.arange(padded.shape[0], device=q.device) + (length - num_queries)
    outs = []
    for start in range(0, tiles.shape[0], QUERY_TILES_AT_ONCE):
        some = tiles[start : start + QUERY_TILES_AT_ONCE]
        first = start * QUERY_TILE
        seen = positions[first : first + some.shape[0] * QUERY_TILE]
        outs.append(_attend_tiles(some, seen, keys, values, mask, sinks))
    value_dim = values.shape[-1] - 1
    out = torch.cat(outs).view(-1, num_kv_heads, QUERY_TILE, num_heads // num_kv_heads, value_dim)
    out = out.transpose(1, 2).reshape(-1, num_heads, value_dim)
    return out[:num_queries].to(q.dtype)


def _attend_tiles(
    tiles: Tensor, positions: Tensor, keys: Tensor, values: Tensor, mask: _Mask, sinks: Tensor | None
) -> Tensor:
    """Attend with tiles [T, Hk, R, D] at positions [T * QUERY_TILE] over keys [N, Hk, KEY_TILE, D] and values [N, Hk,
    KEY_TILE, Dv + 1].
    """
    num_tiles, num_kv_heads, rows, _ = tiles.shape
    num_key_tiles = min(keys.shape[0], int(positions[-1]) // KEY_TILE + 1)
    group = rows // QUERY_TILE
    row_positions = positions.repeat_interleave(group).view(num_tiles, 1, rows, 1)
    scores = []
    for j in range(num_key_tiles):
        product = torch.matmul(tiles, keys[j].transpose(-1, -2))
        if mask.softcap:
            product = mask.softcap * torch.tanh((product / mask.softcap).double()).float()
        key_positions = torch.arange(j * KEY_TILE, (j + 1) * KEY_TILE, device=tiles.device)
        hidden = key_positions > row_positions
        if mask.window is not None:
            is_behind = key_positions <= row_positions - mask.window
            hidden = hidden | (is_behind & (key_positions >= mask.num_sink_tokens))
        if mask.chunk is not None:
            hidden = hidden | (key_positions < row_positions // mask.chunk * mask.chunk)
        scores.append(product.masked_fill(hidden, -torch.inf))
    highest = torch.stack([s.amax(dim=-1) for s in scores]).amax(dim=0).unsqueeze(-1)
    if sinks is not None:
        # Rows are the queries, and within each query the heads of a group.
        sink = (
            sinks.float()
            .view(1, num_kv_heads, 1, group)
            .expand(1, -1, QUERY_TILE, -1)
            .reshape(1, num_kv_heads, rows, 1)
        )
        highest = torch.maximum(highest, sink)
    total = torch.zeros(num_tiles, num_kv_heads, rows, values.shape[-1], device=tiles.device)
    for j, score in enumerate(scores):
        # Use float64, because PyTorch's vector and scalar float32 `exp` differ in the last bit.
        weights = torch.exp((score - highest).double()).float()
        total += torch.matmul(weights, values[j])
    if sinks is not None:
        total[..., -1:] += torch.exp((sink - highest).double()).float()
    return total[..., :-1] / total[..., -1:]
