"""The weights of a decoder, joined as it computes with them: q, k and v in one matrix, gate and up in another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.weights.files import GgufFile, SafetensorsFiles, WeightFile
from gpu_worker.models.weights.weight import Weight, WeightFormat, stack
from midstream.errors import ConfigError
from midstream.model.folder import ModelFolder


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A linear layer: weight [N, K], bias [N] or None."""

    weight: Weight
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Rows of qkv: all of q, then k, then v; rows of gate_up: gate, then up."""

    input_norm: Tensor
    qkv: LinearWeights
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_output: LinearWeights
    post_attention_norm: Tensor
    gate_up: LinearWeights
    down: LinearWeights


class DecoderWeights:
    """The weights of `folder`, read when asked for."""

    def __init__(self, folder: ModelFolder, description: DecoderDescription, weights: str) -> None:
        """Opens the files.

        Args:
            folder: The model.
            description: What its configuration describes.
            weights: How matrices are kept: f32, bf16, int8, q4, or auto: as the file holds them.

        Raises:
            ConfigError: A file is damaged.
        """
        self._file = _open(folder, description)
        self._description = description
        self._target: dict[str, WeightFormat] = {"f32": "f32", "bf16": "bf16", "int8": "int8", "q4": "q4"}
        self._weights = weights

    def embedding(self) -> Weight:
        """[vocab_size, hidden_size]."""
        d = self._description
        return self._matrix("model.embed_tokens", d.vocab_size, d.hidden_size)

    def head(self) -> Weight | None:
        """[vocab_size, hidden_size]; None: the embedding is used."""
        d = self._description
        return None if d.ties_embeddings else self._matrix("lm_head", d.vocab_size, d.hidden_size)

    def final_norm(self) -> Tensor:
        """[hidden_size]."""
        return self._vector("model.norm.weight", self._description.hidden_size)

    def rope_factors(self) -> Tensor | None:
        """[head_dim / 2], where the file carries the scaling of rotary frequencies."""
        if not self._file.has("rope_freqs.weight"):
            return None
        return self._vector("rope_freqs.weight", self._description.head_dim // 2)

    def layers(self, numbers: range | None = None) -> Iterator[LayerWeights]:
        """Layer by layer, all or those of the given numbers.

        Raises:
            ConfigError: A tensor is missing or of another shape than the configuration says; names it.
        """
        for i in numbers or range(self._description.num_layers):
            yield self._layer(f"model.layers.{i}.")

    def _layer(self, prefix: str) -> LayerWeights:
        d = self._description
        q_size, kv_size = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return LayerWeights(
            input_norm=self._vector(prefix + "input_layernorm.weight", d.hidden_size),
            qkv=self._linear(
                [(attention + "q_proj", q_size), (attention + "k_proj", kv_size), (attention + "v_proj", kv_size)],
                d.hidden_size,
            ),
            q_norm=self._vector(attention + "q_norm.weight", d.head_dim) if d.normalizes_qk else None,
            k_norm=self._vector(attention + "k_norm.weight", d.head_dim) if d.normalizes_qk else None,
            attention_output=self._linear([(attention + "o_proj", d.hidden_size)], q_size),
            post_attention_norm=self._vector(prefix + "post_attention_layernorm.weight", d.hidden_size),
            gate_up=self._linear(
                [(mlp + "gate_proj", d.intermediate_size), (mlp + "up_proj", d.intermediate_size)], d.hidden_size
            ),
            down=self._linear([(mlp + "down_proj", d.hidden_size)], d.intermediate_size),
        )

    def _linear(self, parts: list[tuple[str, int]], num_columns: int) -> LinearWeights:
        weight = stack([self._matrix(name, num_rows, num_columns) for name, num_rows in parts])
        if not any(self._file.has(name + ".bias") for name, _ in parts):
            return LinearWeights(weight)
        return LinearWeights(weight, torch.cat([self._vector(name + ".bias", rows) for name, rows in parts]))

    def _matrix(self, name: str, num_rows: int, num_columns: int) -> Weight:
        weight = self._file.matrix(name + ".weight")
        if weight.shape != (num_rows, num_columns):
            raise ConfigError(f"{name}.weight is {weight.shape}, not {(num_rows, num_columns)}", field="model")
        target = self._target.get(self._weights)
        return weight if target is None else weight.converted(target)

    def _vector(self, name: str, size: int) -> Tensor:
        values = self._file.vector(name)
        if values.shape != (size,):
            raise ConfigError(f"{name} is {tuple(values.shape)}, not {(size,)}", field="model")
        return values


def _open(folder: ModelFolder, description: DecoderDescription) -> WeightFile:
    if folder.weights_format == "safetensors":
        return SafetensorsFiles(folder.weight_files)
    permuted = (description.num_heads, description.num_kv_heads) if description.architecture == "llama" else None
    return GgufFile(folder.weight_files[0], permuted)
