"""The decoder on the CPU kernels: all layers in one call, over packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

import kernels
from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import Adapter
from gpu_worker.models.decoder import ForwardInputs, Probe
from gpu_worker.models.description import DecoderDescription, Rotary
from gpu_worker.models.layers.rotary import rotary_table
from gpu_worker.models.weights.decoder_weights import DecoderWeights
from gpu_worker.models.weights.layer_weights import LayerWeights, LinearWeights
from gpu_worker.models.weights.progress import with_progress
from gpu_worker.models.weights.weight import BLOCK_FORMATS, Weight
from gpu_worker.models.weights.weight import WeightFormat as WeightKind
from gpu_worker.parallel.shard import Shard, whole_shard
from gpu_worker.parallel.shard_weights import ShardWeights
from kernels.cpu import (
    DecoderDims,
    DecoderLayer,
    Embedding,
    InputFormat,
    Library,
    NativeDecoder,
    PackedLinear,
    PackedLora,
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
    gate_up: PackedLinear
    down: PackedLinear
    attention_norm: Tensor
    ffn_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class CpuDecoder:
    """Computes on `num_threads` threads, in float32 but for the input of quantized layers."""

    def __init__(
        self,
        description: DecoderDescription,
        weights: DecoderWeights | ShardWeights,
        library: Library,
        num_threads: int,
        activations: str = "auto",
        shard: Shard | None = None,
    ) -> None:
        """Loads and packs the weights, showing progress.

        Args:
            description: Of the model.
            weights: Its weights.
            library: The kernels.
            num_threads: Compute threads, the caller's among them.
            activations: What the input of quantized layers is rounded to: f32, int16 (auto) or int8.
            shard: Whose layers are here, each as a whole; None: all of them.
        """
        self._shard = shard or whole_shard(description)
        self._description = description = self._shard.part
        self._library = library
        self._input_format = _INPUT_FORMATS[activations]
        self._threads = ThreadPool(library, num_threads)
        if self._shard.is_first:
            self._embedding = weights.embedding()
            self._head = self._pack(LinearWeights(weights.head() or self._embedding))
            self._table = _table(self._embedding, description.hidden_size)
        self._layers = [
            self._pack_layer(layer)
            for layer in with_progress(weights.layers(), description.num_layers, "loading layers")
        ]
        self._final_norm = weights.final_norm().contiguous()
        rotary = description.rotary[0]
        assert rotary is not None
        self._cos, self._sin = rotary_table(
            rotary.settings, rotary.dim, description.max_sequence_length, weights.rope_factors()
        )
        self._native: NativeDecoder | None = None

    def place_adapter(self, adapter: Adapter) -> PackedLora:
        """Lays a LoRA adapter out as the kernels read it."""
        layers = [
            {module: (pair.a, pair.b.float() * pair.scale) for module, pair in pairs.items()}
            for pairs in adapter.layers
        ]
        return PackedLora(dims_of(self._description), layers)

    def use_cache(self, kv: KvCache) -> None:
        """Computes over this cache from now on, each block of it laid out as the kernels read fastest."""
        heads, dim = self._description.num_kv_heads, stored_head_dim(self._description.head_dim, kv.keys.dtype)
        layers = [
            DecoderLayer(
                qkv=layer.qkv,
                o=layer.attention_output,
                gate_up=layer.gate_up,
                down=layer.down,
                attention_norm=layer.attention_norm,
                ffn_norm=layer.ffn_norm,
                k_cache=kv.keys[i].view(kv.num_blocks, heads, dim, kv.tokens_per_block),
                v_cache=kv.values[i].view(kv.num_blocks, heads, kv.tokens_per_block, dim),
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                window=self._description.windows[i],
            )
            for i, layer in enumerate(self._layers)
        ]
        self._native = NativeDecoder(self._threads, dims_of(self._description), layers, self._cos, self._sin)

    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Writes keys and values of all tokens, and returns float32 logits [S, vocab_size] of the sampled ones."""
        hidden = self.run_layers(self.embed(inputs), inputs, probe)
        if probe is not None:
            probe.last = hidden
        return self.logits(hidden if len(inputs.sampled) == len(hidden) else hidden[inputs.sampled])

    def choose(self, inputs: ForwardInputs) -> tuple[Tensor, Tensor] | None:
        """A whole step in one call of the kernels; None where it takes more than that."""
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
        )

    def embed(self, inputs: ForwardInputs) -> Tensor:
        """The tokens' embeddings, [M, hidden_size]."""
        hidden = self._embedding.take(inputs.token_ids).dense().contiguous()
        if inputs.virtual is not None:
            hidden[inputs.virtual.places] = inputs.virtual.values
        return hidden

    def run_layers(self, hidden: Tensor, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Writes keys and values, and turns the first layer's input into the last one's output, in place."""
        offset, num_layers, done = self._shard.layers.start, len(self._layers), 0
        wanted = () if probe is None else sorted(probe.layers & {*range(offset, offset + num_layers + 1)})
        for layer in wanted:
            self._forward_layers(hidden, inputs, done, layer - offset)
            done = layer - offset
            if probe is not None:
                is_end = self._shard.is_last and done == num_layers
                eps = self._description.norm_eps
                probe.keep(layer, kernels.rms_norm(hidden, self._final_norm, eps) if is_end else hidden)
        self._forward_layers(hidden, inputs, done, num_layers)
        return hidden

    def logits(self, last: Tensor) -> Tensor:
        """Float32 logits [N, vocab_size] of outputs of the last layer."""
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

    def _pack_layer(self, weights: LayerWeights) -> _PackedLayer:
        assert weights.qkv is not None
        assert weights.feed_forward is not None
        assert weights.input_norm is not None
        assert weights.ffn_norm is not None
        gate_up = weights.feed_forward.gate_up.weight
        return _PackedLayer(
            qkv=self._pack(weights.qkv),
            attention_output=self._pack(weights.attention_output),
            gate_up=self._packed(gate_up.gate_and_up(), is_gated=True),
            down=self._pack(weights.feed_forward.down),
            attention_norm=weights.input_norm,
            ffn_norm=weights.ffn_norm,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
        )

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
        return PackedLinear(
            self._library,
            [part.source for part in parts],
            _FORMATS[first.format],
            bias,
            is_gated,
            self._input_format,
            first.num_columns,
            first.input_order,
        )


def _table(weight: Weight, width: int) -> Embedding | None:
    """The embeddings as the kernels read them; None where they do not know the form they are kept in."""
    source = weight.source.contiguous()
    is_known = weight.format in ("q4", "q8") or (weight.format, source.dtype) in (
        ("f32", torch.float32),
        ("bf16", torch.bfloat16),
    )
    return Embedding(source, _FORMATS[weight.format], width) if is_known else None


def _by_sequence(inputs: ForwardInputs) -> list[PackedLora | None] | None:
    """Each sequence's adapter; None where there is none."""
    if inputs.adapters is None:
        return None
    places = inputs.adapters.indices[inputs.query_starts[:-1]].tolist()
    return [None if place < 0 else inputs.adapters.adapters[place] for place in places]


def what_is_missing(description: DecoderDescription) -> str | None:
    """Return what of a decoder the kernels do not compute; None: they compute all of it."""
    d = description
    plain = replace(
        d,
        norm="rms",
        norm_offset=0.0,
        norm_place="before",
        is_parallel=False,
        has_unit_qk_norm=False,
        chunks=(None,) * d.num_layers,
        softcap=0.0,
        has_sinks=False,
        latent=None,
        position_scale=None,
        activation="silu",
        mixtures=(None,) * d.num_layers,
        embedding_scale=1.0,
        residual_scale=1.0,
        logits_scale=1.0,
        logits_softcap=0.0,
        has_mlp_bias=False,
        rotary=(Rotary(d.rotary[0].settings if d.rotary[0] else {}, d.head_dim),) * d.num_layers,
        qk_norm=None if d.qk_norm == "row" else d.qk_norm,
        qk_norm_sizes=(0, 0),
    )
    different = [f.name for f in fields(d) if getattr(d, f.name) != getattr(plain, f.name)]
    return f"it has {', '.join(different)}" if different else None


def dims_of(description: DecoderDescription) -> DecoderDims:
    """The sizes that the kernels need to know."""
    return DecoderDims(
        hidden_size=description.hidden_size,
        num_heads=description.num_heads,
        num_kv_heads=description.num_kv_heads,
        head_dim=description.head_dim,
        ffn_size=description.intermediate_size,
        eps=description.norm_eps,
        scale=description.scale,
    )
