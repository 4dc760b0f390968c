"""The decoder in PyTorch: the Llama family, as `DecoderDescription` says, over the operations of `kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

import kernels
from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.inputs import AdapterTokens, VirtualTokens
from gpu_worker.lora.stacked import StackedAdapters, TorchAdapter, place_adapter
from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.layers.linear import Linear, int8_rows
from gpu_worker.models.layers.rotary import rotary_table
from gpu_worker.models.weights.progress import with_progress
from gpu_worker.parallel.shard import Shard, whole_shard
from gpu_worker.parallel.tensor_ranks import ONE_RANK, TensorRanks

if TYPE_CHECKING:
    from gpu_worker.models.weights.decoder_weights import DecoderWeights, LayerWeights, LinearWeights
    from gpu_worker.parallel.shard_weights import ShardWeights


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One flattened forward pass over M tokens of B sequences; all int32, on the model's device.

    Attributes:
        token_ids, positions, slot_mapping: [M], sequence after sequence.
        query_starts: [B + 1]; sequence i has tokens query_starts[i]:query_starts[i + 1].
        context_lens: [B]; positions known to each sequence, these tokens included.
        block_tables: [B, most blocks of one sequence].
        sampled: [S]; indices into the M tokens whose logits are wanted.
        adapters: LoRA adapters of the tokens; None: no token has one.
        virtual: What stands where token ids do; None: every token is one.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    sampled: Tensor
    adapters: AdapterTokens[Any] | None = None
    virtual: VirtualTokens | None = None


class Probe:
    """What is to be kept of a forward pass beside its logits.

    Attributes:
        layers: Layers whose output is kept; 0 is the embeddings, the number of layers the normed output.
        states: By layer, [M, hidden_size]; filled by the pass.
        last: What `Decoder.logits` takes, [M, hidden_size]; filled by the pass.
    """

    def __init__(self, layers: frozenset[int]) -> None:
        self.layers = layers
        self.states: dict[int, Tensor] = {}
        self.last: Tensor | None = None

    def keep(self, layer: int, hidden: Tensor) -> None:
        """Keeps a layer's output, if it is wanted."""
        if layer in self.layers:
            self.states[layer] = hidden.clone()


class Decoder(Protocol):
    """A model that computes over the paged cache."""

    def use_cache(self, kv: KvCache) -> None:
        """Computes over this cache from now on."""

    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Writes keys and values of all tokens, and returns float32 logits [S, vocab_size] of the sampled ones."""

    def logits(self, last: Tensor) -> Tensor:
        """Float32 logits [N, vocab_size] of some rows of what a probe kept as `last`."""

    def place_adapter(self, adapter: Adapter) -> object:
        """Makes of a LoRA adapter what `ForwardInputs.adapters` takes."""


@runtime_checkable
class GreedyDecoder(Protocol):
    """A decoder that can choose the likeliest tokens itself, for less than `Decoder.forward` and a choice take."""

    def choose(self, inputs: ForwardInputs) -> tuple[Tensor, Tensor] | None:
        """Run the step as `Decoder.forward` does, and return the likeliest tokens, int32 [S], with their logits [S].

        The first counts where several are equal; the logit is NaN where one of the row is. None: use `forward`.
        """


class PartDecoder(Decoder, Protocol):
    """A decoder whose layers may be some of a model's; the first has the embeddings and the head as well."""

    def embed(self, inputs: ForwardInputs) -> Tensor:
        """What the first layer takes, [M, hidden_size]."""

    def run_layers(self, hidden: Tensor, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Writes keys and values, and turns a layer's input [M, hidden_size] into the last one's output."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_output: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


class TorchDecoder:
    """Computes in `dtype` on `device`; matrices hold the values of their stored format, int8 as integers."""

    def __init__(
        self,
        description: DecoderDescription,
        weights: DecoderWeights | ShardWeights,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
        tensor_ranks: TensorRanks = ONE_RANK,
    ) -> None:
        """Loads the weights, showing progress.

        Args:
            description: Of the model.
            weights: Of the part that is here.
            dtype: What it computes in.
            device: Where it computes.
            shard: The part; None: all of it.
            tensor_ranks: Those that compute the other parts of these layers.
        """
        self._shard = shard or whole_shard(description)
        self._ranks = tensor_ranks
        self._description = d = self._shard.part
        self._dtype, self._device = dtype, device
        if self._shard.is_first:
            self._embedding = self._place(weights.embedding().dense())
            head = weights.head()
            self._head = self._embedding if head is None else self._place(head.dense())
        self._layers = [self._layer(layer) for layer in with_progress(weights.layers(), d.num_layers, "loading layers")]
        self._final_norm = self._place(weights.final_norm())
        cos, sin = rotary_table(d.rope, d.head_dim, d.max_sequence_length, weights.rope_factors())
        self._cos, self._sin = cos.to(device), sin.to(device)
        self._kv: KvCache | None = None
        self._adapters = StackedAdapters(device)

    def place_adapter(self, adapter: Adapter) -> TorchAdapter:
        """Brings a LoRA adapter to the device."""
        return place_adapter(adapter, self._dtype, self._device)

    def use_cache(self, kv: KvCache) -> None:
        """Computes over this cache from now on."""
        self._kv = kv

    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Writes keys and values of all tokens, and returns float32 logits [S, vocab_size] of the sampled ones."""
        hidden = self.run_layers(self.embed(inputs), inputs, probe)
        if probe is not None:
            probe.last = hidden
        return self.logits(hidden[inputs.sampled.long()])

    def embed(self, inputs: ForwardInputs) -> Tensor:
        """The tokens' embeddings, [M, hidden_size]."""
        ids, tokens = inputs.token_ids.long(), self._shard.tokens
        if len(tokens) == self._shard.whole.vocab_size:
            hidden = functional.embedding(ids, self._embedding)
        else:
            is_elsewhere = (ids < tokens.start) | (ids >= tokens.stop)
            found = functional.embedding((ids - tokens.start).masked_fill(is_elsewhere, 0), self._embedding)
            hidden = self._ranks.sum(found.masked_fill(is_elsewhere[:, None], 0))
        if inputs.virtual is not None:
            hidden[inputs.virtual.places.to(self._device)] = self._place(inputs.virtual.values)
        return hidden

    def run_layers(self, hidden: Tensor, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Writes keys and values, and turns the first layer's input [M, hidden_size] into the last one's output."""
        kv, eps, first = self._kv, self._description.rms_norm_eps, self._shard.layers.start
        assert kv is not None
        positions = inputs.positions.long()
        cos, sin = self._cos[positions], self._sin[positions]
        residual = hidden
        adapters = None
        if inputs.adapters is not None:
            adapters = self._adapters
            adapters.use(inputs.adapters)
        if probe is not None:
            probe.keep(first, residual)
        x = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            x = self._ranks.sum(self._attend(i, layer, x, cos, sin, inputs, kv, adapters))
            x, residual = kernels.add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = self._ranks.sum(self._feed_forward(i, layer, x, adapters))
            if i + 1 < len(self._layers):
                x, residual = kernels.add_rms_norm(x, residual, self._layers[i + 1].input_norm, eps)
            else:
                residual = x + residual
            if probe is not None:
                probe.keep(first + i + 1, residual)
        if probe is not None and self._shard.is_last and first + len(self._layers) in probe.layers:
            probe.keep(first + len(self._layers), kernels.rms_norm(residual, self._final_norm, eps))
        return residual

    def logits(self, last: Tensor) -> Tensor:
        """Float32 logits [N, vocab_size] of outputs of the last layer."""
        normed = kernels.rms_norm(last, self._final_norm, self._description.rms_norm_eps)
        logits = kernels.linear(normed, self._head).float()
        return self._ranks.join(logits)[:, : self._shard.whole.vocab_size]

    def _feed_forward(self, i: int, layer: _Layer, x: Tensor, adapters: StackedAdapters | None) -> Tensor:
        gate_up = layer.gate_up(x)
        if adapters is not None:
            for module, part in zip(("gate", "up"), gate_up.chunk(2, dim=-1), strict=True):
                adapters.add(i, module, x, part)
        gated = kernels.silu_mul(gate_up)
        out = layer.down(gated)
        if adapters is not None:
            adapters.add(i, "down", gated, out)
        return out

    def _attend(
        self,
        i: int,
        layer: _Layer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        inputs: ForwardInputs,
        kv: KvCache,
        adapters: StackedAdapters | None,
    ) -> Tensor:
        d = self._description
        num_tokens = x.shape[0]
        sizes = [heads * d.head_dim for heads in (d.num_heads, d.num_kv_heads, d.num_kv_heads)]
        q, k, v = torch.split(layer.qkv(x), sizes, dim=-1)
        if adapters is not None:
            for module, part in zip(("q", "k", "v"), (q, k, v), strict=True):
                adapters.add(i, module, x, part)
        q = q.reshape(num_tokens, d.num_heads, d.head_dim)
        k = k.reshape(num_tokens, d.num_kv_heads, d.head_dim)
        v = v.reshape(num_tokens, d.num_kv_heads, d.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, d.rms_norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, d.rms_norm_eps)
        q, k = kernels.apply_rotary(q, k, cos, sin)
        kernels.store_kv(k, v, kv.keys[i], kv.values[i], inputs.slot_mapping)
        out = kernels.paged_attention(
            q,
            kv.keys[i],
            kv.values[i],
            inputs.block_tables,
            inputs.query_starts,
            inputs.context_lens,
            d.head_dim**-0.5,
            d.windows[i],
        )
        attended = out.flatten(1)
        x = layer.attention_output(attended)
        if adapters is not None:
            adapters.add(i, "o", attended, x)
        return x

    def _layer(self, weights: LayerWeights) -> _Layer:
        return _Layer(
            input_norm=self._place(weights.input_norm),
            qkv=self._linear(weights.qkv),
            q_norm=None if weights.q_norm is None else self._place(weights.q_norm),
            k_norm=None if weights.k_norm is None else self._place(weights.k_norm),
            attention_output=self._linear(weights.attention_output),
            post_attention_norm=self._place(weights.post_attention_norm),
            gate_up=self._linear(weights.gate_up),
            down=self._linear(weights.down),
        )

    def _linear(self, weights: LinearWeights) -> Linear:
        bias = None if weights.bias is None else self._place(weights.bias)
        if weights.weight.format == "int8":
            units, scale = int8_rows(weights.weight.source)
            return Linear(units.to(self._device), bias, scale.to(self._device))
        return Linear(self._place(weights.weight.dense()), bias)

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self._device, dtype=self._dtype)
