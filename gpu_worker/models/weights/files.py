"""Weight files: reads tensors from safetensors or GGUF files, under Hugging Face's names."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_worker.models.weights.gguf_blocks import from_gguf
from gpu_worker.models.weights.schemes import Module, Scheme, is_packed, read_matrix
from gpu_worker.models.weights.weight import Weight, WeightFormat
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.prepare.gguf_file import TensorEntry, read_gguf_head

_GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_FORMATS: dict[gguf.GGMLQuantizationType, WeightFormat] = {
    gguf.GGMLQuantizationType.F32: "f32",
    gguf.GGMLQuantizationType.F16: "f32",
    gguf.GGMLQuantizationType.F64: "f32",
}
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)$")


class WeightFile(Protocol):
    """A source of named tensors."""

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""

    def matrix(self, name: str) -> Weight:
        """Return a matrix in the format of the file."""

    def vector(self, name: str) -> Tensor:
        """Return a vector as float32."""

    def names(self) -> list[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its data."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of floats with its type in the file; bfloat16 if it is stored in blocks."""


class SafetensorsFiles:
    """The tensors of one safetensors file or of several shards."""

    def __init__(self, paths: Sequence[Path], scheme: Scheme | None = None) -> None:
        """Map the files into memory.

        Args:
            scheme: Quantization scheme from config.json; None if the files are not quantized.

        Raises:
            ConfigError: A file is damaged.
        """
        self._owners: dict[str, safe_open] = {}
        self._scheme = scheme
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is not a readable safetensors file: {error}", field="model") from error
            for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 (not a mapping)
                self._owners[name] = file

    def has(self, name: str) -> bool:
        """Return whether there is a tensor with this name, or a quantized form of this module's weight."""
        return name in self._owners or (name.endswith(".weight") and is_packed(self._module(name)))

    def matrix(self, name: str) -> Weight:
        """Return a matrix; float16 is converted to float32, which represents it exactly. Raises ConfigError if the
        matrix is missing or damaged, or UnsupportedError if its quantization is not supported.
        """
        module = self._module(name)
        if is_packed(module):
            return read_matrix(module, self._scheme)
        tensor = self._raw(name)
        if tensor.dtype not in _DTYPES and self._scheme is not None:
            return read_matrix(module, self._scheme)
        tensor = self._get(name)
        return Weight("bf16" if tensor.dtype == torch.bfloat16 else "f32", tensor, tensor.shape[-1])

    def vector(self, name: str) -> Tensor:
        return self._get(name).float()

    def names(self) -> list[str]:
        return list(self._owners)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its data."""
        return tuple(self._owners[name].get_slice(name).get_shape())  # type: ignore[no-untyped-call]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor with its type in the file."""
        return self._raw(name)

    def _module(self, name: str) -> Module:
        return Module(name.removesuffix(".weight"), self._owners.__contains__, self._raw)

    def _raw(self, name: str) -> Tensor:
        if name not in self._owners:
            raise ConfigError(f"the weights lack the tensor {name}", field="model")
        tensor: Tensor = self._owners[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def _get(self, name: str) -> Tensor:
        tensor = self._raw(name)
        if tensor.dtype not in _DTYPES:
            raise ConfigError(f"the tensor {name} has type {tensor.dtype}, which is not supported", field="model")
        return tensor


class GgufFile:
    """The tensors of a GGUF file or of its parts; block formats that the kernels support are kept, others become
    floats.
    """

    def __init__(self, paths: Sequence[Path], permuted_heads: tuple[int, int] | None) -> None:
        """Map the files into memory.

        Args:
            permuted_heads: Numbers of heads and KV heads if the rotary pairs of q and k are stored next to each other
                (architecture llama) instead of half a head apart.

        Raises:
            ConfigError: The file is damaged.
        """
        self._tensors: dict[str, TensorEntry] = {}
        self._bytes: dict[str, NDArray[np.uint8]] = {}
        for path in paths:
            tensors, data = read_gguf_head(path).tensors, np.memmap(path, dtype=np.uint8, mode="r")
            self._tensors |= tensors
            self._bytes |= dict.fromkeys(tensors, data)
        self._permuted_heads = permuted_heads

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        return _gguf_name(name) in self._tensors

    def matrix(self, name: str) -> Weight:
        kind, columns, data = self._get(name)
        blocks = from_gguf(kind, torch.from_numpy(np.array(data)))
        if blocks is not None:
            weight = Weight(*blocks, columns)
        else:
            # Types with fewer than three bits and codebook types are converted to bfloat16.
            weight = Weight(_FORMATS.get(kind, "bf16"), _floats(name, kind, data), columns)
        order = self._row_order(name, weight.shape[0])
        return weight if order is None else weight.take(order)

    def vector(self, name: str) -> Tensor:
        kind, _, data = self._get(name)
        values = _floats(name, kind, data).flatten()
        order = self._row_order(name, values.shape[0])
        return values if order is None else values[order]

    def names(self) -> list[str]:
        """Return the names of all tensors: Hugging Face's names, where these exist."""
        return [_name_of(name) for name in self._tensors]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its data."""
        return tuple(reversed(self._tensors[_gguf_name(name)].shape))

    def tensor(self, name: str) -> Tensor:
        """Return a vector as float32, and a matrix as bfloat16, or as float32 if it is stored as floats."""
        if len(self.shape(name)) == 1:
            return self.vector(name)
        weight = self.matrix(name)
        return weight.dense() if weight.format == "f32" else weight.dense().bfloat16()

    def _row_order(self, name: str, num_rows: int) -> Tensor | None:
        if self._permuted_heads is None or not re.search(r"\.[qk]_proj\.", name):
            return None
        num_heads = self._permuted_heads[0 if ".q_proj." in name else 1]
        if num_rows % (2 * num_heads):
            raise ConfigError(
                f"the tensor {name} has {num_rows} rows; must be a multiple of {2 * num_heads}", field="model"
            )
        return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)

    def _get(self, name: str) -> tuple[gguf.GGMLQuantizationType, int, NDArray[np.uint8]]:
        """Return a tensor's type, its number of columns, and its bytes [num_rows, bytes per row]."""
        entry = self._tensors.get(_gguf_name(name))
        if entry is None:
            raise ConfigError(f"the weights lack the tensor {_gguf_name(name)}", field="model")
        try:
            kind = gguf.GGMLQuantizationType(entry.type)
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ConfigError(f"the tensor {entry.name} has the unknown type {entry.type}", field="model") from None
        columns, num_rows = entry.shape[0], math.prod(entry.shape[1:])
        row_bytes = columns // block_size * block_bytes
        data, end = self._bytes[entry.name], entry.offset + row_bytes * num_rows
        if columns % block_size or end > len(data):
            raise ConfigError(f"the tensor {entry.name} is truncated", field="model")
        return kind, columns, data[entry.offset : end].reshape(num_rows, row_bytes)


def _floats(name: str, kind: gguf.GGMLQuantizationType, rows: NDArray[np.uint8]) -> Tensor:
    """Return the values of a tensor as float32. Raises UnsupportedError if the package cannot convert its type."""
    if kind == gguf.GGMLQuantizationType.F64:
        return torch.from_numpy(rows.view(np.float64).astype(np.float32))
    try:
        values = gguf.quants.dequantize(rows, kind)
    except NotImplementedError:
        raise UnsupportedError(
            f"the tensor {name} has the type {kind.name}, which is not supported", field="model"
        ) from None
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    layer = _LAYER_NAME.match(module)
    if layer:
        return f"blk.{layer[1]}.{_GGUF_LAYER.get(layer[2], layer[2])}.{kind}"
    return f"{_GGUF_TOP.get(module, module)}.{kind}"


_TOP_NAMES = {name: hugging_face for hugging_face, name in _GGUF_TOP.items()}
_LAYER_NAMES = {name: hugging_face for hugging_face, name in _GGUF_LAYER.items()}


def _name_of(gguf_name: str) -> str:
    """Return Hugging Face's name for a GGUF tensor."""
    module, _, kind = gguf_name.rpartition(".")
    layer = re.match(r"blk\.(\d+)\.(.+)$", module)
    if layer:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES.get(layer[2], layer[2])}.{kind}"
    return f"{_TOP_NAMES.get(module, module)}.{kind}"
