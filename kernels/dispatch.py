"""Chooses the implementation of each operation.

On a CPU, operations use the PyTorch references. On CUDA an operation uses our Triton kernels, or the PyTorch reference
if Triton is not available; attention uses flash-attn or FlashInfer if `choose_attention` has selected it. A
batch-invariant process uses only Triton.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from kernels import attention_choice
from kernels.activation import Activation
from kernels.activation import activate as torch_activate
from kernels.attention import paged_attention as torch_paged_attention
from kernels.attention_backend import AttentionCase
from kernels.block_weight import BlockWeight
from kernels.grouped_linear import grouped_linear as torch_grouped_linear
from kernels.grouped_linear import head_linear as torch_head_linear
from kernels.grouped_linear import weighted_sum as torch_weighted_sum
from kernels.kv_store import store_kv as torch_store_kv
from kernels.linear import gated_linear as torch_gated_linear
from kernels.linear import linear as torch_linear
from kernels.linear import quantized_linear as torch_quantized_linear
from kernels.lora import add_lora as torch_add_lora
from kernels.quantized_kv import KvScales, dequantized
from kernels.rms_norm import add_rms_norm as torch_add_rms_norm
from kernels.rms_norm import rms_norm as torch_rms_norm
from kernels.rotary import apply_rotary as torch_apply_rotary
from kernels.rotate_and_store import rotate_and_store as torch_rotate_and_store
from kernels.scaled_linear import can_scale, scaled_linear

_HAS_TRITON = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
if _HAS_TRITON:
    from kernels import triton

# Maximum head size of the Triton attention kernels.
MAX_HEAD_DIM = 256
# Maximum number of rows for which one kernel of ours computes a product and its activation, instead of cuBLAS and a
# second kernel.
_MAX_GATED_ROWS = 16
# Maximum number of rows for which int8 weights and blocks are unpacked inside the product, instead of once before a
# call of cuBLAS. Recorded mixed steps do not have more rows: their graphs would keep the memory of the unpacked
# matrices.
_MAX_PACKED_ROWS = 512
_is_batch_invariant = False
_segment_keys = 0
_has_float8_inputs = False
_attention = attention_choice.OWN


def set_batch_invariant(is_on: bool, max_sequence_length: int = 0) -> None:
    """Set, for this process, whether outputs on CUDA must not depend on the rest of the batch. Off by default.

    Processes whose outputs must be bit-identical need the same max_sequence_length, in tokens. Raises RuntimeError if
    batch invariance is requested, but there is no CUDA device or Triton is not installed.
    """
    global _is_batch_invariant, _segment_keys
    if is_on and not _HAS_TRITON:
        raise RuntimeError("batch-invariant kernels need a CUDA device and Triton")
    _is_batch_invariant = is_on
    if is_on:
        _segment_keys = triton.segment_keys_for(max_sequence_length)


def set_float8_inputs(is_on: bool) -> None:
    """Set, for this process, whether float8 weights with a scale per row are multiplied in float8 on CUDA, which also
    rounds the rows of the input (`kernels.scaled_linear`). Off by default; not batch-invariant.
    """
    global _has_float8_inputs
    _has_float8_inputs = is_on


def describe(device: torch.device) -> str:
    """Return the names of the implementations for tensors on `device`, for a log line."""
    if device.type != "cuda":
        return "PyTorch operations"
    name = "Triton" if _HAS_TRITON else "PyTorch"
    if _attention.backends:
        name += f", attention by {_attention}"
    return name + (", batch-invariant" if _is_batch_invariant else "")


def _takes_triton(x: Tensor) -> bool:
    return _HAS_TRITON and x.is_cuda


def choose_attention(name: str, case: AttentionCase, device: torch.device) -> None:
    """Choose, for this process, the implementations of attention on `device`.

    Args:
        name: flash-attn, flashinfer or triton; auto measures the installed ones now, and uses those that are faster
            than Triton.

    Raises:
        ValueError: The implementation is not installed or cannot compute the case, or the process is batch-invariant.
    """
    global _attention
    _attention = attention_choice.OWN
    if name in ("flash-attn", "flashinfer"):
        if _is_batch_invariant:
            raise ValueError("only Triton's attention is batch-invariant")
        _attention = attention_choice.requested(name, case, torch.cuda.get_device_capability(device))
    elif name == "auto" and not _is_batch_invariant:
        backends = attention_choice.installed(torch.cuda.get_device_capability(device)).values()

        def own(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, lens: Tensor) -> Tensor:
            return paged_attention(q, keys, values, tables, starts, lens, case.head_dim**-0.5, None, case.softcap)

        _attention = attention_choice.measured(list(backends), own, case, device, attention_choice.device_seconds)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`: x [M, K], weight [N, K], bias [N] -> [M, N]."""
    if _is_batch_invariant and _takes_triton(x):
        return triton.linear(x, weight, bias)
    return torch_linear(x, weight, bias)


def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ (weight * scale[:, None]).T + bias`: x [M, K], weight int8 [N, K], scale float32 [N] -> [M, N]."""
    if not _takes_triton(x):
        return torch_quantized_linear(x, weight, scale, bias)
    if not _is_batch_invariant and len(x) > _MAX_PACKED_ROWS:
        return torch_linear(x, triton.unpack(_as_blocks(weight, scale), x.dtype), bias)
    return triton.quantized_linear(x, weight, scale, bias, is_batch_invariant=_is_batch_invariant)


def _as_blocks(weight: Tensor, scale: Tensor) -> BlockWeight:
    """Return int8 weights [N, K] with a scale per row as blocks of one group per row."""
    num_columns = weight.shape[1]
    group = 1 << (num_columns - 1).bit_length()  # the kernels need a power of two
    return BlockWeight("int8", weight.view(torch.uint8), scale[:, None], None, group, num_columns)


def gated_linear(
    x: Tensor, weight: Tensor, activation: Activation, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Return `activate` of the linear layer with weight [2F, K], gate first -> [M, F]; int8 if it has a scale."""
    if not _takes_triton(x):
        return torch_gated_linear(x, weight, activation, bias, scale)
    if not _is_batch_invariant and len(x) > (_MAX_GATED_ROWS if scale is None else _MAX_PACKED_ROWS):
        product = linear(x, weight, bias) if scale is None else quantized_linear(x, weight, scale, bias)
        return activate(product, activation)
    return triton.gated_linear(x, weight, activation, bias, scale, is_batch_invariant=_is_batch_invariant)


def block_linear(
    x: Tensor, weight: BlockWeight, bias: Tensor | None = None, activation: Activation | None = None
) -> Tensor:
    """Return `x @ weight.T + bias`: x [M, K], weight [N, K] in blocks, bias [N] -> [M, N]; with an activation, return
    `activate` of that result.
    """
    if _takes_triton(x):
        if _has_float8_inputs and can_scale(x, weight):
            product = scaled_linear(x, weight, bias, triton.quantize_rows)
            return product if activation is None else activate(product, activation)
        if _is_batch_invariant or len(x) <= _MAX_PACKED_ROWS:
            return triton.block_linear(x, weight, bias, activation, is_batch_invariant=_is_batch_invariant)
        dense = triton.unpack(weight, x.dtype)
    else:
        dense = weight.dense().to(x.dtype)
    product = torch_linear(x, dense, bias)
    return product if activation is None else activate(product, activation)


def add_lora(y: Tensor, x: Tensor, values: Tensor, table: Tensor, slots: Tensor, max_rank: int) -> None:
    """Add (x @ a.T) @ b to the rows of y [M, N], with a [R, K] and b [R, N] of the adapter in each row's slot.

    Args:
        y: [M, N], changed in place.
        x: [M, K].
        values: One-dimensional; elements of all adapters. Each a starts at a multiple of 8 and is followed by its b.
        table: int64 [num_slots, 2]; the start of a in `values`, and R, at most max_rank; with R = 0 nothing is added.
        slots: int32 [M]; -1 means no adapter.
    """
    if _takes_triton(x):
        triton.add_lora(y, x, values, table, slots, max_rank)
    else:
        torch_add_lora(y, x, values, table, slots, max_rank)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale rows of x [..., H] to unit root mean square, computed in float32, and multiply by weight [H]."""
    if _takes_triton(x):
        return triton.rms_norm(x, weight, eps)
    return torch_rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual), all [M, H]."""
    if _takes_triton(x):
        return triton.add_rms_norm(x, residual, weight, eps)
    return torch_add_rms_norm(x, residual, weight, eps)


def apply_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of the first R elements of each head: q [M, Hq, D], k [M, Hk, D], cos and sin [M, R/2].

    The pairs are (i, i + R/2), or with is_interleaved (2i, 2i + 1). R is at most D.
    """
    if _takes_triton(q):
        return triton.apply_rotary(q, k, cos, sin, is_interleaved=is_interleaved)
    return torch_apply_rotary(q, k, cos, sin, is_interleaved=is_interleaved)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up for x [M, 2F], gate first -> [M, F].

    clamped_swiglu is gate * sigmoid(1.702 gate) * (up + 1), with gate clamped to at most 7 and `up` clamped to -7..7.
    """
    if _takes_triton(x):
        return triton.activate(x, activation)
    return torch_activate(x, activation)


def can_group(weight: Tensor) -> bool:
    """Return whether `grouped_linear` processes many such matrices in one launch, so that stacking saves time."""
    return _takes_triton(weight)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    num_repeats: int = 1,
    is_partial: bool = False,
) -> Tensor:
    """Return row i as `x[i // num_repeats] @ weight[experts[i]].T + bias[experts[i]]` -> [R, N]; with an activation,
    return `activate` of that result.

    x [R / num_repeats, K], weight [E, N, K], experts integers [R], bias [E, N]. Rows whose expert is E have undefined
    contents, or are 0 if `is_partial`.
    """
    if _takes_triton(x):
        return triton.grouped_linear(
            x,
            weight,
            experts,
            bias,
            activation=activation,
            num_repeats=num_repeats,
            is_batch_invariant=_is_batch_invariant,
            is_partial=is_partial,
        )
    product = torch_grouped_linear(x, weight, experts, bias, num_repeats=num_repeats)
    return product if activation is None else torch_activate(product, activation)


def weighted_sum(parts: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the sum of parts[:, i] * weights[:, i], or of parts [M, A, N] if there are no weights [M, A] -> [M, N]."""
    return triton.weighted_sum(parts, weights) if _takes_triton(parts) else torch_weighted_sum(parts, weights)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x[:, h] @ weight[h].T` for each head: x [M, H, K], weight [H, N, K] -> [M, H, N]."""
    if _is_batch_invariant and _takes_triton(x):
        return torch.stack([triton.linear(x[:, h], weight[h]) for h in range(len(weight))], dim=1)
    return torch_head_linear(x, weight)


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, scales: KvScales | None = None
) -> None:
    """Write row i of k and v [M, Hk, D] to slot slot_mapping[i] of the caches [num_blocks, block_size, Hk, D].

    A slot is block * block_size + offset. With `scales`, the cache is quantized and the scales are written as well.
    """
    store = triton.store_kv if _takes_triton(k) else torch_store_kv
    store(k, v, k_cache, v_cache, slot_mapping, scales=scales)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    is_interleaved: bool = False,
    scales: KvScales | None = None,
) -> Tensor:
    """Normalize the heads of q and k by q_norm and k_norm [D], if given, and rotate them; store k and v, and return q.

    The arguments are those of `rms_norm`, `apply_rotary` and `store_kv`.
    """
    run = triton.rotate_and_store if _takes_triton(q) else torch_rotate_and_store
    return run(
        q,
        k,
        v,
        cos,
        sin,
        k_cache,
        v_cache,
        slot_mapping,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        is_interleaved=is_interleaved,
        scales=scales,
    )


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
    num_sink_tokens: int = 0,
    max_queries: int | None = None,
) -> Tensor:
    """Compute attention of each query over the keys of its own sequence at or before its position -> [M, Hq, Dv].

    q [M, Hq, D] holds the sequences' queries one after another: sequence i has rows query_starts[i]:query_starts[i + 1]
    (query_starts [B + 1]), at least one, which are the last of its context_lens[i] positions. Position p is in block
    block_tables[i, p // block_size] of the caches [num_blocks, block_size, Hk, D]. With a window, a query sees only
    that many keys, including its own. With a softcap c above 0, scores s become c * tanh(s / c). sinks [Hq] are
    attention sinks: one extra logit per query head, without a value vector. With a chunk, a query sees no keys before
    the last multiple of the chunk size. In addition to its window a query sees the first num_sink_tokens keys. The
    heads of the values may be narrower, [..., Dv]. max_queries is an upper bound of the queries of a sequence; if it is
    given, sequences may have no queries, and rows of q past the last query yield zeros, or undefined values with
    flash-attn or FlashInfer.
    """
    tables = (block_tables, query_starts, context_lens)
    if window is None:
        num_sink_tokens = 0
    is_usual = scales is None and sinks is None and chunk is None and k_cache.shape == v_cache.shape
    if _attention.backends and is_usual and not num_sink_tokens:
        has_single_queries = q.shape[0] == context_lens.shape[0] and max_queries in (None, 1)
        sizes = (q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1])
        keys_per_query = block_tables.numel() * k_cache.shape[1] / q.shape[0]
        case = AttentionCase(q.dtype, k_cache.dtype, *sizes, softcap, has_single_queries, keys_per_query)
        backend = _attention.backend(case, q.shape[0])
        if backend is not None:
            return backend(q, k_cache, v_cache, *tables, scale, window, softcap, max_queries)
    is_narrow = q.shape[-1] <= MAX_HEAD_DIM and k_cache.shape == v_cache.shape
    if _takes_triton(q) and is_narrow and not num_sink_tokens and (window is None or chunk is None):
        return triton.paged_attention(
            q,
            k_cache,
            v_cache,
            *tables,
            scale,
            window,
            softcap,
            scales=scales,
            sinks=sinks,
            chunk=chunk,
            is_batch_invariant=_is_batch_invariant,
            segment_keys=_segment_keys,
            max_queries=max_queries,
        )
    if scales is not None:
        k_cache, v_cache = dequantized(k_cache, scales.keys), dequantized(v_cache, scales.values)
    return torch_paged_attention(
        q, k_cache, v_cache, *tables, scale, window, softcap, sinks=sinks, chunk=chunk, num_sink_tokens=num_sink_tokens
    )


def can_record_attention(head_dim: int) -> bool:
    """Return whether attention with heads of this size on CUDA can be recorded as part of a graph. PyTorch's operations
    cannot, since they read the lengths of sequences back.
    """
    return _HAS_TRITON and head_dim <= MAX_HEAD_DIM


def can_sample(logits: Tensor) -> bool:
    """Return whether `sample` supports these logits."""
    return _takes_triton(logits)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    sequence_indices: Tensor,
    positions: Tensor,
    *,
    has_top_k: bool = True,
    has_top_p: bool = True,
) -> Tensor:
    """Draw a token for each row of float32 logits [S, V] -> int32 [S]; see `kernels.triton.sampling`."""
    return triton.sample(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        sequence_indices,
        positions,
        has_top_k=has_top_k,
        has_top_p=has_top_p,
    )
