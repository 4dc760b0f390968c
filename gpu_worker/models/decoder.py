"""The PyTorch decoder for any `DecoderDescription`, using the operations of `kernels`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

import kernels
from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.arena import AdapterArena, PlacedAdapter, adapter_use
from gpu_worker.lora.inputs import AdapterTokens, AdapterUse, VirtualTokens
from gpu_worker.models.description import ChannelMamba, DecoderDescription, DeltaNet, Rotary, ShortConv
from gpu_worker.models.layers.attention import Angles, Attention, LatentAttention, PagedTokens
from gpu_worker.models.layers.feed_forward import Experts, FeedForward, MixtureLayer
from gpu_worker.models.layers.linear import AddExpertLora, AddLora, Linear, int8_rows
from gpu_worker.models.layers.recurrent import (
    ChannelMambaLayer,
    DeltaNetLayer,
    MambaLayer,
    Pieces,
    ShortConvLayer,
    pieces_of,
)
from gpu_worker.models.layers.rotary import query_scales, rotary_table
from gpu_worker.models.weights.progress import with_progress
from gpu_worker.parallel.shard import Shard, whole_shard
from gpu_worker.parallel.tensor_ranks import ONE_RANK, TensorRanks

if TYPE_CHECKING:
    from gpu_worker.models.weights.decoder_weights import DecoderWeights
    from gpu_worker.models.weights.layer_weights import (
        FeedForwardWeights,
        LayerWeights,
        LinearWeights,
        MixtureWeights,
        RecurrentWeights,
    )
    from gpu_worker.parallel.shard_weights import ShardWeights
    from kernels.cpu import Draws


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The input of one flattened forward pass over M tokens of B sequences; all tensors int32, on the model's device.

    Attributes:
        token_ids, positions, slot_mapping: [M], sequence after sequence.
        query_starts: [B + 1]; sequence i has tokens query_starts[i]:query_starts[i + 1].
        context_lens: [B]; number of positions of each sequence so far, including the tokens of this pass.
        block_tables: [B, max blocks per sequence].
        sampled: [S]; indices of the tokens whose logits are needed.
        adapters: LoRA adapters of the tokens; None if no token has one, or if adapter_slots is set.
        virtual: Embeddings that replace token ids; None if there are none.
        adapter_slots: [M]; slots of the tokens' adapters on the device, -1 for none.
        adapter_use: The matrices that the adapters in `adapter_slots` may change.
        max_queries: Upper bound of the number of tokens per sequence. If set, sequences may have no tokens, and tokens
            past the last sequence are padding; if None, each sequence has at least one token, and there is no padding.
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
    adapter_slots: Tensor | None = None
    adapter_use: AdapterUse = AdapterUse.NOTHING
    max_queries: int | None = None


class Probe:
    """Specifies intermediate results of a forward pass to keep, and holds them.

    Attributes:
        layers: Hidden states to keep: 0 is the embeddings, i the output of layer i; the last layer's output is normed.
        states: By layer, [M, hidden_size]; filled by the pass.
        last: Input of `Decoder.logits`, [M, hidden_size]; filled by the pass.
    """

    def __init__(self, layers: frozenset[int]) -> None:
        self.layers = layers
        self.states: dict[int, Tensor] = {}
        self.last: Tensor | None = None

    def keep(self, layer: int, hidden: Tensor) -> None:
        if layer in self.layers:
            self.states[layer] = hidden.clone()


class Decoder(Protocol):
    """A model that runs over the paged KV cache."""

    def use_cache(self, kv: KvCache) -> None:
        """Use this cache from now on."""

    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Write the keys and values of all tokens; return float32 logits [S, vocab_size] of the sampled tokens."""

    def logits(self, last: Tensor) -> Tensor:
        """Return float32 logits [N, vocab_size] for some rows of the hidden states that a probe kept as `last`."""

    def place_adapter(self, adapter: Adapter) -> object:
        """Convert a LoRA adapter to the form that `ForwardInputs.adapters` requires."""


@runtime_checkable
class ChoosingDecoder(Protocol):
    """A decoder that can compute the next tokens at a lower cost than `Decoder.forward` followed by sampling."""

    def choose(self, inputs: ForwardInputs, draws: Draws | None = None) -> tuple[Tensor, Tensor] | None:
        """Run the step as `Decoder.forward` does; return the next tokens, int32 [S], and the highest logits [S].

        Without draws all rows are greedy. Of equal logits, the first token wins; the highest logit is NaN if any logit
        of the row is. Return None if the step needs `forward`.
        """


class PartDecoder(Decoder, Protocol):
    """A decoder of all or some layers of a model; the part with the first layer has the embeddings and the head."""

    def embed(self, inputs: ForwardInputs) -> Tensor:
        """Return the first layer's input, [M, hidden_size]."""

    def run_layers(self, hidden: Tensor, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Write keys and values, and compute the last layer's output from the first layer's input [M, hidden_size]."""


_RecurrentLayer = DeltaNetLayer | MambaLayer | ChannelMambaLayer | ShortConvLayer


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor | None
    attention: Attention | LatentAttention | None
    recurrent: _RecurrentLayer | None
    attention_output_norm: Tensor | None
    ffn_norm: Tensor | None
    feed_forward: FeedForward | MixtureLayer | None
    ffn_output_norm: Tensor | None


class TorchDecoder:
    """A decoder that computes in `dtype` on `device`. Matrices have the values of their stored format; outside experts,
    int8 matrices and, on a GPU, block formats stay quantized.
    """

    def __init__(
        self,
        description: DecoderDescription,
        weights: DecoderWeights | ShardWeights,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
        tensor_ranks: TensorRanks = ONE_RANK,
    ) -> None:
        """Load the weights, reporting the progress.

        Args:
            shard: The part of the model to hold; None means all of it.
            tensor_ranks: The ranks that compute the other parts of these layers.
        """
        self._shard = shard or whole_shard(description)
        self._ranks = tensor_ranks
        self._description = d = self._shard.part
        self._dtype, self._device = dtype, device
        if self._shard.is_first:
            self._embedding = self._place(weights.embedding().dense())
            head = weights.head()
            self._head = self._embedding if head is None else self._place(head.dense())
            self._head_bias = self._placed(weights.head_bias())
            self._positions = self._placed(weights.positions())
            self._embedding_norm = self._placed(weights.embedding_norm())
        self._layers = [
            self._layer(i, layer)
            for i, layer in enumerate(with_progress(weights.layers(), d.num_layers, "loading layers"))
        ]
        self._final_norm = self._place(weights.final_norm())
        # Layers with the same rotary settings share a table.
        self._tables: list[tuple[Rotary, Tensor, Tensor]] = []
        self._table_of = [None if rotary is None else self._table(rotary, weights) for rotary in d.rotary]
        scales = query_scales(d)
        self._query_scales = None if scales is None else scales.to(device)
        self._embedding_scale = torch.tensor(d.embedding_scale, dtype=dtype, device=device)
        self._kv: KvCache | None = None
        self._adapters = AdapterArena(d, 0, 1, dtype, device)

    def reserve_adapters(self, num_bytes: int, max_rank: int) -> None:
        """Allocate the memory for LoRA adapters; call this before placing any."""
        self._adapters = AdapterArena(self._description, num_bytes, max_rank, self._dtype, self._device)

    def packed_adapter(self, adapter: Adapter) -> Adapter:
        """Return an adapter that is ready to be copied to the device. Thread-safe."""
        return replace(adapter, packed=self._adapters.pack(adapter))

    def place_adapter(self, adapter: Adapter) -> PlacedAdapter:
        """Copy a LoRA adapter to the device."""
        return self._adapters.place(adapter)

    def use_cache(self, kv: KvCache) -> None:
        self._kv = kv

    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Write the keys and values of all tokens; return float32 logits [S, vocab_size] of the sampled tokens."""
        hidden = self.run_layers(self.embed(inputs), inputs, probe)
        if probe is not None:
            probe.last = hidden
        return self.logits(hidden[inputs.sampled.long()])

    def embed(self, inputs: ForwardInputs) -> Tensor:
        """Return the embeddings of the tokens, [M, hidden_size]."""
        ids, tokens = inputs.token_ids.long(), self._shard.tokens
        if len(tokens) == self._shard.whole.vocab_size:
            hidden = functional.embedding(ids, self._embedding)
        else:
            is_elsewhere = (ids < tokens.start) | (ids >= tokens.stop)
            found = functional.embedding((ids - tokens.start).masked_fill(is_elsewhere, 0), self._embedding)
            hidden = self._ranks.sum(found.masked_fill(is_elsewhere[:, None], 0))
        if self._description.embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        if inputs.virtual is not None:
            values = self._place(inputs.virtual.values)
            if self._description.scales_virtual:
                values = values * self._embedding_scale
            hidden[inputs.virtual.places.to(self._device)] = values
        if self._positions is not None:
            hidden = hidden + functional.embedding(inputs.positions.long(), self._positions)
        return self._norm(hidden, self._embedding_norm)

    def run_layers(self, hidden: Tensor, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Write keys and values, and compute the last layer's output from the first layer's input [M, hidden_size]."""
        first = self._shard.layers.start
        positions = inputs.positions.long()
        angles = [Angles(cos[positions], sin[positions], rotary.is_interleaved) for rotary, cos, sin in self._tables]
        query_scale = None if self._query_scales is None else self._query_scales[positions]
        residual = hidden
        slots, expert_slots = self._slots(inputs)
        if probe is not None:
            probe.keep(first, residual)
        x = self._norm(residual, self._layers[0].input_norm)
        pieces = self._pieces(inputs)
        for i, layer in enumerate(self._layers):
            add_lora = None if slots is None else partial(self._adapters.add, slots, i)
            add_expert_lora = None if expert_slots is None else partial(self._adapters.add_to_experts, expert_slots, i)
            mixed = None
            if layer.attention is not None:
                table = self._table_of[i]
                turned = None if table is None else angles[table]
                tokens = self._tokens(i, inputs)
                mixed = layer.attention(x, tokens, turned, query_scale, self._ranks, add_lora, positions)
                mixed = self._part(mixed, layer.attention_output_norm)
                if self._description.attention_output_scale != 1.0:
                    mixed = mixed * self._description.attention_output_scale
            if layer.recurrent is not None:
                # Recurrent layers are not sharded: each rank computes the whole output.
                made = self._scaled(layer.recurrent(x, self._states(i), pieces, add_lora))
                mixed = made if mixed is None else made + mixed
            added, residual = self._fed_forward(layer, x, mixed, residual, add_lora, add_expert_lora)
            if i + 1 < len(self._layers):
                x, residual = self._add_and_norm(added, residual, self._layers[i + 1].input_norm)
            else:
                residual = added + residual
            if probe is not None:
                probe.keep(first + i + 1, residual)
        if probe is not None and self._shard.is_last and first + len(self._layers) in probe.layers:
            probe.keep(first + len(self._layers), self._norm(residual, self._final_norm))
        return residual

    def logits(self, last: Tensor) -> Tensor:
        """Return float32 logits [N, vocab_size] for outputs of the last layer."""
        d = self._shard.whole
        logits = kernels.linear(self._norm(last, self._final_norm), self._head, self._head_bias).float()
        logits = self._ranks.join(logits)[:, : d.vocab_size].contiguous()
        if d.logits_scale != 1.0:
            logits = logits * d.logits_scale
        if d.logits_softcap:
            # Computed in float64 on a CPU, for the reason given in `kernels.activate`.
            wide = logits.double() if logits.device.type == "cpu" else logits
            logits = (d.logits_softcap * torch.tanh(wide / d.logits_softcap)).float()
        return logits

    def _slots(self, inputs: ForwardInputs) -> tuple[Tensor | None, Tensor | None]:
        """Return the slots of the tokens' adapters, once for linear layers and once for experts; None if no adapter
        changes them.
        """
        slots, use = inputs.adapter_slots, inputs.adapter_use
        if inputs.adapters is not None:
            slots, use = self._adapters.slots(inputs.adapters), adapter_use(inputs.adapters)
        return slots, slots if use is AdapterUse.EXPERTS else None

    def _tokens(self, i: int, inputs: ForwardInputs) -> PagedTokens:
        kv, d = self._kv, self._description
        assert kv is not None
        place = d.cache_places[i]
        return PagedTokens(
            kv.keys[place],
            kv.values[place],
            inputs.slot_mapping,
            inputs.block_tables,
            inputs.query_starts,
            inputs.context_lens,
            d.windows[i],
            d.chunks[i],
            inputs.max_queries,
            kv.scales(place),
        )

    def _states(self, i: int) -> Tensor:
        assert self._kv is not None
        return self._kv.states[self._description.cache_places[i]]

    def _pieces(self, inputs: ForwardInputs) -> list[Pieces]:
        """Split the tokens into pieces for recurrent layers; return no pieces if there are no such layers."""
        if not any(self._description.recurrent):
            return []
        assert self._kv is not None
        return pieces_of(
            inputs.query_starts, inputs.context_lens, inputs.block_tables, self._kv.tokens_per_block, self._device
        )

    def _fed_forward(
        self,
        layer: _Layer,
        x: Tensor,
        mixed: Tensor | None,
        residual: Tensor,
        add_lora: AddLora | None,
        add_expert_lora: AddExpertLora | None,
    ) -> tuple[Tensor, Tensor]:
        """Run a layer's feed-forward network, if it has one; return the output that is still to be added to the
        residual stream, and the residual stream.

        Args:
            x: The layer's normalized input.
            mixed: The output of the layer's attention or recurrent part; None if it has neither.
            residual: The residual stream before the layer.
        """
        if layer.feed_forward is None:
            assert mixed is not None
            return mixed, residual
        if mixed is not None and not self._description.is_parallel:
            x, residual = self._add_and_norm(mixed, residual, layer.ffn_norm)
            mixed = None
        elif layer.ffn_norm is not None:
            x = self._norm(residual, layer.ffn_norm)
        ffn = layer.feed_forward
        out = ffn(x, add_lora, add_expert_lora) if isinstance(ffn, MixtureLayer) else ffn(x, add_lora)
        out = self._part(out, layer.ffn_output_norm)
        return (out if mixed is None else mixed + out), residual

    def _part(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """Return the contribution of a sublayer to the residual stream, given this rank's partial result."""
        x = self._ranks.sum(x)
        return self._scaled(x if norm is None else self._norm(x, norm))

    def _scaled(self, x: Tensor) -> Tensor:
        scale = self._description.residual_scale
        return x if scale == 1.0 else x * scale

    def _add_and_norm(self, x: Tensor, residual: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normalized sum and the sum itself."""
        if norm is not None and self._description.norm == "rms":
            return kernels.add_rms_norm(x, residual, norm, self._description.norm_eps)
        total = x + residual
        return self._norm(total, norm), total

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        d = self._description
        if d.has_norm_bias:
            return kernels.layer_norm(x, weight[0], d.norm_eps) + weight[1]
        return (kernels.rms_norm if d.norm == "rms" else kernels.layer_norm)(x, weight, d.norm_eps)

    def _table(self, rotary: Rotary, weights: DecoderWeights | ShardWeights) -> int:
        for i, (known, _, _) in enumerate(self._tables):
            if known == rotary:
                return i
        cos, sin = rotary_table(
            rotary.settings, rotary.dim, self._description.max_sequence_length, weights.rope_factors()
        )
        self._tables.append((rotary, cos.to(self._device), sin.to(self._device)))
        return len(self._tables) - 1

    def _layer(self, i: int, weights: LayerWeights) -> _Layer:
        d, mixture = self._description, self._description.mixtures[i]
        feed_forward: FeedForward | MixtureLayer | None = None
        if weights.mixture is not None and mixture is not None:
            feed_forward = self._mixture(weights.mixture, i)
        elif weights.feed_forward is not None:
            feed_forward = replace(
                self._plain(weights.feed_forward), gate_scale=d.ffn_gate_scale, output_scale=d.ffn_output_scale
            )
        attention: Attention | LatentAttention | None = None
        if d.has_attention(i):
            attention = self._latent_attention(weights) if d.latent else self._attention(weights)
        return _Layer(
            input_norm=self._placed(weights.input_norm),
            attention=attention,
            recurrent=None if weights.recurrent is None else self._recurrent(weights.recurrent, i),
            attention_output_norm=self._placed(weights.attention_output_norm),
            ffn_norm=self._placed(weights.ffn_norm),
            feed_forward=feed_forward,
            ffn_output_norm=self._placed(weights.ffn_output_norm),
        )

    def _attention(self, weights: LayerWeights) -> Attention:
        d = self._description
        assert weights.qkv is not None
        assert weights.attention_output is not None
        return Attention(
            description=d,
            qkv=self._linear(weights.qkv),
            output=self._linear(weights.attention_output),
            q_norm=self._placed(weights.q_norm),
            k_norm=self._placed(weights.k_norm),
            sinks=None if weights.sinks is None else weights.sinks.float().to(self._device),
            unit=self._place(torch.ones(d.head_dim)) if d.has_unit_qk_norm else None,
            kv_rounding=weights.kv_rounding,
            slopes=self._slopes(),
        )

    def _slopes(self) -> Tensor | None:
        """Return ALiBi's slopes of this rank's heads, divided by the factor of the scores."""
        d, heads = self._description, self._shard.heads
        if not d.alibi:
            return None
        return (torch.tensor(d.alibi[heads.start : heads.stop]) / d.scale).to(self._device)

    def _latent_attention(self, weights: LayerWeights) -> LatentAttention:
        d, latent, w = self._description, self._description.latent, weights.latent
        assert latent is not None
        assert w is not None
        assert weights.attention_output is not None
        kv_up = w.kv_up.view(d.num_heads, latent.nope_dim + latent.value_dim, latent.kv_rank)
        to_latent, from_latent = torch.split(kv_up, [latent.nope_dim, latent.value_dim], dim=1)
        return LatentAttention(
            description=d,
            q_down=None if w.q_down is None else self._linear(w.q_down),
            q_norm=self._placed(w.q_norm),
            q_up=self._linear(w.q_up),
            kv_down=self._linear(w.kv_down),
            kv_norm=self._place(w.kv_norm),
            to_latent=self._place(to_latent.transpose(1, 2).contiguous()),
            from_latent=self._place(from_latent.contiguous()),
            output=self._linear(weights.attention_output),
        )

    def _recurrent(self, w: RecurrentWeights, i: int) -> _RecurrentLayer:
        d, kind = self._description, self._description.recurrent[i]
        assert kind is not None
        inputs, output = [self._linear(linear) for linear in w.inputs], self._linear(w.output)
        conv = w.conv.float().to(self._device)
        bias = None if w.conv_bias is None else w.conv_bias.float().to(self._device)
        if isinstance(kind, ShortConv):
            return ShortConvLayer(kind, inputs[0], conv, bias, output)
        if isinstance(kind, ChannelMamba):
            assert w.decay_logs is not None
            assert w.skip is not None
            rates = -torch.exp(w.decay_logs.float()).to(self._device)
            return ChannelMambaLayer(
                kind, inputs[0], inputs[1], inputs[2], conv, bias, rates, w.skip.float().to(self._device), output
            )
        assert w.step_bias is not None
        assert w.decay_logs is not None
        # Keep these parameters in float32: they are small, and they are exponentiated.
        step_bias, decay_rates = (
            tensor.float().to(self._device) for tensor in (w.step_bias, -torch.exp(w.decay_logs.float()))
        )
        norm = None if w.norm is None else w.norm.float().to(self._device)
        if isinstance(kind, DeltaNet):
            assert norm is not None
            return DeltaNetLayer(kind, inputs[0], inputs[1], conv, step_bias, decay_rates, norm, d.norm_eps, output)
        assert w.skip is not None
        skip = w.skip.float().to(self._device)
        return MambaLayer(kind, inputs[0], conv, bias, step_bias, decay_rates, skip, norm, d.norm_eps, output)

    def _mixture(self, weights: MixtureWeights, i: int) -> MixtureLayer:
        description = self._description.mixtures[i]
        assert description is not None
        router = weights.router
        return MixtureLayer(
            description=description,
            router=Linear(
                router.weight.dense().to(self._device), None if router.bias is None else router.bias.to(self._device)
            ),
            correction=None if weights.correction is None else weights.correction.to(self._device),
            experts=Experts([self._plain(expert, keeps_blocks=False) for expert in weights.experts], description.held),
            shared=None if weights.shared is None else self._plain(weights.shared),
            shared_gate=None if weights.shared_gate is None else self._linear(weights.shared_gate),
        )

    def _plain(self, weights: FeedForwardWeights, *, keeps_blocks: bool = True) -> FeedForward:
        return FeedForward(
            self._linear(weights.gate_up, keeps_blocks=keeps_blocks),
            self._linear(weights.down, keeps_blocks=keeps_blocks),
            self._description.activation,
            is_gated=self._description.has_gated_ffn,
        )

    def _linear(self, weights: LinearWeights, *, keeps_blocks: bool = True) -> Linear:
        bias = self._placed(weights.bias)
        # Only a GPU keeps blocks: on a CPU, they would be dequantized in every step.
        if keeps_blocks and self._device.type == "cuda" and (parts := weights.weight.as_blocks()):
            placed = tuple(
                (part.to(self._device), None if order is None else order.to(self._device)) for part, order in parts
            )
            return Linear(placed[0][0].codes, bias, parts=placed)
        if keeps_blocks and weights.weight.format == "int8":
            units, scale = int8_rows(weights.weight.source)
            return Linear(units.to(self._device), bias, scale.to(self._device))
        return Linear(self._place(weights.weight.dense()), bias)

    def _placed(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self._place(tensor)

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self._device, dtype=self._dtype)
