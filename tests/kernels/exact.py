"""Reference versions of the operations in float64."""

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
    sinks: Tensor | None = None,
    chunk: int | None = None,
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
        if chunk:
            hidden = hidden | (
                torch.arange(length) < torch.arange(length - (end - begin), length)[:, None] // chunk * chunk
            )
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, end - begin, 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False) -> Tensor:
    out, half = x.double().clone(), cos.shape[1]
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if is_interleaved else (i, i + half)
        first, second = x[..., a].double(), x[..., b].double()
        out[..., a] = first * cos[..., i] - second * sin[..., i]
        out[..., b] = second * cos[..., i] + first * sin[..., i]
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    gate, up = x.double().chunk(2, -1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        return gate / (1 + torch.exp(-1.702 * gate)) * up
    if activation == "relu":
        return gate.clamp(min=0) * up
    if activation == "relu2":
        return gate.clamp(min=0) ** 2 * up
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if activation == "gelu":
        return gate * (1 + torch.erf(gate / 2**0.5)) / 2 * up
    return gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2 * up


def grouped_linear(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None, num_repeats: int) -> Tensor:
    rows = [
        linear(x[i // num_repeats, None], weight[e], None if bias is None else bias[e])
        for i, e in enumerate(experts.tolist())
    ]
    return torch.cat(rows)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def lora(y: Tensor, x: Tensor, pairs: list[tuple[Tensor, Tensor]], slots: Tensor) -> Tensor:
    """Return y plus the LoRA products of x; `pairs` contains a [R, K] and b [R, N] for each slot."""
    out = y.double()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            a, b = pairs[slot]
            out[i] += x[i].double() @ a.double().T @ b.double()
    return out


def lora_pairs(ranks: list[int], inner: int, outer: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(rank, inner).to(dtype), torch.randn(rank, outer).to(dtype)) for rank in ranks]


def lora_arena(pairs: list[tuple[Tensor, Tensor]], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Concatenate the pairs, with unused NaN values in between; return the arena and its table of offsets and ranks."""
    values, table, end = [], [], 0
    for a, b in pairs:
        parts = [a.flatten(), b.flatten()]
        size = a.numel() + b.numel()
        parts.append(torch.full((8 + -size % 8,), torch.nan, dtype=a.dtype))
        values += parts
        table.append([end, len(a)])
        end += sum(len(part) for part in parts)
    return torch.cat(values).to(device), torch.tensor(table, dtype=torch.int64).to(device)


def error(out: Tensor, expected: Tensor) -> float:
    """Return ‖out - expected‖ / ‖expected‖; NaN if `out` contains NaN."""
    difference = torch.linalg.vector_norm(out.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()))
