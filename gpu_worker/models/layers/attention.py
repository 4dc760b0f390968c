"""Attention over the paged cache: standard (MHA, GQA) or multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

import kernels
from gpu_worker.models.description import ALIBI_DIM, DecoderDescription
from gpu_worker.models.layers.linear import AddLora, Linear, with_lora
from gpu_worker.parallel.tensor_ranks import TensorRanks
from kernels import KvScales, recurrence
from kernels.kv_rounding import KvRounding

_SPLIT = 256


@dataclass(frozen=True, slots=True)
class PagedTokens:
    """The locations of a step's tokens in one layer's cache.

    Attributes:
        keys, values: [num_blocks, tokens_per_block, num_kv_heads, head_dim].
        slot_mapping, block_tables, query_starts, context_lens: The same as in `ForwardInputs`.
        window, chunk, max_queries: Limits of attention, as in `kernels.paged_attention`.
    """

    keys: Tensor
    values: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    window: int | None
    chunk: int | None
    max_queries: int | None
    scales: KvScales | None = None

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, angles: Angles, norms: tuple[Tensor | None, Tensor | None], eps: float
    ) -> Tensor:
        """Normalize and rotate q [M, Hq, D] and k [M, Hk, D]; store k and v, and return q."""
        return kernels.rotate_and_store(
            q,
            k,
            v,
            angles.cos,
            angles.sin,
            self.keys,
            self.values,
            self.slot_mapping,
            q_norm=norms[0],
            k_norm=norms[1],
            eps=eps,
            is_interleaved=angles.is_interleaved,
            scales=self.scales,
        )

    def attend(self, d: DecoderDescription, q: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        """Compute attention: q [M, Hq, D] -> [M, Hq, Dv]."""
        return kernels.paged_attention(
            q,
            self.keys,
            values,
            self.block_tables,
            self.query_starts,
            self.context_lens,
            d.scale,
            self.window,
            d.softcap,
            scales=self.scales,
            sinks=sinks,
            chunk=self.chunk,
            num_sink_tokens=d.num_sink_tokens,
            max_queries=self.max_queries,
        )


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines of the rotary angles of a step's tokens, each [M, dim / 2]."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q [M, Hq, D] and k [M, Hk, D]."""
        return kernels.apply_rotary(q, k, self.cos, self.sin, is_interleaved=self.is_interleaved)


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head or grouped-query attention.

    Attributes:
        slopes: Float32 [num_heads]; ALiBi's slopes, divided by the factor of the scores. None if there are no biases.
        unit: Ones [head_dim] if rotated queries and keys are scaled to unit root mean square.
        kv_rounding: How keys and values are rounded before they are stored; None if they are not.
    """

    description: DecoderDescription
    qkv: Linear
    output: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    unit: Tensor | None
    kv_rounding: KvRounding | None = None
    slopes: Tensor | None = None

    def __call__(
        self,
        x: Tensor,
        tokens: PagedTokens,
        angles: Angles | None,
        query_scale: Tensor | None,
        ranks: TensorRanks,
        add_lora: AddLora | None,
        positions: Tensor,
    ) -> Tensor:
        """Compute x [M, hidden_size] -> [M, hidden_size]; query_scale, float32 [M], multiplies the queries."""
        d, num_tokens = self.description, x.shape[0]
        sizes = [d.num_heads * d.query_rows, d.num_kv_heads * d.head_dim, d.num_kv_heads * d.head_dim]
        q, k, v = torch.split(self.qkv(x), sizes, dim=-1)
        if add_lora is not None:
            for module, part in zip(("q", "k", "v"), (q, k, v), strict=True):
                add_lora(module, x, part)
        if d.qk_norm == "row" and self.q_norm is not None and self.k_norm is not None:
            q = _row_norm(q, self.q_norm, d.norm_eps, d.qk_norm_sizes[0], ranks)
            k = _row_norm(k, self.k_norm, d.norm_eps, d.qk_norm_sizes[1], ranks)
        q = q.reshape(num_tokens, d.num_heads, d.query_rows)
        q, gate = q[..., : d.head_dim], q[..., d.head_dim :]
        k = k.reshape(num_tokens, d.num_kv_heads, d.head_dim)
        v = v.reshape(num_tokens, d.num_kv_heads, d.head_dim)
        if self.slopes is not None:
            q, k, v = _with_positions(q, k, v, self.slopes, positions)
        q = self._store(q, k, v, tokens, angles, query_scale)
        attended = tokens.attend(d, q, tokens.values, self.sinks)[..., : d.head_dim]
        if d.has_output_gate:
            attended = (attended * recurrence.sigmoid(gate)).to(attended.dtype)
        attended = attended.flatten(1)
        out = self.output(attended)
        if add_lora is not None:
            add_lora("o", attended, out)
        return out

    def _store(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: PagedTokens, angles: Angles | None, query_scale: Tensor | None
    ) -> Tensor:
        """Store keys and values, and return the queries to attend with. All inputs are split into heads."""
        d, norms = self.description, (None, None) if self.description.qk_norm == "row" else (self.q_norm, self.k_norm)
        if angles is not None and self.unit is None and self.kv_rounding is None:
            return tokens.rotate_and_store(q, k, v, angles, norms, d.norm_eps)
        if norms[0] is not None and norms[1] is not None:
            q, k = kernels.rms_norm(q, norms[0], d.norm_eps), kernels.rms_norm(k, norms[1], d.norm_eps)
        if angles is not None:
            q, k = angles.turn(q, k)
        if angles is not None and self.unit is not None:
            q, k = kernels.rms_norm(q, self.unit, d.norm_eps), kernels.rms_norm(k, self.unit, d.norm_eps)
        elif query_scale is not None:
            q = (q * query_scale[:, None, None]).to(q.dtype)
        if self.kv_rounding is not None:
            k, v = self.kv_rounding.keys(k), self.kv_rounding.values(v)
        kernels.store_kv(k, v, tokens.keys, tokens.values, tokens.slot_mapping, scales=tokens.scales)
        return q


def _with_positions(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with ALIBI_DIM more elements, which add slope * position of the key to scores.

    A bias that also depends on the position of the query would give the same weights. Positions are split, so that
    both parts are exact in bfloat16.
    """
    q, k, v = (functional.pad(heads, (0, ALIBI_DIM)) for heads in (q, k, v))
    q[..., -2], q[..., -1] = (slopes * _SPLIT).to(q.dtype), slopes.to(q.dtype)
    k[..., -2], k[..., -1] = (positions // _SPLIT).to(k.dtype)[:, None], (positions % _SPLIT).to(k.dtype)[:, None]
    return q, k, v


def _row_norm(x: Tensor, weight: Tensor, eps: float, whole_size: int, ranks: TensorRanks) -> Tensor:
    """Normalize rows, given this rank's slice x [M, K] of their columns and the weight [K]."""
    if x.shape[1] == whole_size:
        return kernels.rms_norm(x, weight, eps)
    squares = ranks.sum(x.float().square().sum(dim=-1, keepdim=True))
    return (x.float() * torch.rsqrt(squares / whole_size + eps)).to(x.dtype) * weight


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: queries are projected into the latent space, and outputs are projected out of it.

    Attributes:
        q_down, q_norm: First factor of a low-rank query projection and its norm; None if `q_up` is the full projection.
        q_up: [num_heads * query_dim, number of inputs].
        kv_down: [kv_rank + rope_dim, hidden_size].
        kv_norm: [kv_rank].
        to_latent: [num_heads, kv_rank, nope_dim].
        from_latent: [num_heads, value_dim, kv_rank].
    """

    description: DecoderDescription
    q_down: Linear | None
    q_norm: Tensor | None
    q_up: Linear
    kv_down: Linear
    kv_norm: Tensor
    to_latent: Tensor
    from_latent: Tensor
    output: Linear

    def __call__(
        self,
        x: Tensor,
        tokens: PagedTokens,
        angles: Angles | None,
        query_scale: Tensor | None,
        ranks: TensorRanks,
        add_lora: AddLora | None,
        positions: Tensor,
    ) -> Tensor:
        """Compute x [M, hidden_size] -> [M, hidden_size]."""
        d, latent, num_tokens = self.description, self.description.latent, x.shape[0]
        assert latent is not None
        inner = x
        if self.q_down is not None and self.q_norm is not None:
            inner = with_lora(self.q_down, x, "q_a", add_lora)
            inner = kernels.rms_norm(inner, self.q_norm, latent.norm_eps)
        q = with_lora(self.q_up, inner, "q", add_lora).view(num_tokens, d.num_heads, d.query_dim)
        plain, turned = torch.split(q, [latent.nope_dim, latent.rope_dim], dim=-1)
        joined = with_lora(self.kv_down, x, "kv_a", add_lora)
        compressed, key = torch.split(joined, [latent.kv_rank, latent.rope_dim], dim=-1)
        compressed = kernels.rms_norm(compressed, self.kv_norm, latent.norm_eps)
        key = key[:, None]
        if angles is not None:
            turned, key = angles.turn(turned, key)
        cached = torch.cat((compressed[:, None], key), dim=-1)
        # The values are the first `kv_rank` elements of the keys, so nothing else needs to be stored.
        kernels.store_kv(cached, cached, tokens.keys, tokens.keys, tokens.slot_mapping)
        q = torch.cat((kernels.head_linear(plain, self.to_latent), turned), dim=-1)
        attended = tokens.attend(d, q, tokens.keys[..., : latent.kv_rank], None)
        attended = kernels.head_linear(attended, self.from_latent).flatten(1)
        return with_lora(self.output, attended, "o", add_lora)
