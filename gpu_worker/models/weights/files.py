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

from gpu_worker.models.families.family import Names
from gpu_worker.models.weights.gguf_blocks import from_gguf
from gpu_worker.models.weights.gguf_names import LATENT_KV_UP, GgufNames
from gpu_worker.models.weights.schemes import Module, Scheme, is_packed, read_matrix
from gpu_worker.models.weights.weight import Weight, WeightFormat
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.prepare.gguf_file import TensorEntry, read_gguf_head

_FORMATS: dict[gguf.GGMLQuantizationType, WeightFormat] = {
    gguf.GGMLQuantizationType.F32: "f32",
    gguf.GGMLQuantizationType.F16: "f32",
    gguf.GGMLQuantizationType.F64: "f32",
}
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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

    @property
    def has_integer_kv(self) -> bool:
        """Whether the scales of a KV cache, if there are any, are those of integers."""


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

    @property
    def has_integer_kv(self) -> bool:
        return self._scheme is not None and bool(self._scheme.settings.get("has_integer_kv"))

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

    has_integer_kv = False

    def __init__(
        self, paths: Sequence[Path], names: Names, permuted_heads: tuple[int, int] | None, norm_offset: float = 0.0
    ) -> None:
        """Map the files into memory.

        Args:
            names: The family's names, with separate experts.
            permuted_heads: Numbers of heads and KV heads if the rotary pairs of q and k are stored next to each other
                instead of half a head apart.
            norm_offset: What the file adds to the weights of norms.

        Raises:
            ConfigError: The file is damaged.
        """
        self._tensors: dict[str, TensorEntry] = {}
        self._bytes: dict[str, NDArray[np.uint8]] = {}
        for path in paths:
            tensors, data = read_gguf_head(path).tensors, np.memmap(path, dtype=np.uint8, mode="r")
            self._tensors |= tensors
            self._bytes |= dict.fromkeys(tensors, data)
        self._names = GgufNames(names, self._tensors)
        self._permuted_heads, self._norm_offset = permuted_heads, norm_offset

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        return self._names.find(name)[0] in self._tensors

    def matrix(self, name: str) -> Weight:
        stored = self._names.find(name)[0]
        if LATENT_KV_UP in stored and stored not in self._tensors:
            return self._latent_kv_up(stored)
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
        if self._norm_offset and name.endswith("norm.weight"):
            values = values - self._norm_offset
        order = self._row_order(name, values.shape[0])
        return values if order is None else values[order]

    def names(self) -> list[str]:
        """Return the names of all tensors: Hugging Face's names, where these exist."""
        return [name for entry in self._tensors.values() for name in self._names.names_of(entry.name, entry.shape[-1])]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its data."""
        stored, expert = self._names.find(name)
        shape = tuple(reversed(self._tensors[stored].shape))
        return shape if expert is None else shape[1:]

    def tensor(self, name: str) -> Tensor:
        """Return a vector as float32, and a matrix as bfloat16, or as float32 if it is stored as floats."""
        if len(self.shape(name)) == 1:
            return self.vector(name)
        weight = self.matrix(name)
        return weight.dense() if weight.format == "f32" else weight.dense().bfloat16()

    def _latent_kv_up(self, stored: str) -> Weight:
        """Return [heads * (key size + value size), rank], of which the file has [heads, rank, key size] and [heads,
        value size, rank].
        """
        parts = []
        for part in ("attn_k_b", "attn_v_b"):
            found = stored.replace(LATENT_KV_UP, part)
            if found not in self._tensors or len(self._tensors[found].shape) != 3:
                raise ConfigError(
                    f"the weights lack the tensor {stored}, or {found} with a part per head", field="model"
                )
            kind, _, data = self._read(self._tensors[found], None)
            parts.append(_floats(found, kind, data).view(tuple(reversed(self._tensors[found].shape))))
        keys, values = parts
        rows = torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
        return Weight("f32", rows, rows.shape[1])

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
        stored, expert = self._names.find(name)
        entry = self._tensors.get(stored)
        if entry is None:
            raise ConfigError(f"the weights lack the tensor {stored}", field="model")
        return self._read(entry, expert)

    def _read(self, entry: TensorEntry, expert: int | None) -> tuple[gguf.GGMLQuantizationType, int, NDArray[np.uint8]]:
        """Do what `_get` does, for a tensor or for an expert's part of it."""
        try:
            kind = gguf.GGMLQuantizationType(entry.type)
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ConfigError(f"the tensor {entry.name} has the unknown type {entry.type}", field="model") from None
        columns, num_rows = entry.shape[0], math.prod(entry.shape[1:])
        if expert is not None and expert >= entry.shape[-1]:
            raise ConfigError(f"the tensor {entry.name} has no expert {expert}", field="model")
        row_bytes = columns // block_size * block_bytes
        data, end = self._bytes[entry.name], entry.offset + row_bytes * num_rows
        if columns % block_size or end > len(data):
            raise ConfigError(f"the tensor {entry.name} is truncated", field="model")
        rows = data[entry.offset : end].reshape(num_rows, row_bytes)
        if expert is None:
            return kind, columns, rows
        if len(entry.shape) == 2:  # a vector of each expert
            return kind, columns, rows[expert : expert + 1]
        return kind, columns, rows.reshape(entry.shape[-1], -1, row_bytes)[expert]


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
