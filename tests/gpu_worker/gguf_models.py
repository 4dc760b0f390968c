"""GGUF files of tiny random models, with the layout that llama.cpp's converter gives each architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

Value = str | int | float | bool | list[int]
_ROPE = {"rope_parameters": {"rope_theta": 500.0}}


@dataclass(frozen=True)
class Tiny:
    """A tiny model of one architecture.

    Attributes:
        family: Its name in transformers.
        settings: Settings of transformers' configuration.
        keys: Returns the metadata that only this architecture has, given the configuration.
        names: The architecture whose table of names in the package `gguf` applies.
        is_permuted: Whether the rotary pairs of q and k are stored next to each other.
        norm_offset: What is added to the weights of norms.
    """

    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    keys: Callable[[Any], Mapping[str, Value]] = lambda _: {}
    names: gguf.MODEL_ARCH = gguf.MODEL_ARCH.LLAMA
    is_permuted: bool = False
    norm_offset: float = 0.0


def _experts(config: Any) -> dict[str, Value]:
    count = (
        getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or config.n_routed_experts
    )
    size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return {
        "expert_count": count, "expert_used_count": config.num_experts_per_tok, "expert_feed_forward_length": size
    }  # fmt: skip


def _granite(config: Any) -> dict[str, Value]:
    return {
        "embedding_scale": config.embedding_multiplier,
        "attention.scale": config.attention_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _lfm2(config: Any) -> dict[str, Value]:
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    return {"attention.head_count_kv": heads, "shortconv.l_cache": config.conv_L_cache}


def _deepseek(config: Any) -> dict[str, Value]:
    return {
        **_experts(config),
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": config.first_k_dense_replace,
    }


def _phi_factors(config: Any) -> dict[str, Value]:
    return {
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "rope.scaling.attn_factor": config.rope_parameters["attention_factor"],
    }


_SCALES = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0,
}  # fmt: skip
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LONG = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i / 4 for i in range(8)], "attention_factor": 1.25, "original_max_position_embeddings": 256,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_group": 2, "topk_group": 1,
}  # fmt: skip
ARCH = gguf.MODEL_ARCH
# By `general.architecture`, and what distinguishes several models of one.
MODELS: dict[str, Tiny] = {
    "llama": Tiny("Llama", {**_ROPE, "head_dim": 32}, is_permuted=True),
    "llama experts": Tiny(
        "Mixtral",
        {**_ROPE, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        _experts,
        is_permuted=True,
    ),
    "qwen2": Tiny("Qwen2", {**_ROPE, "tie_word_embeddings": True}, names=ARCH.QWEN2),
    "qwen2moe": Tiny(
        "Qwen2Moe",
        {**_ROPE, **_MIXTURE, "shared_expert_intermediate_size": 96, "norm_topk_prob": False},
        lambda c: {**_experts(c), "expert_shared_feed_forward_length": c.shared_expert_intermediate_size},
        ARCH.QWEN2MOE,
    ),
    "qwen3": Tiny("Qwen3", {**_ROPE, "head_dim": 32}, names=ARCH.QWEN3),
    "qwen3moe": Tiny(
        "Qwen3Moe", {**_ROPE, **_MIXTURE, "head_dim": 32, "norm_topk_prob": True}, _experts, ARCH.QWEN3MOE
    ),
    "gemma": Tiny("Gemma", {**_ROPE, "head_dim": 32}, names=ARCH.GEMMA, norm_offset=1.0),
    "gemma2": Tiny(
        "Gemma2",
        {**_ROPE, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24, "num_hidden_layers": 4},
        lambda c: {
            "attn_logit_softcapping": c.attn_logit_softcapping, "final_logit_softcapping": c.final_logit_softcapping,
        },
        ARCH.GEMMA2,
        norm_offset=1.0,
    ),
    "gemma3": Tiny(
        "Gemma3Text",
        {
            "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24, "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        lambda _: {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ARCH.GEMMA3,
        norm_offset=1.0,
    ),
    "phi3": Tiny("Phi3", {**_ROPE, "pad_token_id": 0}, names=ARCH.PHI3),
    "phi3 long": Tiny(
        "Phi3",
        {"rope_parameters": _LONG, "original_max_position_embeddings": 256, "pad_token_id": 0},
        _phi_factors,
        ARCH.PHI3,
    ),
    "granite": Tiny("Granite", {**_ROPE, **_SCALES}, _granite, ARCH.GRANITE, is_permuted=True),
    "granitemoe": Tiny(
        "GraniteMoeShared",
        {**_ROPE, **_SCALES, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
        lambda c: {**_granite(c), **_experts(c), "expert_shared_feed_forward_length": c.shared_intermediate_size},
        ARCH.GRANITE_MOE,
        is_permuted=True,
    ),
    "olmo2": Tiny("Olmo2", _ROPE, names=ARCH.OLMO2),
    "olmo2 windows": Tiny(
        "Olmo3",
        {
            "sliding_window": 24, "num_hidden_layers": 4,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 500.0} for kind in ("full_attention", "sliding_attention")
            },
        },
        names=ARCH.OLMO2,
    ),
    "olmoe": Tiny(
        "Olmoe",
        {**_ROPE, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
        _experts,
        ARCH.OLMOE,
    ),
    "glm4": Tiny(
        "Glm4",
        {
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}, "head_dim": 32, "pad_token_id": 0,
            "attention_bias": True,
        },
        names=ARCH.GLM4,
    ),
    "glm4moe": Tiny(
        "Glm4Moe",
        {
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}, "head_dim": 32, "pad_token_id": 0,
            "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "n_shared_experts": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
        lambda c: {
            **_experts(c), "expert_shared_count": c.n_shared_experts, "expert_weights_scale": c.routed_scaling_factor,
            "leading_dense_block_count": c.first_k_dense_replace, "expert_gating_func": 2, "expert_weights_norm": True,
        },
        ARCH.GLM4_MOE,
    ),
    "gpt-oss": Tiny(
        "GptOss",
        {
            **_ROPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "head_dim": 32,
            "num_hidden_layers": 4,
        },
        _experts,
        ARCH.GPT_OSS,
    ),
    "smollm3": Tiny(
        "SmolLM3", {**_ROPE, "num_hidden_layers": 5, "pad_token_id": 0}, names=ARCH.SMOLLM3, is_permuted=True
    ),
    "command-r": Tiny(
        "Cohere", {**_ROPE, "logit_scale": 0.25}, lambda c: {"logit_scale": c.logit_scale}, ARCH.COMMAND_R
    ),
    "cohere2": Tiny(
        "Cohere2",
        {**_ROPE, "logit_scale": 0.25, "sliding_window": 24, "num_hidden_layers": 4},
        lambda c: {"logit_scale": c.logit_scale},
        ARCH.COHERE2,
    ),
    "seed_oss": Tiny("SeedOss", {**_ROPE, "head_dim": 32}, names=ARCH.SEED_OSS),
    "ernie4_5": Tiny("Ernie4_5", {**_ROPE, "head_dim": 16}, names=ARCH.ERNIE4_5),
    "lfm2": Tiny(
        "Lfm2",
        {**_ROPE, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
        _lfm2,
        ARCH.LFM2,
    ),
    "lfm2moe": Tiny(
        "Lfm2Moe",
        {
            **_ROPE, **_MIXTURE, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
            "norm_topk_prob": True, "use_expert_bias": True,
        },
        lambda c: {
            **_lfm2(c), **_experts(c), "leading_dense_block_count": c.num_dense_layers, "expert_gating_func": 2,
        },
        ARCH.LFM2MOE,
    ),
    "deepseek2": Tiny("DeepseekV3", {**_ROPE, **_LATENT, "q_lora_rank": 32}, _deepseek, ARCH.DEEPSEEK2),
    "arcee": Tiny("Arcee", _ROPE, names=ARCH.ARCEE, is_permuted=True),
}  # fmt: skip


def write_gguf(
    path: Path,
    name: str,
    model: torch.nn.Module,
    rope: Mapping[str, str | float] = MappingProxyType({}),
    dtype: type = np.float32,
    tokens: Sequence[str] = (),
    adds_eos: bool = False,
    part_size: int = 0,
) -> None:
    """Write a model of MODELS with tensors of type `dtype`; `rope` contains settings, by their keys in the package
    `gguf`. The vocabulary begins with `tokens`, if given, which include the bytes and `ab`; the last of them ends a
    text if `adds_eos`.
    """
    tiny, architecture = MODELS[name], name.partition(" ")[0]
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_size)
    for key, value in {
        **{f"{architecture}.{key}": value for key, value in {**_keys(config), **tiny.keys(config)}.items()},
        **{key.format(arch=architecture): value for key, value in rope.items()},
    }.items():
        _add(writer, key, value)
    _add_vocabulary(writer, tokens, config.vocab_size, adds_eos=adds_eos)
    names = gguf.get_tensor_name_map(tiny.names, config.num_hidden_layers)
    for stored, tensor in _stored(tiny, config, model.state_dict(), names):
        writer.add_tensor(stored, tensor.contiguous().numpy().astype(dtype))
    parameters = config.rope_parameters
    if "short_factor" in parameters:
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(parameters[f"{kind}_factor"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _keys(config: Any) -> dict[str, Value]:
    """Return the metadata that all architectures have."""
    parameters = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    norm = "layer_norm_epsilon" if hasattr(config, "layer_norm_eps") else "layer_norm_rms_epsilon"
    epsilons = (getattr(config, name, None) for name in ("layer_norm_eps", "rms_norm_eps", "norm_eps"))
    keys: dict[str, Value] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        f"attention.{norm}": next(epsilon for epsilon in epsilons if epsilon is not None),
        "rope.freq_base": parameters.get("full_attention", parameters)["rope_theta"],
        "rope.dimension_count": int(head_dim * parameters.get("partial_rotary_factor", 1.0)),
    }
    if config.model_type != "qwen2":  # as in llama.cpp, Qwen2's head size follows from the hidden size
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if window := getattr(config, "sliding_window", None):
        keys["attention.sliding_window"] = window
    return keys


def _add_vocabulary(writer: gguf.GGUFWriter, tokens: Sequence[str], size: int, *, adds_eos: bool) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, *(f"t{i}" for i in range(len(tokens), size))])
    writer.add_add_eos_token(adds_eos)
    if tokens:
        writer.add_eos_token_id(len(tokens) - 1)
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b" if tokens else "t 1"])


def _add(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)


def _stored(
    tiny: Tiny, config: Any, state: Mapping[str, Tensor], names: gguf.TensorNameMap
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by their names in the file."""
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, values in _parts(name, tensor, config):
            stored = part if part.startswith("blk.") else names.get_name(part, (".weight", ".bias"))
            assert stored is not None, part
            if "norm" in part and part.endswith(".weight"):
                yield stored, values + tiny.norm_offset
            elif tiny.is_permuted and (".q_proj." in part or ".k_proj." in part):
                heads = config.num_attention_heads if ".q_proj." in part else config.num_key_value_heads
                pairs = values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2)
                yield stored, pairs.reshape(values.shape)
            else:
                yield stored, values


def _parts(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of transformers, divided as in the file: gate and up matrices of experts are not joined."""
    if config.model_type == "granitemoeshared" and ("block_sparse_moe" in name or "shared_mlp" in name):
        yield from _granite_parts(name, tensor)
    elif name.endswith("self_attn.sinks"):
        yield name + ".weight", tensor
    elif name.endswith(("e_score_correction_bias", "feed_forward.expert_bias")):
        yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", tensor
    elif name.endswith("conv.conv.weight"):
        yield name, tensor.squeeze(1)
    elif name.endswith("kv_b_proj.weight"):  # divided into keys, which are transposed, and values
        heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
        yield f"blk.{name.split('.')[2]}.attn_k_b.weight", keys.transpose(1, 2)
        yield f"blk.{name.split('.')[2]}.attn_v_b.weight", values
    elif ".experts." in name:
        yield from _expert_parts(name, tensor, is_gpt_oss=config.model_type == "gpt_oss")
    else:
        yield name, tensor


def _expert_parts(name: str, tensor: Tensor, *, is_gpt_oss: bool) -> Iterator[tuple[str, Tensor]]:
    prefix, _, part = name.rpartition(".")
    kind = "bias" if part.endswith("_bias") else "weight"
    if is_gpt_oss and kind == "weight":
        tensor = tensor.transpose(1, 2)
    if part.startswith("down_proj"):
        yield f"{prefix}.down_proj.{kind}", tensor
        return
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if is_gpt_oss else tensor.chunk(2, dim=1)
    yield f"{prefix}.gate_proj.{kind}", gate
    yield f"{prefix}.up_proj.{kind}", up


def _granite_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    block = f"blk.{name.split('.')[2]}"
    if "router" in name:
        yield f"{block}.ffn_gate_inp.weight", tensor
        return
    kind, axis = ("shexp", 0) if "shared_mlp" in name else ("exps", 1)
    if "down_proj" in name or "output_linear" in name:
        yield f"{block}.ffn_down_{kind}.weight", tensor
        return
    gate, up = tensor.chunk(2, dim=axis)
    yield f"{block}.ffn_gate_{kind}.weight", gate
    yield f"{block}.ffn_up_{kind}.weight", up
