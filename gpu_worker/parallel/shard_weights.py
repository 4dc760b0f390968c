"""Extracts a rank's part of a decoder's weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gpu_worker.models.description import Mixture
from gpu_worker.models.weights.decoder_weights import DecoderWeights
from gpu_worker.models.weights.layer_weights import (
    FeedForwardWeights,
    LatentWeights,
    LayerWeights,
    LinearWeights,
    MixtureWeights,
)
from gpu_worker.models.weights.weight import Weight
from gpu_worker.parallel.shard import Shard


class ShardWeights:
    """The interface of `DecoderWeights`, restricted to one rank's part.

    Rows of a matrix are taken in its stored format. Columns are taken from its dequantized values, so that they equal
    those of the whole matrix: for formats with a scale per row, different scales would otherwise be computed.
    """

    def __init__(self, weights: DecoderWeights, shard: Shard) -> None:
        self._weights, self._shard = weights, shard
        d = shard.whole
        q_rows, kv_rows = _numbers(shard.heads, d.query_rows), _numbers(shard.kv_heads, d.head_dim)
        q_size, kv_size = d.num_heads * d.query_rows, d.num_kv_heads * d.head_dim
        self._is_divided = shard.tensor_size > 1
        self._is_leading = (
            shard.heads.start == 0
        )  # the outputs of all tensor ranks are summed, so only one of them adds the bias
        self._qkv_rows = torch.cat([q_rows, q_size + kv_rows, q_size + kv_size + kv_rows])
        self._row_norms = (q_rows, kv_rows) if d.qk_norm == "row" else None
        self._attended = _numbers(shard.heads, d.value_dim)

    def embedding(self) -> Weight:
        """Return the rank's part of the embeddings [part of the vocabulary, hidden_size]."""
        return self._tokens(self._weights.embedding())

    def head(self) -> Weight | None:
        """Return this rank's part of the head [part of vocabulary, hidden_size]; None if tied to the embedding."""
        head = self._weights.head()
        return None if head is None else self._tokens(head)

    def head_bias(self) -> Tensor | None:
        """Return the rank's part of the head's biases; None if there are none."""
        bias, tokens = self._weights.head_bias(), self._shard.tokens
        return None if bias is None else bias[_numbers(tokens, 1).clamp(max=len(bias) - 1)]

    def positions(self) -> Tensor | None:
        """Return the model's position vectors; None if there are none."""
        return self._weights.positions()

    def embedding_norm(self) -> Tensor | None:
        """Return the model's norm of the embeddings."""
        return self._weights.embedding_norm()

    def final_norm(self) -> Tensor:
        """The weight of the final norm, [hidden_size]."""
        return self._weights.final_norm()

    def rope_factors(self) -> Tensor | None:
        """Return the model's factors of rotary frequencies."""
        return self._weights.rope_factors()

    def layers(self) -> Iterator[LayerWeights]:
        """Yield the rank's parts of the layers that it holds."""
        mixtures = self._shard.part.mixtures
        for weights, mixture in zip(self._weights.layers(self._shard.layers), mixtures, strict=True):
            yield self._layer(weights, mixture) if self._is_divided else weights

    def _tokens(self, weight: Weight) -> Weight:
        if len(self._shard.tokens) == self._shard.whole.vocab_size:
            return weight
        return weight.take(_numbers(self._shard.tokens, 1).clamp(max=weight.shape[0] - 1))

    def _layer(self, weights: LayerWeights, mixture: Mixture | None) -> LayerWeights:
        d = self._shard.whole
        norms = (weights.q_norm, weights.k_norm)
        if self._row_norms is not None and norms[0] is not None and norms[1] is not None:
            norms = (norms[0][self._row_norms[0]], norms[1][self._row_norms[1]])
        held = None if mixture is None else mixture.held
        return replace(
            weights,
            qkv=None if weights.qkv is None else _rows(weights.qkv, self._qkv_rows),
            q_norm=norms[0],
            k_norm=norms[1],
            attention_output=None
            if weights.attention_output is None
            else self._columns(weights.attention_output, self._attended),
            sinks=None if weights.sinks is None else weights.sinks[_numbers(self._shard.heads, 1)],
            feed_forward=None
            if weights.feed_forward is None
            else self._feed_forward(weights.feed_forward, d.intermediate_size),
            latent=None if weights.latent is None else self._latent(weights.latent),
            mixture=None if weights.mixture is None else self._mixture(weights.mixture, held),
        )

    def _feed_forward(self, weights: FeedForwardWeights, size: int) -> FeedForwardWeights:
        features = _numbers(self._shard.features_of(size), 1)
        return FeedForwardWeights(
            gate_up=_rows(
                weights.gate_up, torch.cat([features, size + features]) if self._shard.whole.has_gated_ffn else features
            ),
            down=self._columns(weights.down, features),
        )

    def _latent(self, weights: LatentWeights) -> LatentWeights:
        d, latent = self._shard.whole, self._shard.whole.latent
        assert latent is not None
        return replace(
            weights,
            q_up=_rows(weights.q_up, _numbers(self._shard.heads, d.query_dim)),
            kv_up=weights.kv_up[_numbers(self._shard.heads, latent.nope_dim + latent.value_dim)],
        )

    def _mixture(self, weights: MixtureWeights, held: range | None) -> MixtureWeights:
        """Return the rank's part of a mixture; `held` are its whole experts, None if it has some features of each."""
        if held is None:
            size = weights.experts[0].down.weight.num_columns
            experts = [self._feed_forward(expert, size) for expert in weights.experts]
        else:
            experts = weights.experts[held.start : held.stop]
        shared = weights.shared
        return replace(
            weights,
            experts=experts,
            shared=None if shared is None else self._feed_forward(shared, shared.down.weight.num_columns),
        )

    def _columns(self, linear: LinearWeights, columns: Tensor) -> LinearWeights:
        values = linear.weight.dense()[:, columns].contiguous()
        return LinearWeights(Weight("f32", values, len(columns)), linear.bias if self._is_leading else None)


def _rows(linear: LinearWeights, rows: Tensor) -> LinearWeights:
    return LinearWeights(linear.weight.take(rows), None if linear.bias is None else linear.bias[rows])


def _numbers(parts: range, length: int) -> Tensor:
    """Return the indices of the elements for a range of parts with `length` elements each."""
    return torch.arange(parts.start * length, parts.stop * length)
