"""The weights of a part of a decoder, cut from the model's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gpu_worker.models.weights.decoder_weights import DecoderWeights, LayerWeights, LinearWeights
from gpu_worker.models.weights.weight import Weight
from gpu_worker.parallel.shard import Shard


class ShardWeights:
    """What `DecoderWeights` gives, for one rank.

    Rows of a matrix are cut in the form in which it is kept. Columns are cut from its values, which thereby stay those
    of the whole: formats with a scale for each row would have others.
    """

    def __init__(self, weights: DecoderWeights, shard: Shard) -> None:
        self._weights, self._shard = weights, shard
        d = shard.whole
        q_rows, kv_rows = _numbers(shard.heads, d.head_dim), _numbers(shard.kv_heads, d.head_dim)
        q_size, kv_size = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
        self._is_divided = shard.part.num_heads < d.num_heads
        self._has_biases = shard.heads.start == 0  # outputs of all tensor ranks are added up, so one has the bias
        self._features = _numbers(shard.features, 1)
        self._qkv_rows = torch.cat([q_rows, q_size + kv_rows, q_size + kv_size + kv_rows])
        self._gate_up_rows = torch.cat([self._features, d.intermediate_size + self._features])
        self._attended = q_rows

    def embedding(self) -> Weight:
        """[its part of the vocabulary, hidden_size]."""
        return self._tokens(self._weights.embedding())

    def head(self) -> Weight | None:
        """[its part of the vocabulary, hidden_size]; None: the embedding is used."""
        head = self._weights.head()
        return None if head is None else self._tokens(head)

    def final_norm(self) -> Tensor:
        """[hidden_size]."""
        return self._weights.final_norm()

    def rope_factors(self) -> Tensor | None:
        """As the model's."""
        return self._weights.rope_factors()

    def layers(self) -> Iterator[LayerWeights]:
        """Its layers."""
        for weights in self._weights.layers(self._shard.layers):
            yield self._layer(weights) if self._is_divided else weights

    def _tokens(self, weight: Weight) -> Weight:
        if len(self._shard.tokens) == self._shard.whole.vocab_size:
            return weight
        return weight.take(_numbers(self._shard.tokens, 1).clamp(max=weight.shape[0] - 1))

    def _layer(self, weights: LayerWeights) -> LayerWeights:
        return LayerWeights(
            input_norm=weights.input_norm,
            qkv=_rows(weights.qkv, self._qkv_rows),
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            attention_output=self._columns(weights.attention_output, self._attended),
            post_attention_norm=weights.post_attention_norm,
            gate_up=_rows(weights.gate_up, self._gate_up_rows),
            down=self._columns(weights.down, self._features),
        )

    def _columns(self, linear: LinearWeights, columns: Tensor) -> LinearWeights:
        values = linear.weight.dense()[:, columns].contiguous()
        return LinearWeights(Weight("f32", values, len(columns)), linear.bias if self._has_biases else None)


def _rows(linear: LinearWeights, rows: Tensor) -> LinearWeights:
    return LinearWeights(linear.weight.take(rows), None if linear.bias is None else linear.bias[rows])


def _numbers(parts: range, length: int) -> Tensor:
    """The indices of the elements of parts that are so long each."""
    return torch.arange(parts.start * length, parts.stop * length)
