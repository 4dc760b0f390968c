"""LoRA adapters given as TensorRT-LLM's tensors: written as a PEFT folder, which the service loads."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from midstream.client.request import tensor_of
from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.executor.request_parts import LoraConfig
from midstream.executor.session import Session
from midstream.executor.tensors import AnyTensor, values_of
from protos import generation_pb2 as pb

# PEFT's names for the numbers of TensorRT-LLM's modules.
_MODULES = {
    1: "self_attn.q_proj",
    2: "self_attn.k_proj",
    3: "self_attn.v_proj",
    4: "self_attn.o_proj",
    5: "mlp.gate_proj",
    6: "mlp.down_proj",
    7: "mlp.up_proj",
}
_DTYPES = {
    pb.Tensor.DTYPE_FLOAT32: ("F32", 4),
    pb.Tensor.DTYPE_FLOAT16: ("F16", 2),
    pb.Tensor.DTYPE_BFLOAT16: ("BF16", 2),
}


class LoraFolders:
    """The adapters of an executor, by the number of their task."""

    def __init__(self, session: Session, model: Mapping[str, Any] | None) -> None:
        """Create an empty set; `model` is the configuration of a model on this machine."""
        self._session, self._model = session, model
        self._home: TemporaryDirectory[str] | None = None
        self._names: dict[int, str] = {}

    def to_proto(self, lora: LoraConfig) -> pb.LoraConfig:
        """Return the message for an adapter, whose weights are kept for later requests.

        Raises:
            InvalidArgumentError: The weights do not have the sizes that the configuration says.
            UnsupportedError: The adapter changes a module that the service does not adapt.
        """
        if lora.weights is None or lora.task_id in self._names:
            name = self._names.get(lora.task_id, str(lora.task_id))
            path = "" if self._home is None or lora.task_id not in self._names else str(Path(self._home.name) / name)
            return pb.LoraConfig(name=name, path=path)
        if self._model is None:
            raise UnsupportedError(
                "weights require services that this executor has started; name a loaded adapter", field="lora_config"
            )
        if self._home is None:
            self._home = TemporaryDirectory(prefix="midstream-lora-")
        # The same number may be another adapter in another executor of the service.
        name = self._session.wire_id(lora.task_id) + "-lora"
        folder = Path(self._home.name) / name
        write_adapter(lora.weights, lora.config, self._model, folder)
        self._names[lora.task_id] = name
        return pb.LoraConfig(name=name, path=str(folder))

    def task_id(self, name: str) -> int | None:
        """Return the number of the adapter that has this name in the service; None if it has no number."""
        known = next((task_id for task_id, item in self._names.items() if item == name), None)
        return int(name) if known is None and name.isdecimal() else known


def write_adapter(weights: AnyTensor, config: AnyTensor, model: Mapping[str, Any], folder: Path) -> None:
    """Write a PEFT folder.

    Args:
        weights: Values [modules, at least as many as the largest module has], optionally with a first axis of size 1.
        config: Number of the module, layer and rank [modules, 3], likewise.
        model: The model's configuration, which has the sizes of modules.
        folder: The folder to create.

    Raises: As in LoraFolders.to_proto.
    """
    message = tensor_of(weights, "lora_config.weights")
    if message.dtype not in _DTYPES:
        raise InvalidArgumentError("must be float32, float16 or bfloat16", field="lora_config.weights")
    dtype, value_bytes = _DTYPES[message.dtype]
    rows = values_of(config, "lora_config.config")
    while len(rows) == 1 and isinstance(rows[0][0], list):
        rows = rows[0]
    row_bytes = len(message.data) // max(len(rows), 1)
    sizes = _sizes(model)
    tensors: dict[str, tuple[tuple[int, int], bytes]] = {}
    ranks: dict[str, int] = {}
    for number, (module, layer, rank, *_) in enumerate(rows):
        if module not in _MODULES:
            raise UnsupportedError(f"module {module} cannot be adapted; use 1 to 7", field="lora_config.config")
        name = f"model.layers.{layer}.{_MODULES[module]}"
        data = message.data[number * row_bytes : (number + 1) * row_bytes]
        inputs, outputs = sizes[_MODULES[module]]
        middle, end = rank * inputs * value_bytes, rank * (inputs + outputs) * value_bytes
        if len(data) < end:
            raise InvalidArgumentError(
                f"has {row_bytes // value_bytes} values for {name}; must have at least {end // value_bytes}",
                field="lora_config.weights",
            )
        tensors[f"base_model.model.{name}.lora_A.weight"] = ((rank, inputs), data[:middle])
        tensors[f"base_model.model.{name}.lora_B.weight"] = ((outputs, rank), data[middle:end])
        ranks[name] = rank
    folder.mkdir(parents=True)
    _write_safetensors(tensors, dtype, folder / "adapter_model.safetensors")
    largest = max(ranks.values())
    # The weights include the scale, alpha / rank.
    described = {
        "peft_type": "LORA",
        "r": largest,
        "lora_alpha": largest,
        "target_modules": sorted({name.rpartition(".")[2] for name in ranks}),
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != largest},
        "alpha_pattern": {name: rank for name, rank in ranks.items() if rank != largest},
    }
    (folder / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")


def _sizes(model: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the numbers of inputs and outputs of each module, from the model's configuration."""
    try:
        hidden, heads, inner = model["hidden_size"], model["num_attention_heads"], model["intermediate_size"]
        head = model.get("head_dim") or hidden // heads
        queries, keys = heads * head, (model.get("num_key_value_heads") or heads) * head
    except (KeyError, TypeError) as error:
        raise UnsupportedError(f"the model's sizes are unknown ({error}); use a folder", field="lora_config") from None
    return {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def _write_safetensors(tensors: dict[str, tuple[tuple[int, int], bytes]], dtype: str, file: Path) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, data in tensors.values()))
