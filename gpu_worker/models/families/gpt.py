"""GPT-2, OPT, Phi-1, Phi-2, StarCoder 2 and StableLM: layer norms with biases, mostly plain feed-forward networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Names, Settings, activation_of, plain, rotary_of, windows_of

_LAYER_NORM: dict[str, Any] = {"norm": "layer", "has_norm_bias": True, "has_attention_bias": None}


def _without_rotary(s: Settings, **changes: Any) -> DecoderDescription:
    """Return a decoder that adds position embeddings to its input instead of rotating queries and keys."""
    num_heads = s.size("num_attention_heads")
    head_dim = s.size("head_dim", default=s.size("hidden_size") // num_heads)
    fields = {"num_kv_heads": num_heads, "head_dim": head_dim, "scale": head_dim**-0.5, **changes}
    rotary = (None,) * s.size("num_hidden_layers")
    ties_embeddings = s.flag("tie_word_embeddings", True)
    return plain(s, **_LAYER_NORM, has_gated_ffn=False, rotary=rotary, ties_embeddings=ties_embeddings, **fields)


def _read_gpt2(config: Mapping[str, Any]) -> DecoderDescription:
    names = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    s = Settings({**config, **{name: config.get(old, config.get(name)) for name, old in names.items()}})
    s.refuse(scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return _without_rotary(
        s,
        norm_eps=s.number("layer_norm_epsilon", 1e-5),
        intermediate_size=s.size("n_inner", default=4 * s.size("hidden_size")),
        activation=activation_of(s.get("activation_function", "gelu_new")),
        position_offset=0,
        **({} if s.flag("scale_attn_weights", True) else {"scale": 1.0}),
    )


def _read_opt(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config)
    s.refuse(
        do_layer_norm_before=True,
        layer_norm_elementwise_affine=True,
        word_embed_proj_dim=s.size("hidden_size"),
        _remove_final_layer_norm=False,
    )
    return _without_rotary(
        s,
        norm_eps=1e-5,
        intermediate_size=s.size("ffn_dim"),
        activation=activation_of(s.get("activation_function", "relu")),
        # The first two rows of OPT's position table are reserved for padding.
        position_offset=2,
    )


def _read_phi(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config)
    s.refuse(qk_layernorm=False)
    head_dim = s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads"))
    return plain(
        s,
        **_LAYER_NORM,
        norm_eps=s.number("layer_norm_eps", 1e-5),
        is_parallel=True,
        activation=activation_of(s.get("hidden_act", "gelu_new")),
        has_gated_ffn=False,
        rotary=(rotary_of(s, head_dim, part=0.5),) * s.size("num_hidden_layers"),
    )


def _read_starcoder2(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, tie_word_embeddings=True)
    return plain(
        s,
        **_LAYER_NORM,
        norm_eps=s.number("norm_epsilon", 1e-5),
        activation=activation_of(s.get("hidden_act", "gelu_pytorch_tanh")),
        has_gated_ffn=False,
        windows=windows_of(s, s.get("sliding_window"), None),
    )


def _read_stablelm(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config)
    s.refuse(qk_layernorm=False)
    head_dim = s.size("hidden_size") // s.size("num_attention_heads")
    return plain(
        s,
        **_LAYER_NORM,
        norm_eps=s.number("layer_norm_eps", 1e-5),
        is_parallel=s.flag("use_parallel_residual", False),
        rotary=(rotary_of(s, head_dim, part=0.25),) * s.size("num_hidden_layers"),
    )


GPT2 = Family(
    title="GPT-2",
    types=("gpt2",),
    read=_read_gpt2,
    names=Names(
        prefixes=("transformer.", ""),
        embedding="transformer.wte",
        positions="transformer.wpe",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}.",
        input_norm="ln_1",
        qkv=("attn.c_attn",),
        attention_output="attn.c_proj",
        ffn_norm="ln_2",
        gate_up=("mlp.c_fc",),
        down="mlp.c_proj",
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    ),
)
OPT = Family(
    title="OPT",
    types=("opt",),
    read=_read_opt,
    names=Names(
        prefixes=("model.decoder.", "decoder."),
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        final_norm="model.decoder.final_layer_norm",
        layer="model.decoder.layers.{}.",
        input_norm="self_attn_layer_norm",
        attention_output="self_attn.out_proj",
        ffn_norm="final_layer_norm",
        gate_up=("fc1",),
        down="fc2",
    ),
)
PHI = Family(
    title="Phi-1, Phi-2",
    types=("phi",),
    read=_read_phi,
    names=Names(
        final_norm="model.final_layernorm", attention_output="self_attn.dense", gate_up=("mlp.fc1",), down="mlp.fc2"
    ),
)
STARCODER2 = Family(
    title="StarCoder 2",
    types=("starcoder2",),
    read=_read_starcoder2,
    names=Names(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
)
STABLELM = Family(title="StableLM", types=("stablelm",), read=_read_stablelm)
