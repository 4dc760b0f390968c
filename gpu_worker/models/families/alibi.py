"""GPT-NeoX, Falcon, Bloom and MPT: layer norms and plain feed-forward networks; all but GPT-NeoX may have ALiBi."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Names, Settings, activation_of, plain, rotary_of

_DEFAULT_LENGTH = 2048
_FUSED = Names(
    prefixes=("transformer.", ""),
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    parallel_norms=("ln_attn", "ln_mlp"),
    qkv=("self_attention.query_key_value",),
    attention_output="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


def _of_power(count: int) -> list[float]:
    """Return the slopes of a number of heads that is a power of 2."""
    return [2.0 ** (-8.0 * (head + 1) / count) for head in range(count)]


def _slopes(num_heads: int) -> list[float]:
    """Return the slopes of Bloom and Falcon; with another number of heads than a power of 2, every other slope of twice
    as many heads comes last.
    """
    power = 1 << (num_heads.bit_length() - 1)
    return _of_power(power) + _of_power(2 * power)[::2][: num_heads - power]


def _plain(s: Settings, **changes: Any) -> DecoderDescription:
    return plain(s, norm="layer", has_attention_bias=None, has_gated_ffn=False, **changes)


def _renamed(config: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """Return the settings with those of other names under the usual ones."""
    return {**config, **{name: config.get(other, config.get(name)) for name, other in names.items()}}


def _read_neox(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(_renamed(config, partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base"))
    is_parallel = s.flag("use_parallel_residual", True)
    head_dim = s.size("hidden_size") // s.size("num_attention_heads")
    return _plain(
        s,
        num_kv_heads=s.size("num_attention_heads"),
        has_norm_bias=True,
        norm_eps=s.number("layer_norm_eps", 1e-5),
        activation=activation_of(s.get("hidden_act", "gelu")),
        rotary=(rotary_of(s, head_dim, part=0.25),) * s.size("num_hidden_layers"),
        is_parallel=is_parallel,
        has_two_norms=is_parallel,
        has_grouped_qkv=True,
    )


def _read_falcon(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(_renamed(config, hidden_size="n_embed"), max_position_embeddings=_DEFAULT_LENGTH)
    num_heads, num_layers = s.size("num_attention_heads"), s.size("num_hidden_layers")
    head_dim = s.size("hidden_size") // num_heads
    is_new, has_alibi = s.flag("new_decoder_architecture", False), s.flag("alibi", False)
    if is_new:
        s.refuse(parallel_attn=True)
    is_single = not is_new and s.flag("multi_query", True)
    alibi: tuple[float, ...] = ()
    if has_alibi:
        # transformers rounds the slopes to bfloat16, and divides the biases as it does the scores. It also rounds the
        # biases, which are exact here.
        alibi = tuple((torch.tensor(_slopes(num_heads)).bfloat16().double() * head_dim**-0.5).tolist())
    return _plain(
        s,
        intermediate_size=s.size("ffn_hidden_size", default=4 * s.size("hidden_size")),
        num_kv_heads=1 if is_single else s.size("num_kv_heads", default=num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        has_norm_bias=True,
        norm_eps=s.number("layer_norm_epsilon", 1e-5),
        activation=activation_of(s.get("activation", "gelu")),
        rotary=(None if has_alibi else rotary_of(s, head_dim),) * num_layers,
        alibi=alibi,
        is_parallel=is_new or s.flag("parallel_attn", True),
        has_two_norms=is_new and s.size("num_ln_in_parallel_attn", default=2) == 2,
        has_grouped_qkv=not is_single,
        ties_embeddings=s.flag("tie_word_embeddings", True),
    )


def _read_bloom(config: Mapping[str, Any]) -> DecoderDescription:
    names = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    s = Settings(
        {"max_position_embeddings": config.get("seq_length"), **_renamed(config, **names)},
        max_position_embeddings=_DEFAULT_LENGTH,
    )
    s.refuse(apply_residual_connection_post_layernorm=False)
    num_heads = s.size("num_attention_heads")
    return _plain(
        s,
        intermediate_size=4 * s.size("hidden_size"),
        num_kv_heads=num_heads,
        has_norm_bias=True,
        norm_eps=s.number("layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        rotary=(None,) * s.size("num_hidden_layers"),
        alibi=tuple(_slopes(num_heads)),
        has_embedding_norm=True,
        has_grouped_qkv=True,
        ties_embeddings=s.flag("tie_word_embeddings", True),
    )


def _read_mpt(config: Mapping[str, Any]) -> DecoderDescription:
    names = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    }
    s = Settings(_renamed(config, **names))
    s.refuse(no_bias=True, logit_scale=None, expansion_ratio=4)
    # As in transformers, biases are always added, with the slopes of `alibi_bias_max` 8.
    attention = Settings(s.group("attn_config"))
    attention.refuse(clip_qkv=None, qk_ln=False, prefix_lm=False, attn_type="multihead_attention", alibi_bias_max=8)
    num_heads = s.size("num_attention_heads")
    head_dim = s.size("hidden_size") // num_heads
    count = 1 << math.ceil(math.log2(num_heads))
    slopes = _of_power(count)
    if count != num_heads:
        slopes = (slopes[1::2] + slopes[::2])[:num_heads]
    return _plain(
        s,
        intermediate_size=4 * s.size("hidden_size"),
        num_kv_heads=num_heads,
        scale=attention.number("softmax_scale", head_dim**-0.5),
        norm_eps=s.number("layer_norm_epsilon", 1e-5),
        activation="gelu",
        rotary=(None,) * s.size("num_hidden_layers"),
        alibi=tuple(slopes),
        ties_embeddings=s.flag("tie_word_embeddings", True),
    )


GPT_NEOX = Family(
    title="GPT-NeoX, Pythia",
    types=("gpt_neox",),
    read=_read_neox,
    names=Names(
        prefixes=("gpt_neox.",),
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
        layer="gpt_neox.layers.{}.",
        qkv=("attention.query_key_value",),
        attention_output="attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
)
FALCON = Family(title="Falcon", types=("falcon",), read=_read_falcon, names=_FUSED)
BLOOM = Family(title="Bloom", types=("bloom",), read=_read_bloom, names=_FUSED)
MPT = Family(
    title="MPT",
    types=("mpt",),
    read=_read_mpt,
    names=Names(
        prefixes=("transformer.", ""),
        embedding="transformer.wte",
        final_norm="transformer.norm_f",
        layer="transformer.blocks.{}.",
        input_norm="norm_1",
        qkv=("attn.Wqkv",),
        attention_output="attn.out_proj",
        ffn_norm="norm_2",
        gate_up=("ffn.up_proj",),
        down="ffn.down_proj",
    ),
)
