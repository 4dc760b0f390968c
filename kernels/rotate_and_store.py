"""Norm of query and key heads, rotary embedding, and the write into the paged cache, as separate operations."""

from __future__ import annotations

from torch import Tensor

from kernels.kv_store import store_kv
from kernels.quantized_kv import KvScales
from kernels.rms_norm import rms_norm
from kernels.rotary import apply_rotary


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
    """Normalize q [M, Hq, D] by q_norm [D] and rotate it; process k [M, Hk, D] likewise, and cache k and v."""
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = apply_rotary(q, k, cos, sin, is_interleaved=is_interleaved)
    store_kv(k, v, k_cache, v_cache, slot_mapping, scales=scales)
    return q
