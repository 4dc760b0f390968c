"""Reads GGUF files of encoders into their transformers implementation."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from torch import Tensor

from gpu_worker.models.families.family import Names
from gpu_worker.models.weights.files import GgufFile
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import ModelFolder
from midstream.model.prepare.gguf_file import read_gguf_head

_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
# By architecture: the prefix of layers, and their modules by the names in the file. A list has the parts of a matrix.
_LAYERS: dict[str, tuple[str, dict[str, str | list[str]]]] = {
    "bert": (
        "encoder.layer",
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
    ),
    "nomic_bert": (
        "layers",
        {
            "attn_qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "attn_output": "self_attn.o_proj",
            "attn_output_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
            "layer_output_norm": "post_mlp_layernorm",
        },
    ),
}


def load_gguf_encoder(
    folder: ModelFolder, dtype: torch.dtype, auto: Any, attention: str, may_lack: tuple[str, ...] = ()
) -> Any:
    """Load an encoder; arguments and errors are those of `load_transformers`."""
    if folder.architecture not in _LAYERS:
        raise UnsupportedError(f"a GGUF file of {folder.architecture!r} is not supported", field="model")
    config = transformers.AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    model: Any = auto.from_config(config, attn_implementation=attention, dtype=dtype)
    file = GgufFile(folder.weight_files, Names(), None)
    state: dict[str, Tensor] = {}
    for stored in [name for path in folder.weight_files for name in read_gguf_head(path).tensors]:
        names = _names_of(folder.architecture, stored)
        values = file.vector(stored) if len(file.shape(stored)) == 1 else file.matrix(stored).dense()
        if len(values) % len(names):
            raise ConfigError(f"the tensor {stored} has {len(values)} rows; must have 3 equal parts", field="model")
        state |= zip(names, values.to(dtype).chunk(len(names)), strict=True)
    wanted = model.state_dict()
    for name, tensor in state.items():
        if name not in wanted or tensor.shape != wanted[name].shape:
            raise ConfigError(
                f"the weights have a tensor {name} of shape {list(tensor.shape)}, which does not fit", field="model"
            )
    missing = [name for name in wanted if name not in state and not name.startswith(may_lack or ("\0",))]
    if missing:
        raise ConfigError(f"the weights lack {', '.join(missing[:3])}", field="model")
    model.load_state_dict(state, strict=False)
    return model.eval()


def _names_of(architecture: str, stored: str) -> list[str]:
    """Return the names of the parts of a stored tensor in transformers."""
    prefix, modules = _LAYERS[architecture]
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored)
    if layer is None:
        module, _, kind = stored.rpartition(".")
        return [f"{_TOP.get(module, module)}.{kind}"]
    found = modules.get(layer[2], layer[2])
    return [f"{prefix}.{layer[1]}.{part}.{layer[3]}" for part in ([found] if isinstance(found, str) else found)]
