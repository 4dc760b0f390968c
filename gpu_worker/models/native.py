"""The decoder that uses the CPU kernels: one call runs all layers with packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

import kernels
from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import Adapter
from gpu_worker.models.decoder import ForwardInputs, Probe
from gpu_worker.models.description import DecoderDescription, Mixture, Rotary
from gpu_worker.models.layers.rotary import query_scales, rotary_table
from gpu_worker.models.weights.decoder_weights import DecoderWeights
from gpu_worker.models.weights.layer_weights import FeedForwardWeights, LayerWeights, LinearWeights, MixtureWeights
from gpu_worker.models.weights.progress import with_progress
from gpu_worker.models.weights.weight import BLOCK_FORMATS, Weight
from gpu_worker.models.weights.weight import WeightFormat as WeightKind
from gpu_worker.parallel.shard import Shard, whole_shard
from gpu_worker.parallel.shard_weights import ShardWeights
from kernels.cpu import (
    DecoderDims,
    DecoderLayer,
    Draws,
    Embedding,
    InputFormat,
    Library,
    NativeDecoder,
    PackedExpert,
    PackedLinear,
    PackedLora,
    PackedMixture,
    ThreadPool,
    WeightFormat,
    stored_head_dim,
)

_FORMATS: dict[WeightKind, WeightFormat] = {
    "f32": WeightFormat.F32,
    "bf16": WeightFormat.BF16,
    "int8": WeightFormat.INT8,
    **BLOCK_FORMATS,
}
_INPUT_FORMATS = {
    "auto": InputFormat.INT16,
    "f32": InputFormat.F32,
    "int16": InputFormat.INT16,
    "int8": InputFormat.INT8,
}


@dataclass(frozen=True, slots=True)
class _PackedLayer:
    qkv: PackedLinear
    attention_output: PackedLinear
    feed_forward: PackedExpert | None
    mixture: PackedMixture | None
    weights: LayerWeights


class CpuDecoder:
    """A decoder with `num_threads` threads that computes in float32, except for the inputs of quantized layers."""

    def __init__(
        self,
        description: DecoderDescription,
        weights: DecoderWeights | ShardWeights,
        library: Library,
        num_threads: int,
        activations: str = "auto",
        shard: Shard | None = None,
    ) -> None:
        """Load and pack the weights, reporting the progress.

        Args:
            num_threads: Number of compute threads, including the caller's.
            activations: Data type of the inputs of quantized layers: f32, int16 (auto) or int8.
            shard: The part of the model to hold, which consists of whole layers; None means all of it.
        """
        self._shard = shard or whole_shard(description)
        self._description = description = self._shard.part
        self._library = library
        self._input_format = _INPUT_FORMATS[activations]
        self.threads = ThreadPool(library, num_threads)
        if self._shard.is_first:
            self._embedding = weights.embedding()
            self._head = self._pack(LinearWeights(weights.head() or self._embedding))
            self._table = _table(self._embedding, description.hidden_size)
        self._layers = [
            self._pack_layer(layer, mixture)
            for layer, mixture in zip(
                with_progress(weights.layers(), description.num_layers, "loading layers"),
                description.mixtures,
                strict=True,
            )
        ]
        self._final_norm = weights.final_norm().contiguous()
        # Layers with the same rotary settings share a table.
        kinds: list[Rotary] = []
        for rotary in description.rotary:
            if rotary is not None and rotary not in kinds:
                kinds.append(rotary)
        self._tables = [None if rotary is None else kinds.index(rotary) for rotary in description.rotary]
        num_positions, factors = description.max_sequence_length, weights.rope_factors()
        angles = [rotary_table(kind.settings, kind.dim, num_positions, factors) for kind in kinds]
        none = torch.zeros(num_positions, dims_of(description).num_angles)
        self._cos = torch.stack([cos for cos, _ in angles] or [none])
        self._sin = torch.stack([sin for _, sin in angles] or [none])
        self._query_scales = query_scales(description)
        self._native: NativeDecoder | None = None

    def place_adapter(self, adapter: Adapter) -> PackedLora:
        """Convert a LoRA adapter to the kernels' layout."""
        layers = [
            {module: (pair.a, pair.b.float() * pair.scale) for module, pair in pairs.items()}
            for pairs in adapter.layers
        ]
        return PackedLora(dims_of(self._description), layers)

    def use_cache(self, kv: KvCache) -> None:
        """Use this cache from now on; its blocks have the layout of the kernels."""
        heads, dim = self._description.num_kv_heads, stored_head_dim(self._description.head_dim, kv.keys.dtype)
        layers = [
            DecoderLayer(
                qkv=layer.qkv,
                o=layer.attention_output,
                gate_up=None if layer.feed_forward is None else layer.feed_forward.gate_up,
                down=None if layer.feed_forward is None else layer.feed_forward.down,
                mixture=layer.mixture,
                attention_norm=layer.weights.input_norm,
                ffn_norm=layer.weights.ffn_norm,
                attention_output_norm=layer.weights.attention_output_norm,
                ffn_output_norm=layer.weights.ffn_output_norm,
                k_cache=kv.keys[i].view(kv.num_blocks, heads, dim, kv.tokens_per_block),
                v_cache=kv.values[i].view(kv.num_blocks, heads, kv.tokens_per_block, dim),
                q_norm=layer.weights.q_norm,
                k_norm=layer.weights.k_norm,
                sinks=layer.weights.sinks,
                window=self._description.windows[i],
                chunk=self._description.chunks[i],
                table=self._tables[i],
                kv_rounding=layer.weights.kv_rounding,
            )
            for i, layer in enumerate(self._layers)
        ]
        self._native = NativeDecoder(
            self.threads, dims_of(self._description), layers, self._cos, self._sin, self._query_scales
        )

    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Write the keys and values of all tokens; return float32 logits [S, vocab_size] of the sampled tokens."""
        hidden = self.run_layers(self.embed(inputs), inputs, probe)
        if probe is not None:
            probe.last = hidden
        return self.logits(hidden if len(inputs.sampled) == len(hidden) else hidden[inputs.sampled])

    def choose(self, inputs: ForwardInputs, draws: Draws | None = None) -> tuple[Tensor, Tensor] | None:
        """Run a whole step in one call of the kernels; return None if the step needs other processing as well."""
        if self._table is None or inputs.virtual is not None or not len(inputs.sampled):
            return None
        assert self._native is not None
        return self._native.choose(
            inputs.token_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.query_starts,
            inputs.context_lens,
            inputs.block_tables,
            inputs.sampled,
            self._table,
            self._final_norm,
            self._head,
            _by_sequence(inputs),
            draws,
        )

    def embed(self, inputs: ForwardInputs) -> Tensor:
        """Return the embeddings of the tokens, [M, hidden_size]."""
        hidden = self._embedding.take(inputs.token_ids).dense().contiguous()
        scale = self._description.embedding_scale
        if scale != 1.0:
            hidden = hidden * scale
        if inputs.virtual is not None:
            values = inputs.virtual.values
            hidden[inputs.virtual.places] = values * scale if self._description.scales_virtual else values
        return hidden

    def run_layers(self, hidden: Tensor, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Write keys and values, and compute the last layer's output from the first layer's input, in place."""
        offset, num_layers, done = self._shard.layers.start, len(self._layers), 0
        wanted = () if probe is None else sorted(probe.layers & {*range(offset, offset + num_layers + 1)})
        for layer in wanted:
            self._forward_layers(hidden, inputs, done, layer - offset)
            done = layer - offset
            if probe is not None:
                is_end = self._shard.is_last and done == num_layers
                d = self._description
                norm = kernels.rms_norm if d.norm == "rms" else kernels.layer_norm
                probe.keep(layer, norm(hidden, self._final_norm, d.norm_eps) if is_end else hidden)
        self._forward_layers(hidden, inputs, done, num_layers)
        return hidden

    def logits(self, last: Tensor) -> Tensor:
        """Return float32 logits [N, vocab_size] for outputs of the last layer."""
        assert self._native is not None
        return self._native.logits(last, self._final_norm, self._head)

    def _forward_layers(self, hidden: Tensor, inputs: ForwardInputs, first: int, end: int) -> None:
        assert self._native is not None
        if first == end:
            return
        self._native.forward_layers(
            hidden,
            inputs.positions,
            inputs.slot_mapping,
            inputs.query_starts,
            inputs.context_lens,
            inputs.block_tables,
            first,
            end,
            _by_sequence(inputs),
        )

    def _pack_layer(self, weights: LayerWeights, mixture: Mixture | None) -> _PackedLayer:
        assert weights.qkv is not None
        assert weights.attention_output is not None
        packed = None
        if mixture is not None and weights.mixture is not None:
            packed = self._pack_mixture(weights.mixture, mixture)
        kept = replace(weights, qkv=None, feed_forward=None, mixture=None)
        return _PackedLayer(
            qkv=self._pack(weights.qkv),
            attention_output=self._pack(weights.attention_output),
            feed_forward=None if weights.feed_forward is None else self._pack_feed_forward(weights.feed_forward),
            mixture=packed,
            weights=kept,
        )

    def _pack_mixture(self, weights: MixtureWeights, mixture: Mixture) -> PackedMixture:
        shared, shared_gate = weights.shared, weights.shared_gate
        return PackedMixture(
            router=PackedLinear(self._library, [weights.router.weight.dense()], WeightFormat.F32, weights.router.bias),
            experts=[self._pack_feed_forward(expert) for expert in _alike(weights.experts)],
            num_active=mixture.num_active,
            scoring=mixture.scoring,
            is_normalized=mixture.is_normalized,
            scale=mixture.scale,
            num_groups=mixture.num_groups,
            num_active_groups=mixture.num_active_groups,
            weighs_input=mixture.weighs_input,
            correction=weights.correction,
            shared=None if shared is None else self._pack_feed_forward(shared),
            shared_gate=None if shared_gate is None else self._pack(shared_gate),
        )

    def _pack_feed_forward(self, weights: FeedForwardWeights) -> PackedExpert:
        if self._description.activation != "silu":
            return PackedExpert(self._pack(weights.gate_up), self._pack(weights.down))
        gate_up = self._packed(weights.gate_up.weight.gate_and_up(), is_gated=True)
        return PackedExpert(gate_up, self._pack(weights.down))

    def _pack(self, linear: LinearWeights) -> PackedLinear:
        parts = linear.weight.parts or (linear.weight,)
        sizes = [part.shape[0] for part in parts]
        biases = [None] * len(parts) if linear.bias is None else torch.split(linear.bias, sizes)
        packed = [self._packed([part], bias) for part, bias in zip(parts, biases, strict=True)]
        for i in range(len(packed) - 1, 0, -1):
            packed[i - 1].followed_by(packed[i])
        return packed[0]

    def _packed(self, parts: Sequence[Weight], bias: Tensor | None = None, *, is_gated: bool = False) -> PackedLinear:
        first = parts[0]
        weight_format, input_format = _FORMATS[first.format], self._input_format
        sources = [part.source for part in parts]
        # Products of 16-bit integers take half the time of float products. With AMX tiles, bfloat16 products are even
        # faster, and exact.
        if weight_format == WeightFormat.BF16 and input_format != InputFormat.F32 and self._library.isa != "amx":
            weight_format, input_format = WeightFormat.INT16, InputFormat.INT16
            sources = [source.bfloat16() for source in sources]
        return PackedLinear(
            self._library, sources, weight_format, bias, is_gated, input_format, first.num_columns, first.input_order
        )


def _alike(experts: list[FeedForwardWeights]) -> list[FeedForwardWeights]:
    """Convert experts to a common format and input order for grouped multiplication; to floats if no format fits."""

    layers = [linear.weight for expert in experts for linear in (expert.gate_up, expert.down)]
    is_plain = all(weight.input_order is None and not weight.parts for weight in layers)
    if is_plain and len({weight.format for weight in layers[::2]}) == len({w.format for w in layers[1::2]}) == 1:
        return experts

    def dense(linear: LinearWeights) -> LinearWeights:
        return LinearWeights(Weight("f32", linear.weight.dense(), linear.weight.num_columns), linear.bias)

    return [FeedForwardWeights(dense(expert.gate_up), dense(expert.down)) for expert in experts]


def _table(weight: Weight, width: int) -> Embedding | None:
    """Return the embeddings in a format that the kernels read; None if their format is not supported."""
    source = weight.source.contiguous()
    is_known = weight.format in ("q4", "q8") or (weight.format, source.dtype) in (
        ("f32", torch.float32),
        ("bf16", torch.bfloat16),
    )
    return Embedding(source, _FORMATS[weight.format], width) if is_known else None


def _by_sequence(inputs: ForwardInputs) -> list[PackedLora | None] | None:
    """Return each sequence's adapter; None for sequences without one."""
    if inputs.adapters is None:
        return None
    places = inputs.adapters.indices[inputs.query_starts[:-1]].tolist()
    return [None if place < 0 else inputs.adapters.adapters[place] for place in places]


def what_is_missing(description: DecoderDescription) -> str | None:
    """Return the first component of a decoder that the kernels do not support; None if they support all of them."""
    d = description
    if d.latent is not None:
        return "it has latent attention"
    if d.alibi:
        return "it has ALiBi"
    if d.num_sink_tokens:
        return "sink_token_length is set"
    if any(d.recurrent):
        return "it has recurrent layers"
    if d.has_norm_bias:
        return "its norms have biases"
    if not d.has_gated_ffn:
        return "its feed-forward layers have no gates"
    if d.has_output_gate:
        return "its attention has an output gate"
    if d.has_mlp_bias and d.activation == "silu":
        return "its feed-forward layers have biases"
    if len({(rotary.dim, rotary.is_interleaved) for rotary in d.rotary if rotary is not None}) > 1:
        return "its layers have rotary embeddings of different dimension or layout"
    return None


def dims_of(description: DecoderDescription) -> DecoderDims:
    """Return the sizes of the model for the kernels."""
    d = description
    rotary = next((rotary for rotary in d.rotary if rotary is not None), None)
    same = {item.name: getattr(d, item.name) for item in fields(DecoderDims) if hasattr(d, item.name)}
    return DecoderDims(
        **same,
        ffn_size=d.intermediate_size,
        eps=d.norm_eps,
        rotary_dim=d.head_dim if rotary is None else rotary.dim,
        is_interleaved=rotary is not None and rotary.is_interleaved,
        has_layer_norm=d.norm == "layer",
        norms_qk_rows=d.qk_norm == "row",
    )
