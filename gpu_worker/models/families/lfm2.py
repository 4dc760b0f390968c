"""LFM2: short convolutions instead of attention in most layers; dense, or with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, Mixture, ShortConv
from gpu_worker.models.families.family import Family, Names, Settings, check_kinds, plain


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, rope_theta=1e6)
    num_layers = s.size("num_hidden_layers")
    with_attention = s.indices("full_attn_idxs", range(num_layers))
    kinds = s.layers("layer_types") or ["full_attention" if i in with_attention else "conv" for i in range(num_layers)]
    check_kinds(kinds, {"conv", "full_attention"})
    conv = ShortConv(size=s.size("hidden_size"), kernel=s.size("conv_L_cache", default=3))
    experts, num_dense = None, num_layers
    if s.get("model_type") == "lfm2_moe":
        num_dense = s.count("num_dense_layers", 2)
        experts = Mixture(
            num_experts=s.size("num_experts"),
            num_active=s.size("num_experts_per_tok"),
            expert_size=s.size("moe_intermediate_size"),
            scoring="sigmoid",
            is_normalized=s.flag("norm_topk_prob", True),
            sum_offset=1e-6,
            scale=s.number("routed_scaling_factor", 1.0),
            has_correction=s.flag("use_expert_bias", True),
        )
    return plain(
        s,
        intermediate_size=s.size("intermediate_size") if experts else _adjusted_size(s, config),
        norm_eps=s.number("norm_eps", 1e-5),
        qk_norm="head",
        ties_embeddings=s.flag("tie_embedding", s.flag("tie_word_embeddings", True)),
        recurrent=tuple(conv if kind == "conv" else None for kind in kinds),
        mixtures=tuple(None if i < num_dense else experts for i in range(num_layers)),
    )


def _adjusted_size(s: Settings, config: Mapping[str, Any]) -> int:
    """Return the intermediate size of feed-forward networks: by default two thirds of the size in config.json, rounded
    up.
    """
    size = s.size("block_ff_dim", "intermediate_size")
    if not s.flag("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    # If the factor is missing it is 1; if it is null the size is not rounded.
    if config.get("block_ffn_dim_multiplier", 1.0) is None:
        return size
    size, multiple = int(s.number("block_ffn_dim_multiplier", 1.0) * size), s.size("block_multiple_of", default=256)
    return -(-size // multiple) * multiple


LFM2 = Family(
    title="LFM2",
    types=("lfm2", "lfm2_moe"),
    read=_read,
    names=Names(
        final_norm="model.embedding_norm",
        input_norm="operator_norm",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        attention_output="self_attn.out_proj",
        ffn_norm="ffn_norm",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        router="feed_forward.gate",
        correction="feed_forward.expert_bias",
        expert_gate_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
        expert_down="feed_forward.experts.{}.w2",
        recurrent_prefix="conv.",
    ),
    reads_gguf=True,
)
