"""Mamba 2, and Nemotron-H: layers that are Mamba 2, attention, a feed-forward network or experts, one thing each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, LayerParts, Mamba, Mixture
from gpu_worker.models.families.family import Family, Names, Settings, activation_of, plain
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import UNLIMITED_LENGTH

_NAMES = Names(
    prefixes=("backbone.", "model."),
    embedding="backbone.embeddings",
    final_norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    input_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    attention_output="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    router="mixer.gate",
    correction="mixer.gate.e_score_correction_bias",
    expert_gate_up=("mixer.experts.{}.up_proj",),
    expert_down="mixer.experts.{}.down_proj",
    shared_prefix="mixer.shared_experts.",
    recurrent_prefix="mixer.",
)
_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_OTHER_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def _limits(s: Settings) -> tuple[float, float]:
    """Return the limits of steps; JSON has no infinity, so files write it in other ways."""
    low, high = s.get("time_step_limit", (0.0, math.inf))
    try:
        return float(low), float(high["__float__"] if isinstance(high, Mapping) else high)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"config.json: time_step_limit is {[low, high]!r}", field="model") from None


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, num_attention_heads=1, intermediate_size=1)
    s.refuse(hidden_act="silu")
    num_layers = s.size("num_hidden_layers")
    mamba = Mamba(
        num_heads=s.size("num_heads", default=128),
        head_dim=s.size("head_dim", default=64),
        num_groups=s.size("n_groups", default=8),
        state_dim=s.size("state_size", default=128),
        kernel=s.size("conv_kernel", default=4),
        step_limits=_limits(s),
    )
    mixer: LayerParts = "mixer"
    return DecoderDescription(
        architecture=str(s.get("model_type")),
        vocab_size=s.size("vocab_size"),
        hidden_size=s.size("hidden_size"),
        intermediate_size=0,
        num_layers=num_layers,
        num_heads=mamba.num_heads,
        num_kv_heads=mamba.num_heads,
        head_dim=mamba.head_dim,
        norm_eps=s.number("layer_norm_epsilon", 1e-5),
        rotary=(None,) * num_layers,
        windows=(None,) * num_layers,
        ties_embeddings=bool(s.get("tie_word_embeddings", False)),
        max_sequence_length=s.size("max_position_embeddings", default=UNLIMITED_LENGTH),
        scale=1.0,
        recurrent=(mamba,) * num_layers,
        parts=(mixer,) * num_layers,
    )


def _read_nemotron(config: Mapping[str, Any]) -> DecoderDescription:
    kinds = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern")
    if isinstance(kinds, str):
        kinds = [_KINDS.get(kind, kind) for kind in kinds]
    if not isinstance(kinds, list) or not kinds:
        raise ConfigError(f"config.json: layers_block_type is {kinds!r}", field="model")
    kinds = [_OTHER_NAMES.get(str(kind), str(kind)) for kind in kinds]
    unknown = sorted(set(kinds) - set(_KINDS.values()))
    if unknown:
        raise UnsupportedError(f"layers of type {', '.join(unknown)} are not supported", field="model")
    s = Settings({**config, "num_hidden_layers": len(kinds)}, num_experts_per_tok=2, norm_topk_prob=True)
    s.refuse(mamba_hidden_act="silu", moe_latent_size=None)
    mamba = Mamba(
        num_heads=s.size("mamba_num_heads", default=128),
        head_dim=s.size("mamba_head_dim", default=64),
        num_groups=s.size("n_groups", default=8),
        state_dim=s.size("ssm_state_size", default=128),
        kernel=s.size("conv_kernel", default=4),
        step_limits=_limits(s),
    )
    experts = None
    if "moe" in kinds:
        experts = Mixture(
            num_experts=s.size("n_routed_experts"),
            num_active=s.size("num_experts_per_tok"),
            expert_size=s.size("moe_intermediate_size"),
            scoring="sigmoid",
            is_normalized=bool(s.get("norm_topk_prob")),
            scale=s.number("routed_scaling_factor", 1.0),
            num_groups=s.size("n_group", default=1),
            num_active_groups=s.size("topk_group", default=1),
            has_correction=True,
            shared_size=s.size("moe_shared_expert_intermediate_size"),
        )
    window = s.get("sliding_window")
    parts: list[LayerParts] = ["mixer" if kind in ("mamba", "attention") else "feed_forward" for kind in kinds]
    return plain(
        s,
        norm_eps=s.number("layer_norm_epsilon", 1e-5),
        activation=activation_of(s.get("mlp_hidden_act", "relu2")),
        has_gated_ffn=False,
        rotary=(None,) * len(kinds),
        windows=(window,) * len(kinds),
        recurrent=tuple(mamba if kind == "mamba" else None for kind in kinds),
        parts=tuple(parts),
        mixtures=tuple(experts if kind == "moe" else None for kind in kinds),
    )


MAMBA2 = Family(title="Mamba 2", types=("mamba2",), read=_read, names=_NAMES)
NEMOTRON_H = Family(title="Nemotron-H", types=("nemotron_h",), read=_read_nemotron, names=_NAMES)
