"""The operations in float64, written as plainly as they can be."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.paged import PagedBatch


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    for i, length in enumerate(batch.context_lens.tolist()):
        begin, end = batch.query_starts[i : i + 2].tolist()
        blocks = batch.block_tables[i, : -(-length // block_size)].long()
        keys = k_cache[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
        values = v_cache[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(length - (end - begin), length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.double().chunk(2, -1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: Tensor, adapters: Tensor) -> Tensor:
    out = y.double()
    for i, adapter in enumerate(adapters.tolist()):
        if adapter >= 0:
            low = x[i].double() @ a[adapter].double().T
            out[i] += float(scaling[adapter]) * (low @ b[adapter].double().T)
    return out


def error(out: Tensor, expected: Tensor) -> float:
    """‖out - expected‖ / ‖expected‖; NaN where `out` has one."""
    difference = torch.linalg.vector_norm(out.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()))
