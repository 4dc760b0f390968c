"""Reads a decoder's weights from a model folder."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gpu_worker.models.description import (
    ChannelMamba,
    DecoderDescription,
    DeltaNet,
    Mamba,
    Mixture,
    Recurrent,
    ShortConv,
    grouped_rows,
)
from gpu_worker.models.families import family_of
from gpu_worker.models.families.family import DELTA_NET_INPUTS, Names
from gpu_worker.models.weights.block_rows import mxfp4_weight
from gpu_worker.models.weights.files import GgufFile, SafetensorsFiles, WeightFile
from gpu_worker.models.weights.gguf_names import separate_experts
from gpu_worker.models.weights.layer_weights import (
    FeedForwardWeights,
    LatentWeights,
    LayerWeights,
    LinearWeights,
    MixtureWeights,
    RecurrentWeights,
)
from gpu_worker.models.weights.quantized import read_scheme
from gpu_worker.models.weights.weight import Weight, WeightFormat, stack
from kernels.kv_rounding import KvRounding
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import ModelFolder

logger = logging.getLogger(__name__)

# In GGUF files of these families, the rotary pairs of q and k are stored next to each other.
_PERMUTED = frozenset({"llama", "mixtral", "granite", "granitemoeshared", "smollm3", "arcee"})


class DecoderWeights:
    """The weights of `folder`, read on demand."""

    def __init__(
        self, folder: ModelFolder, description: DecoderDescription, weights: str, *, rounds_kv: bool = True
    ) -> None:
        """Open the files.

        Args:
            weights: Storage format of matrices: f32, bf16, int8, q4, or auto for the format of the file.
            rounds_kv: Whether to read the scales of a quantized KV cache, if the file has them.

        Raises:
            ConfigError: A file is damaged.
        """
        self._file = open_weights(folder, description)
        self._description = description
        self._num_labels, self._has_head = folder.num_labels, folder.has_head
        self._target: dict[str, WeightFormat] = {"f32": "f32", "bf16": "bf16", "int8": "int8", "q4": "q4"}
        self._weights = weights
        self._rounds_kv = rounds_kv
        self._names = _names_in(folder, description)
        first = self._names.prefixes[0]
        # A tied matrix may be stored only as the head, so the embedding may be missing.
        parts = [name.removeprefix(first) + ".weight" for name in (self._names.embedding, self._names.final_norm)]
        held = (p for p in self._names.all_prefixes if any(self._file.has(p + part) for part in parts))
        self._prefix = next(held, first)
        # In a multimodal model, the head is stored next to the layers.
        is_part = self._file.has("language_model." + self._names.head + ".weight")
        self._head_prefix = "language_model." if is_part else ""

    def embedding(self) -> Weight:
        """The embedding matrix, [vocab_size, hidden_size]."""
        d = self._description
        is_head = d.ties_embeddings and not self._has(self._names.embedding + ".weight")
        return self._matrix(self._names.head if is_head else self._names.embedding, d.vocab_size, d.hidden_size)

    def head(self) -> Weight | None:
        """The matrix of the head, [vocab_size, hidden_size]; None if it is tied to the embedding, or if the model has
        none: routers then accept only requests whose answers do not depend on it.

        The first rows of a classification head are those of its classes; the others are zero.
        """
        d = self._description
        if self._num_labels is not None:
            rows, shape = self._file.matrix("score.weight"), (self._num_labels, d.hidden_size)
            if rows.shape != shape or self._num_labels > d.vocab_size:
                raise ConfigError(f"score.weight is {rows.shape}; must be {shape}", field="model")
            dtype = torch.bfloat16 if rows.format == "bf16" else torch.float32
            head = torch.zeros(d.vocab_size, d.hidden_size, dtype=dtype)
            head[: self._num_labels] = rows.dense()
            return self._float_weight(head)
        if not self._has_head or (d.ties_embeddings and not self._has_own_head()):
            return None
        if not self._has(self._names.head + ".weight"):
            raise ConfigError(
                f"the weights lack {self._names.head}.weight; for a model without a head, config.json must set "
                "tie_word_embeddings to false",
                field="model",
            )
        return self._matrix(self._names.head, d.vocab_size, d.hidden_size)

    def _has_own_head(self) -> bool:
        """Return whether the file has a head that differs from the embedding; then, as in transformers, they are not
        tied, regardless of config.json.
        """
        head, embedding = (self._in_file(name + ".weight") for name in (self._names.head, self._names.embedding))
        if not self._file.has(head) or not self._file.has(embedding):
            return False
        one, other = self._file.matrix(head), self._file.matrix(embedding)
        if one.format == other.format and torch.equal(one.source, other.source):
            return False
        logger.warning("config.json ties the head to the embedding, but %s differs from it, so they are not tied", head)
        return True

    def head_bias(self) -> Tensor | None:
        """The biases of the head, [vocab_size]; None if there are none."""
        name = self._names.head + ".bias"
        return self._vector(name, self._description.vocab_size) if self._has(name) else None

    def positions(self) -> Tensor | None:
        """Position vectors added to the embeddings, [max_sequence_length, hidden_size]; None if there are none."""
        d = self._description
        if d.position_offset is None:
            return None
        shape = (d.position_offset + d.max_sequence_length, d.hidden_size)
        return self._vector_of(self._names.positions + ".weight", shape)[d.position_offset :]

    def embedding_norm(self) -> Tensor | None:
        """The weight of the norm of the embeddings, in the form of `final_norm`; None if there is none."""
        d = self._description
        return self._norm(self._names.embedding_norm, d.hidden_size) if d.has_embedding_norm else None

    def final_norm(self) -> Tensor:
        """The weight of the final norm, [hidden_size], or with biases [2, hidden_size]."""
        return self._norm(self._names.final_norm, self._description.hidden_size)

    def rope_factors(self) -> Tensor | None:
        """Scaling factors of rotary frequencies [head_dim / 2], if the file has them."""
        if not self._file.has("rope_freqs.weight"):
            return None
        return self._vector("rope_freqs.weight", self._description.head_dim // 2)

    def layers(self, numbers: range | None = None) -> Iterator[LayerWeights]:
        """Yield the weights of all layers, or of the layers with the given indices.

        Raises:
            ConfigError: A tensor is missing or its shape contradicts the configuration; the message names it.
        """
        for i in numbers or range(self._description.num_layers):
            yield self._layer(i, self._names.layer.format(i))

    def _layer(self, i: int, prefix: str) -> LayerWeights:
        d, names, mixture = self._description, self._names, self._description.mixtures[i]
        recurrent, has_attention, parts = d.recurrent[i], d.has_attention(i), d.parts[i]
        has_before, has_after = d.norm_place != "after", d.norm_place != "before"
        q_size, kv_size = d.num_heads * d.query_rows, d.num_kv_heads * d.head_dim
        norm_sizes = (q_size, kv_size) if d.qk_norm == "row" else (d.head_dim, d.head_dim)
        norms = [
            self._norm(prefix + name, size) if d.qk_norm and has_attention else None
            for name, size in zip((names.q_norm, names.k_norm), norm_sizes, strict=True)
        ]
        input_norm, ffn_norm = names.input_norm, names.ffn_norm
        if d.has_two_norms and names.parallel_norms is not None:
            input_norm, ffn_norm = names.parallel_norms
        output = None
        if has_attention and d.has_attention_bias is False:
            self._refuse_biases(prefix, names.qkv, "attention")
        if has_attention:
            attended = d.num_heads * d.value_dim
            output = self._linear(prefix, [names.attention_output], [d.hidden_size], attended)
        return LayerWeights(
            input_norm=self._norm(prefix + input_norm, d.hidden_size) if has_before else None,
            qkv=None if d.latent or not has_attention else self._qkv(prefix, [q_size, kv_size, kv_size]),
            q_norm=norms[0],
            k_norm=norms[1],
            attention_output=output,
            ffn_norm=self._norm(prefix + ffn_norm, d.hidden_size)
            if has_before and (d.has_two_norms or not d.is_parallel) and parts == "both"
            else None,
            feed_forward=None
            if mixture or parts == "mixer"
            else self._feed_forward(prefix, names.gate_up, names.down, d.intermediate_size),
            attention_output_norm=self._norm(prefix + names.attention_output_norm, d.hidden_size)
            if has_after
            else None,
            ffn_output_norm=self._norm(prefix + names.ffn_output_norm, d.hidden_size) if has_after else None,
            sinks=self._vector(prefix + names.sinks, d.num_heads) if d.has_sinks and has_attention else None,
            latent=self._latent(prefix) if d.latent and has_attention else None,
            mixture=self._mixture(prefix, mixture) if mixture else None,
            recurrent=None if recurrent is None else self._recurrent(prefix + names.recurrent_prefix, recurrent),
            kv_rounding=self._kv_rounding(i),
        )

    def _qkv(self, prefix: str, sizes: Sequence[int]) -> LinearWeights:
        d = self._description
        joined = self._linear(prefix, self._names.qkv, sizes, d.hidden_size)
        if not d.has_grouped_qkv:
            return joined
        rows = grouped_rows(d)
        return LinearWeights(joined.weight.take(rows), None if joined.bias is None else joined.bias[rows])

    @property
    def rounds_kv(self) -> bool:
        """Whether the keys and values of any layer are rounded before they are stored."""
        return any(self._kv_rounding(i) is not None for i in range(self._description.num_layers))

    def _kv_rounding(self, i: int) -> KvRounding | None:
        """Return how the checkpoint's own quantized cache rounds keys and values; None if it has no scales for one."""
        if not self._rounds_kv or self._description.latent or not self._description.has_attention(i):
            return None
        module = self._names.layer.format(i) + self._names.qkv[0].rpartition(".")[0]
        # compressed-tensors has them beside the projections, ModelOpt within.
        key, value = (
            next(filter(self._has, (f"{module}.{part}_scale", f"{module}.{part}_proj.{part}_scale")), None)
            for part in "kv"
        )
        if key is None and value is None:
            return None
        if key is None or value is None:
            raise ConfigError(
                f"the weights have {key or value}, but not the other scale of the KV cache", field="model"
            )
        scales = [self._file.vector(self._in_file(name)) for name in (key, value)]
        if any(scale.numel() != 1 or scale <= 0 for scale in scales):
            raise UnsupportedError(
                f"{key} and {value} must each be one positive number; any other choice than auto ignores them",
                field="kv",
            )
        return KvRounding(float(scales[0]), float(scales[1]), self._file.has_integer_kv)

    def _recurrent(self, prefix: str, kind: Recurrent) -> RecurrentWeights:
        d = self._description
        inputs: tuple[LinearWeights, ...]
        conv = prefix + ("conv" if isinstance(kind, ShortConv) else "conv1d")
        convolution = self._vector_of(conv + ".weight", (kind.channels, 1, kind.kernel)).squeeze(1)
        conv_bias = self._vector(conv + ".bias", kind.channels) if self._has(conv + ".bias") else None
        size = kind.value_heads * kind.value_dim if isinstance(kind, DeltaNet) else kind.size
        output = self._linear(prefix, ["out_proj"], [d.hidden_size], size)
        if isinstance(kind, ShortConv):
            inputs = (self._linear(prefix, ["in_proj"], [3 * kind.size], d.hidden_size),)
            return RecurrentWeights(inputs, output, convolution, conv_bias)
        if isinstance(kind, ChannelMamba):
            selected = kind.step_rank + 2 * kind.state_dim
            inputs = (
                self._linear(prefix, ["in_proj"], [2 * kind.size], d.hidden_size),
                self._linear(prefix, ["x_proj"], [selected], kind.size),
                self._linear(prefix, ["dt_proj"], [kind.size], kind.step_rank),
            )
            decay_logs = self._vector_of(prefix + "A_log", (kind.size, kind.state_dim))
            skip = self._vector(prefix + "D", kind.size)
            return RecurrentWeights(inputs, output, convolution, conv_bias, decay_logs=decay_logs, skip=skip)
        if isinstance(kind, DeltaNet):
            num_heads, norm_size = kind.value_heads, kind.value_dim
            has_norm = True
            joined, rates = DELTA_NET_INPUTS[kind.is_in_turn]
            inputs = (
                self._linear(prefix, joined, [kind.channels, num_heads * kind.value_dim], d.hidden_size),
                self._linear(prefix, rates, [num_heads, num_heads], d.hidden_size),
            )
        else:
            num_heads, norm_size, has_norm = kind.num_heads, kind.size, kind.has_norm
            inputs = (self._linear(prefix, ["in_proj"], [kind.size + kind.channels + num_heads], d.hidden_size),)
        return RecurrentWeights(
            inputs=inputs,
            output=output,
            conv=convolution,
            conv_bias=conv_bias,
            step_bias=self._vector(prefix + "dt_bias", num_heads),
            decay_logs=self._vector(prefix + "A_log", num_heads),
            skip=self._vector(prefix + "D", num_heads) if isinstance(kind, Mamba) else None,
            norm=self._vector(prefix + "norm.weight", norm_size) if has_norm else None,
        )

    def _feed_forward(self, prefix: str, gate_up: Sequence[str], down: str, size: int) -> FeedForwardWeights:
        d = self._description
        if d.has_gated_ffn and not d.has_mlp_bias and d.activation != "clamped_swiglu":  # whose experts have biases
            self._refuse_biases(prefix, (*gate_up, down), "a feed-forward layer")
        return FeedForwardWeights(
            self._linear(prefix, gate_up, [size] * (2 if d.has_gated_ffn else 1), d.hidden_size),
            self._linear(prefix, [down], [d.hidden_size], size),
        )

    def _refuse_biases(self, prefix: str, names: Sequence[str], layers: str) -> None:
        """Raise ConfigError if the file has nonzero biases that config.json excludes. GPTQ files may have biases of
        zeros.
        """
        for name in names:
            bias = f"{prefix}{name}.bias"
            if self._has(bias) and self._file.vector(self._in_file(bias)).any():
                raise ConfigError(
                    f"the weights have {bias}, but according to config.json {layers} has none", field="model"
                )

    def _mixture(self, prefix: str, mixture: Mixture) -> MixtureWeights:
        d, names = self._description, self._names
        shared = None
        if mixture.shared_size:
            own = names.shared_prefix
            gate_up = names.shared_gate_up if d.has_gated_ffn else names.shared_gate_up[-1:]
            shared = self._feed_forward(
                prefix, [own + name for name in gate_up], own + names.shared_down, mixture.shared_size
            )
        router = prefix + names.router
        bias = self._vector(router + ".bias", mixture.num_experts) if self._has(router + ".bias") else None
        correction = None
        if mixture.has_correction:
            name = prefix + names.correction
            # ERNIE 4.5 stores a matrix with one row.
            is_row = self._has(name) and len(self._file.shape(self._in_file(name))) == 2
            correction = self._vector_of(name, (1,) * is_row + (mixture.num_experts,)).flatten()
        return MixtureWeights(
            # The router keeps the file's format: it is small, and rounding could change which experts are chosen.
            router=LinearWeights(self._stored(router, mixture.num_experts, d.hidden_size), bias),
            correction=correction,
            experts=self._experts(prefix, mixture),
            shared=shared,
            shared_gate=self._linear(prefix, [names.shared_gate], [1], d.hidden_size)
            if mixture.has_shared_gate
            else None,
        )

    def _experts(self, prefix: str, mixture: Mixture) -> list[FeedForwardWeights]:
        names, size = self._names, mixture.expert_size
        if names.experts == "separate":
            return [
                self._feed_forward(
                    prefix, [name.format(i) for name in names.expert_gate_up], names.expert_down.format(i), size
                )
                for i in range(mixture.num_experts)
            ]
        num, hidden_size = mixture.num_experts, self._description.hidden_size
        gate_up = self._stacked(prefix + names.expert_gate_up[0], num, 2 * size, hidden_size)
        down = self._stacked(prefix + names.expert_down, num, hidden_size, size)
        order = torch.arange(2 * size)
        if names.experts == "stacked_in_turn":
            order = torch.cat((order[::2], order[1::2]))
        return [
            FeedForwardWeights(
                LinearWeights(self._kept(up.take(order)), None if up_bias is None else up_bias[order]),
                LinearWeights(self._kept(low), low_bias),
            )
            for (up, up_bias), (low, low_bias) in zip(gate_up, down, strict=True)
        ]

    def _stacked(
        self, name: str, num_experts: int, num_rows: int, num_columns: int
    ) -> Iterator[tuple[Weight, Tensor | None]]:
        """Yield the matrix and the bias of each expert.

        One tensor contains all experts: [experts, columns, rows] or [experts, rows, columns]. In gpt-oss's MXFP4, one
        tensor contains the codes [experts, rows, groups, 16], two per byte, and another the exponents [experts, rows,
        groups].
        """
        biases: list[Tensor | None] = [None] * num_experts
        if self._has(name + "_bias"):
            biases = list(self._vector_of(name + "_bias", (num_experts, num_rows)))
        if self._has(name + "_blocks"):
            groups = (num_experts, num_rows, num_columns // 32)
            codes, exponents = self._raw(name + "_blocks", (*groups, 16)), self._raw(name + "_scales", groups)
            for number, bias in enumerate(biases):
                packed = codes[number]
                levels = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
                yield mxfp4_weight(levels, exponents[number]), bias
            return
        if self._names.experts == "stacked_rows":
            values = self._vector_of(name, (num_experts, num_rows, num_columns))
        else:
            values = self._vector_of(name, (num_experts, num_columns, num_rows)).transpose(1, 2)
        for value, bias in zip(values, biases, strict=True):
            yield self._float_weight(value.contiguous()), bias

    def _raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a uint8 tensor after checking its shape."""
        tensor = self._file.tensor(self._in_file(name))
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != shape:
            raise ConfigError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; must be uint8 {shape}", field="model")
        return tensor

    def _latent(self, prefix: str) -> LatentWeights:
        d, names, latent = self._description, self._names, self._description.latent
        assert latent is not None
        q_size, q_rank = d.num_heads * d.query_dim, latent.q_rank
        kv_up = self._stored(
            prefix + names.latent_kv_up, d.num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank
        )
        q_up = names.latent_q if q_rank is None else names.latent_q_up
        return LatentWeights(
            q_down=self._linear(prefix, [names.latent_q_down], [q_rank], d.hidden_size) if q_rank else None,
            q_norm=self._norm(prefix + names.latent_q_norm, q_rank) if q_rank else None,
            q_up=self._linear(prefix, [q_up], [q_size], q_rank or d.hidden_size),
            kv_down=self._linear(prefix, [names.latent_kv_down], [latent.kv_rank + latent.rope_dim], d.hidden_size),
            kv_norm=self._norm(prefix + names.latent_kv_norm, latent.kv_rank),
            kv_up=kv_up.dense(),
        )

    def _linear(self, prefix: str, names: Sequence[str], sizes: Sequence[int], num_columns: int) -> LinearWeights:
        """Return several projections joined into one linear layer; the file has a tensor for each, or one for all."""
        if len(names) == 1:
            sizes = [sum(sizes)]
        parts = [(prefix + name, size) for name, size in zip(names, sizes, strict=True)]
        weight = stack([self._matrix(name, num_rows, num_columns) for name, num_rows in parts])
        if not any(self._has(name + ".bias") for name, _ in parts):
            return LinearWeights(weight)
        return LinearWeights(weight, torch.cat([self._vector(name + ".bias", rows) for name, rows in parts]))

    def _matrix(self, name: str, num_rows: int, num_columns: int) -> Weight:
        return self._kept(self._stored(name, num_rows, num_columns))

    def _stored(self, name: str, num_rows: int, num_columns: int) -> Weight:
        """Return a matrix in the format of the file."""
        if name.endswith(self._names.transposed):
            return self._float_weight(self._vector_of(name + ".weight", (num_columns, num_rows)).t().contiguous())
        weight = self._file.matrix(self._in_file(name + ".weight"))
        if weight.shape != (num_rows, num_columns):
            raise ConfigError(f"{name}.weight is {weight.shape}; must be {(num_rows, num_columns)}", field="model")
        return weight

    def _float_weight(self, values: Tensor) -> Weight:
        return Weight("bf16" if values.dtype == torch.bfloat16 else "f32", values, values.shape[-1])

    def _kept(self, weight: Weight) -> Weight:
        """Return a matrix in the format in which it is kept in memory."""
        target = self._target.get(self._weights)
        return weight if target is None else weight.converted(target)

    def _norm(self, name: str, size: int) -> Tensor:
        weight = self._vector(name + ".weight", size) + self._description.norm_offset
        return torch.stack((weight, self._vector(name + ".bias", size))) if self._description.has_norm_bias else weight

    def _vector(self, name: str, size: int) -> Tensor:
        return self._vector_of(name, (size,))

    def _vector_of(self, name: str, shape: tuple[int, ...]) -> Tensor:
        values = self._file.vector(self._in_file(name))
        if values.dim() == 1 and values.numel() == math.prod(shape):  # a GGUF file has no sizes of 1
            values = values.view(shape)
        if values.shape != shape:
            raise ConfigError(f"{name} is {tuple(values.shape)}, not {shape}", field="model")
        return values

    def _has(self, name: str) -> bool:
        return self._file.has(self._in_file(name))

    def _in_file(self, name: str) -> str:
        first = self._names.prefixes[0]
        if name.startswith(first):
            return self._prefix + name.removeprefix(first)
        return self._head_prefix + name


def open_weights(folder: ModelFolder, description: DecoderDescription) -> WeightFile:
    """Open the weight files of a folder. Raises ConfigError if one is damaged."""
    if folder.weights_format == "safetensors":
        return SafetensorsFiles(folder.weight_files, read_scheme(folder))
    heads = (description.num_heads, description.num_kv_heads)
    permuted = heads if description.architecture in _PERMUTED else None
    return GgufFile(folder.weight_files, _names_in(folder, description), permuted, description.norm_offset)


def _names_in(folder: ModelFolder, description: DecoderDescription) -> Names:
    """Return the names by which tensors are found in the files of a folder."""
    names = family_of(description.architecture).names
    return names if folder.weights_format == "safetensors" else separate_experts(names)
