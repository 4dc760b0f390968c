from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_worker.model_runner import ModelRunner
from midstream.model.folder import open_model_folder
from tests import interpreter
from tests.gpu_worker.tiny_models import make_runner, make_tiny_model

# With more threads, PyTorch's threads would wait for each other, especially while other tests run in parallel.
torch.set_num_threads(1)
interpreter.speed_up()

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral_window": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    """Return transformers' model of each family in turn, and its folder."""
    name, settings = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return make_tiny_model(folder, name, **settings), folder


@pytest.fixture(scope="session")
def transformers_model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    """Return transformers' model with the weights of the embedded model, in float32."""
    # The first process of the test run that needs the model saves it for the other processes.
    root = tmp_path_factory.getbasetemp()
    kept = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "embedded-in-float32"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            _write_from_gguf(open_model_folder("smollm2").path / "model.gguf", kept)
    made: tuple[torch.nn.Module, dict[str, Any]] = LlamaForCausalLM.from_pretrained(
        kept, dtype=torch.float32, output_loading_info=True
    )
    model, problems = made
    assert not any(problems.values())
    return model


class _Reader(GGUFReader):  # type: ignore[misc]
    """Reads a GGUF file without the arrays in its metadata, such as the vocabulary, which the package reads slowly,
    item by item.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            field: tuple[int, list[Any], list[int], list[GGUFValueType]] = super()._get_field_parts(orig_offs, raw_type)
            return field
        item_type, count = struct.unpack_from("<IQ", self.data, orig_offs)
        end = orig_offs + 12
        if item_type == GGUFValueType.STRING:
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", self.data, end)[0]
        else:
            end += count * self.gguf_scalar_to_np[item_type]().itemsize
        return end - orig_offs, [], [], [GGUFValueType.ARRAY]


def _write_from_gguf(path: Path, folder: Path) -> None:
    """Convert a Llama model in a GGUF file to a checkpoint of transformers, dequantized with the `gguf` package;
    transformers' own reader takes four times as long.
    """
    reader = _Reader(path)
    names = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
        "max_position_embeddings": "context_length",
        "vocab_size": "vocab_size",
    }
    config = LlamaConfig(**{name: reader.fields[f"llama.{key}"].contents() for name, key in names.items()})
    tensors = {item.name: torch.tensor(dequantize(item.data, item.tensor_type)) for item in reader.tensors}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    parts |= {"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    parts |= {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
    weights = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "token_embd"}
    for i in range(config.num_hidden_layers):
        weights |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for ours, theirs in parts.items()}
    state = {}
    for name, stored in weights.items():
        tensor = tensors[f"{stored}.weight"]
        if num_heads := heads.get(stored.rpartition(".")[2]):
            # GGUF interleaves the two halves that rotary embedding rotates together.
            tensor = tensor.view(num_heads, -1, 2, config.hidden_size).transpose(1, 2).reshape(tensor.shape)
        state[f"{name}.weight"] = tensor.clone() if name == "lm_head" else tensor
    config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder, "Llama")
    return folder


@pytest.fixture(scope="session")
def tiny_runner(tiny_folder: Path) -> ModelRunner:
    return make_runner(tiny_folder)
