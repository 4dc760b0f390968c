"""Causal attention over block tables: choosing and launching the kernels."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.quantized_kv import KvScales
from kernels.triton.attention_kernels import attend, combine
from kernels.triton.decode_kernel import decode
from kernels.triton.dependent_launch import num_processors, options

# Batch-invariant decoding: the minimum number of keys per split, and the maximum number of splits, each of which writes
# a float32 vector for every query head.
SEGMENT_KEYS = 512
_MAX_SEGMENTS = 32
# For single queries: the number of programs that a processor runs at a time, the number of partial results that a
# program merges at a time, the maximum number of sequences times KV heads, and the number of sequences whose lengths a
# program reads at a time.
_PROGRAMS_PER_PROCESSOR = 3
_NUMBERS_AT_ONCE = 8192
_MAX_ARRIVALS = 1 << 18
_SEQUENCES_AT_ONCE = 128
# For tiles of many queries: the maximum number of splits, the number of programs with work that a processor runs at a
# time, the number of programs per processor with or without work, and the maximum number of tokens in a step whose
# tiles are split, which limits the memory for partial results.
_MAX_TILE_SPLITS = 16
_JOINED_SPLITS = 64
_TILES_PER_PROCESSOR = 2
_PLACES_PER_PROCESSOR = 5
_MAX_SPLIT_TOKENS = 512
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Launch:
    """Tile sizes of `attend`: rows (queries times heads of the group) and keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_launch(group: int, head_dim: int, element_size: int) -> Launch:
    """Return the tile sizes for sequences with many queries."""
    if element_size > 2 and head_dim > 128:
        return _wide_float32_launch(group)
    if element_size > 2:
        return Launch(max(32, triton.next_power_of_2(group)), 32, 4, 2)
    if head_dim > 128:
        return Launch(max(64, triton.next_power_of_2(group)), 32, 4, 2)
    return Launch(max(128, triton.next_power_of_2(group)), 64, 8, 3)


def _wide_float32_launch(group: int) -> Launch:
    """Return tiles of 16 keys, which fit in the shared memory of all GPUs; tiles of 32 keys spill thousands of
    registers.
    """
    return Launch(max(32, triton.next_power_of_2(group)), 16, 8, 2)


def decode_launch(group: int, head_dim: int, element_size: int) -> Launch:
    """Return the tile sizes for sequences with one query; 16 rows are the minimum for a matrix instruction."""
    block_m = max(16, triton.next_power_of_2(group))
    if head_dim > 128 and element_size > 2:
        return Launch(block_m, 16, 4, 2)
    if head_dim > 128 or element_size > 2:
        return Launch(block_m, 32, 4, 2)
    return Launch(block_m, 64, 4, 3)


def invariant_launch(group: int, head_dim: int, element_size: int) -> Launch:
    """Return the tile sizes for all sequences in batch-invariant attention, which are small: a program must hold two
    softmax states.
    """
    if element_size > 2 and head_dim > 128:
        return _wide_float32_launch(group)
    if head_dim > 128 or element_size > 2:
        return Launch(max(32, triton.next_power_of_2(group)), 32, 4, 2)
    return Launch(max(64, triton.next_power_of_2(group)), 64, 4, 2)


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
    scales: KvScales | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    is_batch_invariant: bool = False,
    segment_keys: int = SEGMENT_KEYS,
    num_shares: int | None = None,
    num_tile_splits: int | None = None,
    max_queries: int | None = None,
) -> Tensor:
    """Compute the same attention as the PyTorch reference -> [M, Hq, D], with D at most 256; nothing is read back from
    the device.

    Entries of block_tables after the last block of a sequence are ignored. A sequence with one query and context length
    0 (padding) gets zeros.

    Args:
        q: [M, Hq, D], the last dimension contiguous.
        k_cache: [num_blocks, block_size, Hk, D]: floats, or int8 or float8_e4m3fn with `scales`.
        v_cache: Like k_cache, with the same strides.
        block_tables: int32 [B, most blocks].
        query_starts: int32 [B + 1].
        context_lens: int32 [B].
        window: Number of keys that a query attends to, including its own; None means all.
        softcap: Scores s become softcap * tanh(s / softcap); 0 means no soft cap.
        sinks: Float32 [Hq], attention sinks: one extra logit per query head, without a value vector.
        chunk: A query attends to no keys before the last multiple of this; cannot be combined with a window. None means
            no chunks.
        is_batch_invariant: Whether a query's result depends bit for bit only on its own keys, and not on the other
            queries, the batch size, the split into context chunks, or the longest context.
        segment_keys: For batch-invariant attention: `segment_keys_for` of the maximum sequence length.
        num_shares: Number of programs for the keys of single queries, in addition to one per query; None means as many
            as fill the device.
        num_tile_splits: Number of programs for the keys of each tile of queries, in sequences with more than one query;
            None means as many as fill the device.
        max_queries: Upper bound on the number of queries of one sequence. If set, sequences may have no queries; if
            None, each has at least one.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    if head_dim > 256:
        raise ValueError(f"head size {head_dim} is more than 256")
    if window is not None and chunk is not None:
        raise ValueError("a window and a chunk cannot be combined")
    group, num_sequences = num_heads // num_kv_heads, context_lens.shape[0]
    is_all_decode = num_tokens == num_sequences if max_queries is None else max_queries == 1
    # Tokens that belong to no sequence stay zero.
    make = torch.empty if max_queries is None or is_all_decode else torch.zeros
    out = make(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    prefill = prefill_launch(group, head_dim, q.element_size())
    segment_tiles = num_segments = 0
    if is_batch_invariant:
        prefill = invariant_launch(group, head_dim, q.element_size())
        segment_tiles = segment_keys // prefill.block_n
        # A power of two, so that few kernels are compiled.
        num_segments = triton.next_power_of_2(triton.cdiv(block_tables.shape[1] * block_size, segment_keys))
    queries_each = prefill.block_m // group
    num_tiles = num_tokens // queries_each + num_sequences
    if is_batch_invariant or is_all_decode or num_tokens > _MAX_SPLIT_TOKENS:
        num_tile_splits = 1
    elif num_tile_splits is None:
        num_tile_splits = _num_tile_splits(
            triton.cdiv(num_tokens, queries_each) * num_kv_heads,
            num_tiles * num_kv_heads,
            block_tables.shape[1] * block_size // prefill.block_n,
            q.device,
        )

    def partial_results(num_rows: int, splits: int) -> tuple[Tensor, Tensor]:
        is_split = splits > 1
        shape = (num_rows, num_heads, splits)
        return (
            torch.empty(*shape, head_dim if is_split else 0, device=q.device),
            torch.empty(*shape, 2 if is_split else 0, device=q.device),
        )

    tables = (block_tables, query_starts, context_lens, num_sequences)
    score_options = (scale if softcap else scale * _LOG2_E, chunk or window or 0, softcap)
    scale_strides = scales.keys.stride()[:2] if scales else (0, 0)
    strides = (*q.stride()[:2], out.stride(0), *k_cache.stride()[:3], *scale_strides, block_tables.stride(0))
    # Arguments that `attend` and `decode` share.
    common = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "HAS_WINDOW": window is not None or chunk is not None,
        "IS_CHUNKED": chunk is not None,
        "HAS_SOFTCAP": softcap != 0.0,
        "HAS_SINKS": sinks is not None,
        "IS_QUANTIZED": scales is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "enable_fp_fusion": not is_batch_invariant,
    }

    def tensors(unused: Tensor) -> tuple[Tensor, ...]:
        """Return the kernel's tensor arguments; `unused` is a placeholder for optional tensors, which is not read."""
        k_scale, v_scale = (scales.keys, scales.values) if scales else (unused, unused)
        return q, k_cache, v_cache, k_scale, v_scale, unused if sinks is None else sinks, out

    def run(grid: tuple[int, int, int], partial: Tensor, state: Tensor, *, is_decode: bool) -> None:
        attend[grid](
            *tensors(state),
            partial,
            state,
            *tables,
            *score_options,
            *strides,
            BLOCK_M=prefill.block_m,
            BLOCK_N=prefill.block_n,
            IS_SPLIT=grid[2] > 1,
            SEGMENT_TILES=segment_tiles,
            IS_DECODE=is_decode,
            num_warps=prefill.num_warps,
            num_stages=prefill.num_stages,
            **common,
        )

        if grid[2] == 1:
            return
        combine[(partial.shape[0], num_heads)](
            partial,
            state,
            sinks if sinks is not None else state,
            out,
            query_starts,
            context_lens,
            grid[2],
            num_sequences,
            out.stride(0),
            HEAD_DIM=head_dim,
            BLOCK_D=common["BLOCK_D"],
            BLOCK_SPLITS=_JOINED_SPLITS,
            SEGMENT_KEYS=segment_keys if is_batch_invariant else 0,
            IS_DECODE=is_decode,
            HAS_SINKS=sinks is not None,
            num_warps=4,
            enable_fp_fusion=not is_batch_invariant,
        )

    def run_single_queries() -> None:
        launch = decode_launch(group, head_dim, q.element_size())
        shares = num_shares or _num_shares(num_kv_heads, q.device)
        if num_sequences * num_kv_heads > _MAX_ARRIVALS:
            raise ValueError(f"{num_sequences} sequences in a step; must be at most {_MAX_ARRIVALS // num_kv_heads}")
        num_states = (num_sequences + shares) * num_heads
        state = torch.empty(num_states, 2, device=q.device)
        block_g = triton.next_power_of_2(group)
        decode[num_sequences + shares, num_kv_heads](
            *tensors(state),
            torch.empty(num_states, head_dim, device=q.device),
            state,
            _arrivals(q.device),
            *tables,
            shares,
            *score_options,
            *strides,
            BLOCK_G=block_g,
            BLOCK_M=launch.block_m,
            BLOCK_N=launch.block_n,
            BLOCK_B=_SEQUENCES_AT_ONCE,
            BLOCK_SPLITS=max(1, min(64, _NUMBERS_AT_ONCE // (block_g * common["BLOCK_D"]))),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            **common,
            **options(q.device),
        )

    if is_batch_invariant:
        grid = (num_sequences, num_kv_heads, num_segments)
        run(grid, *partial_results(num_sequences, num_segments), is_decode=True)
    else:
        run_single_queries()
    if not is_all_decode:
        tile_results = partial_results(num_tokens, num_tile_splits)
        run((num_tiles, num_kv_heads, num_tile_splits), *tile_results, is_decode=False)
    return out


def segment_keys_for(max_sequence_length: int) -> int:
    """Return the segment length of batch-invariant attention: a power of two, with at most 32 segments per sequence.

    It affects the bits of results, so it must not depend on anything that changes while a process runs.
    """
    least: int = triton.next_power_of_2(triton.cdiv(max_sequence_length, _MAX_SEGMENTS))
    return max(SEGMENT_KEYS, least)


def _num_shares(num_kv_heads: int, device: torch.device) -> int:
    """Return how many programs per KV head fill the device."""
    return math.ceil(_PROGRAMS_PER_PROCESSOR * num_processors(device) / num_kv_heads)


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """Return the counters, initially zero, by which the programs of `decode` determine which of them finishes last; the
    first call must not be recorded in a graph.
    """
    return torch.zeros(_MAX_ARRIVALS, dtype=torch.int32, device=device)


def _num_tile_splits(num_filled: int, num_places: int, num_key_tiles: int, device: torch.device) -> int:
    """Return the number of programs that share the keys of a tile: enough to occupy every processor, but so few that
    each has at least one key tile at the longest context.

    Args:
        num_filled: Number of tiles over all KV heads if one sequence has all tokens, as in most steps.
        num_places: Maximum number of tiles. In a recorded step few of them have queries, but all are launched, which
            takes time even if they end immediately.
    """
    processors = num_processors(device)
    wanted = _TILES_PER_PROCESSOR * processors // num_filled
    affordable = _PLACES_PER_PROCESSOR * processors // num_places
    return max(1, min(wanted, affordable, num_key_tiles, _MAX_TILE_SPLITS))
