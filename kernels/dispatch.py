"""The one chooser: which implementation of an operation runs.

Tensors on a CPU take the PyTorch references. On CUDA an operation takes flash-attn where it is installed and can run
the case (attention only), else our Triton kernels, else the PyTorch reference. A batch-invariant process takes Triton
alone.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from kernels.attention import paged_attention as torch_paged_attention
from kernels.flash_attention import FlashAttention, load_flash_attention
from kernels.kv_store import store_kv as torch_store_kv
from kernels.linear import linear as torch_linear
from kernels.linear import quantized_linear as torch_quantized_linear
from kernels.lora import add_lora as torch_add_lora
from kernels.quantized_kv import KvScales, quantized_paged_attention, store_quantized_kv
from kernels.rms_norm import add_rms_norm as torch_add_rms_norm
from kernels.rms_norm import rms_norm as torch_rms_norm
from kernels.rotary import apply_rotary as torch_apply_rotary
from kernels.silu_mul import silu_mul as torch_silu_mul

_HAS_TRITON = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
if _HAS_TRITON:
    from kernels import triton

_is_batch_invariant = False


def set_batch_invariant(is_on: bool) -> None:
    """Whether outputs on CUDA must not depend on the rest of the batch, in this process. Off at first.

    Raises:
        RuntimeError: It is wanted, and there is no CUDA device or Triton is not installed.
    """
    global _is_batch_invariant
    if is_on and not _HAS_TRITON:
        raise RuntimeError("batch-invariant kernels need a CUDA device and Triton")
    _is_batch_invariant = is_on


def describe(device: torch.device) -> str:
    """The implementations that tensors on `device` take, for a log line."""
    if device.type != "cuda":
        return "PyTorch operations"
    names = []
    if (flash := _flash(device)) is not None:
        names.append(f"flash-attn {flash.version}")
    names.append("Triton" if _HAS_TRITON else "PyTorch")
    return ", ".join(names) + (", batch-invariant" if _is_batch_invariant else "")


def _takes_triton(x: Tensor) -> bool:
    return _HAS_TRITON and x.is_cuda


def _flash(device: torch.device) -> FlashAttention | None:
    return None if _is_batch_invariant else load_flash_attention(torch.cuda.get_device_capability(device))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`: x [M, K], weight [N, K], bias [N] -> [M, N]."""
    if _is_batch_invariant and _takes_triton(x):
        return triton.linear(x, weight, bias)
    return torch_linear(x, weight, bias)


def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ (weight * scale[:, None]).T + bias`: x [M, K], weight int8 [N, K], scale float32 [N] -> [M, N]."""
    if _takes_triton(x):
        return triton.quantized_linear(x, weight, scale, bias, is_batch_invariant=_is_batch_invariant)
    return torch_quantized_linear(x, weight, scale, bias)


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: Tensor, adapters: Tensor) -> None:
    """Add scaling[i] * (x @ a[i].T) @ b[i].T to the rows of y [M, N] whose entry of adapters is i; -1: none.

    adapters int32 [M], x [M, K], a [num_adapters, R, K], b [num_adapters, N, R], scaling float32 [num_adapters].
    """
    if _takes_triton(x):
        triton.add_lora(y, x, a, b, scaling, adapters)
    else:
        torch_add_lora(y, x, a, b, scaling, adapters)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of x [..., H] to unit root mean square, then by weight [H]; the mean is taken in float32."""
    if _takes_triton(x):
        return triton.rms_norm(x, weight, eps)
    return torch_rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual), all [M, H]."""
    if _takes_triton(x):
        return triton.add_rms_norm(x, residual, weight, eps)
    return torch_add_rms_norm(x, residual, weight, eps)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the pairs (i, i + D/2) of each head: q [M, Hq, D], k [M, Hk, D], cos and sin [M, D/2]."""
    if _takes_triton(q):
        return triton.apply_rotary(q, k, cos, sin)
    return torch_apply_rotary(q, k, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for gate_up [M, 2F], gate first -> [M, F]."""
    if _takes_triton(gate_up):
        return triton.silu_mul(gate_up)
    return torch_silu_mul(gate_up)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    scales: KvScales | None = None,
) -> None:
    """Write row i of k and v [M, Hk, D] to slot slot_mapping[i] of the caches [num_blocks, block_size, Hk, D].

    A slot is block * block_size + offset. With `scales` the cache is quantized, and they are written too.
    """
    if _takes_triton(k):
        triton.store_kv(k, v, k_cache, v_cache, slot_mapping, scales=scales)
    elif scales is None:
        torch_store_kv(k, v, k_cache, v_cache, slot_mapping)
    else:
        store_quantized_kv(k, v, k_cache, v_cache, slot_mapping, scales)


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
) -> Tensor:
    """Attend from each query to the keys of its own sequence at or before its position -> [M, Hq, D].

    q [M, Hq, D] holds the sequences' queries one after another: sequence i has rows query_starts[i]:query_starts[i + 1]
    (query_starts [B + 1]), at least one, the last of its context_lens[i] positions. Its position p lies in block
    block_tables[i, p // block_size] of the caches [num_blocks, block_size, Hk, D]. With a window, a query sees only
    that many keys, itself included. A softcap c bends scores s to c * tanh(s / c); 0: it does not.
    """
    tables = (block_tables, query_starts, context_lens)
    if q.is_cuda:
        flash = _flash(q.device)
        if flash is not None and scales is None and flash.can_run(q, k_cache):
            return flash(q, k_cache, v_cache, *tables, scale, window, softcap)
    if _takes_triton(q):
        return triton.paged_attention(
            q, k_cache, v_cache, *tables, scale, window, softcap, scales=scales, is_batch_invariant=_is_batch_invariant
        )
    if scales is None:
        return torch_paged_attention(q, k_cache, v_cache, *tables, scale, window, softcap)
    return quantized_paged_attention(q, k_cache, v_cache, *tables, scale, window, scales, softcap)


def can_sample(logits: Tensor) -> bool:
    """Whether `sample` takes these logits."""
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
) -> Tensor:
    """Draw a token for each row of float32 logits [S, V] -> int32 [S]; see `kernels.triton.sampling`."""
    return triton.sample(logits, temperature, top_k, top_p, min_p, seeds, sequence_indices, positions)
