"""Qwen 2 and 3, dense and with mixtures of experts; Qwen 3 Next and 3.5, with gated delta nets in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpu_worker.models.description import DecoderDescription, DeltaNet, Mixture
from gpu_worker.models.families.family import Family, Names, Settings, plain, rotary_of, windows_of

# Null means no window.
_WINDOW = 4096


def _windows(s: Settings) -> tuple[int | None, ...]:
    num_layers = s.size("num_hidden_layers")
    if not s.flag("use_sliding_window", False):
        return (None,) * num_layers
    kinds = s.layers("layer_types")
    if kinds is None:
        first = s.count("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return windows_of(s, s.get("sliding_window"), kinds)


def _mixture_windows(s: Settings) -> tuple[int | None, ...]:
    """Return the windows of models with mixtures: in Qwen 2 MoE of every second layer, in Qwen 3 MoE of all layers."""
    num_layers = s.size("num_hidden_layers")
    if not s.flag("use_sliding_window", False):
        return (None,) * num_layers
    kinds = None
    if s.get("model_type") == "qwen2_moe":
        end = s.count("max_window_layers", 28)
        kinds = s.layers("layer_types") or [
            "full_attention" if i % 2 or i >= end else "sliding_attention" for i in range(num_layers)
        ]
    return windows_of(s, s.get("sliding_window"), kinds)


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    is_3 = config.get("model_type") == "qwen3"
    s = Settings(config, sliding_window=_WINDOW, **({"head_dim": 128} if is_3 else {}))
    d = plain(s, windows=_windows(s), qk_norm="head" if is_3 else None)
    # Qwen 2 has no setting of this name.
    return d if is_3 else replace(d, has_attention_bias=None)


def _read_mixture(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(
        config, sliding_window=_WINDOW, num_experts_per_tok=8 if config.get("model_type") == "qwen3_moe" else 4
    )
    is_qwen2 = s.get("model_type") == "qwen2_moe"
    experts = Mixture(
        num_experts=s.size("num_experts", "num_local_experts"),
        num_active=s.size("num_experts_per_tok"),
        expert_size=s.size("moe_intermediate_size"),
        is_normalized=s.flag("norm_topk_prob", False),
        shared_size=s.size("shared_expert_intermediate_size") if is_qwen2 else 0,
        has_shared_gate=is_qwen2,
    )
    d = plain(s, windows=_mixture_windows(s), qk_norm=None if is_qwen2 else "head", mixtures=_sparse(s, experts))
    return replace(d, has_attention_bias=None) if is_qwen2 else d


def _read_next(config: Mapping[str, Any]) -> DecoderDescription:
    is_next = config.get("model_type") == "qwen3_next"
    s = Settings(config, num_experts_per_tok=10 if is_next else 8, norm_topk_prob=True, head_dim=256)
    s.refuse(hidden_act="silu")  # in transformers, the delta nets also have this activation
    num_layers = s.size("num_hidden_layers")
    every = s.size("full_attention_interval", default=4)
    kinds = s.layers("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)
    ]
    net = DeltaNet(
        key_heads=s.size("linear_num_key_heads", default=16),
        value_heads=s.size("linear_num_value_heads", default=32),
        key_dim=s.size("linear_key_head_dim", default=128),
        value_dim=s.size("linear_value_head_dim", default=128),
        kernel=s.size("linear_conv_kernel_dim", default=4),
        is_in_turn=is_next,
    )
    experts = None
    if is_next or s.get("num_experts") is not None:
        experts = Mixture(
            num_experts=s.size("num_experts"),
            num_active=s.size("num_experts_per_tok"),
            expert_size=s.size("moe_intermediate_size"),
            is_normalized=s.flag("norm_topk_prob", True) if is_next else True,
            shared_size=s.size("shared_expert_intermediate_size"),
            has_shared_gate=True,
        )
    return plain(
        s,
        # Qwen 3.5 models with mixtures of experts have no other feed-forward layers.
        intermediate_size=s.size("intermediate_size", "moe_intermediate_size"),
        qk_norm="head",
        norm_offset=1.0,
        has_output_gate=True,
        rotary=(rotary_of(s, s.size("head_dim"), part=0.25),) * num_layers,
        recurrent=tuple(net if kind == "linear_attention" else None for kind in kinds),
        mixtures=(None,) * num_layers if experts is None else _sparse(s, experts),
    )


def _sparse(s: Settings, experts: Mixture) -> tuple[Mixture | None, ...]:
    """Return the mixture of experts for each layer that has one, and None for the others."""
    dense, step = s.indices("mlp_only_layers"), s.size("decoder_sparse_step", default=1)
    return tuple(
        experts if i not in dense and (i + 1) % step == 0 else None for i in range(s.size("num_hidden_layers"))
    )


QWEN = Family(title="Qwen 2, Qwen 3", types=("qwen2", "qwen3"), read=_read, reads_gguf=True)
QWEN_MIXTURE = Family(
    title="Qwen 2 MoE, Qwen 3 MoE",
    types=("qwen2_moe", "qwen3_moe"),
    read=_read_mixture,
    names=Names(shared_prefix="mlp.shared_expert."),
    reads_gguf=True,
)
QWEN_NEXT = Family(
    title="Qwen 3 Next", types=("qwen3_next",), read=_read_next, names=Names(shared_prefix="mlp.shared_expert.")
)
QWEN3_5 = Family(
    title="Qwen 3.5",
    types=("qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"),
    read=_read_next,
    names=Names(prefixes=("model.", "model.language_model."), shared_prefix="mlp.shared_expert."),
)
