"""Mamba 1 and 2, and hybrid models that use Mamba 2 in most layers: Granite 4, Bamba, Nemotron-H and Falcon-H1.

A layer of Nemotron-H is either Mamba 2, attention, a feed-forward network or a mixture of experts. Falcon-H1 has Mamba
2 and attention in parallel in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_worker.models.description import ChannelMamba, DecoderDescription, LayerParts, Mamba, Mixture
from gpu_worker.models.families.family import Family, Names, Settings, activation_of, check_kinds, plain, rotary_of
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
    """Return the limits of the time step; JSON has no infinity, so files represent it in various ways."""
    limits = s.get("time_step_limit", (0.0, math.inf))
    try:
        low, high = limits
        return float(low), float(high["__float__"] if isinstance(high, Mapping) else high)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"config.json: time_step_limit must be two numbers; got {limits!r}", field="model") from None


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
        ties_embeddings=s.flag("tie_word_embeddings", False),
        max_sequence_length=s.size("max_position_embeddings", default=UNLIMITED_LENGTH),
        scale=1.0,
        recurrent=(mamba,) * num_layers,
        parts=(mixer,) * num_layers,
    )


def _read_first(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, state_size=16)
    s.refuse(hidden_act="silu")
    hidden_size, num_layers = s.size("hidden_size"), s.size("num_hidden_layers")
    rank = s.get("time_step_rank", "auto")
    mamba = ChannelMamba(
        size=s.size("intermediate_size", default=s.size("expand", default=2) * hidden_size),
        state_dim=s.size("state_size"),
        step_rank=-(-hidden_size // 16) if rank == "auto" else s.size("time_step_rank"),
        kernel=s.size("conv_kernel", default=4),
    )
    mixer: LayerParts = "mixer"
    return DecoderDescription(
        architecture=str(s.get("model_type")),
        vocab_size=s.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=0,
        num_layers=num_layers,
        num_heads=mamba.size,
        num_kv_heads=mamba.size,
        head_dim=1,
        norm_eps=s.number("layer_norm_epsilon", 1e-5),
        rotary=(None,) * num_layers,
        windows=(None,) * num_layers,
        ties_embeddings=s.flag("tie_word_embeddings", True),
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
        raise ConfigError(f"config.json: layers_block_type must be a list; got {kinds!r}", field="model")
    kinds = [_OTHER_NAMES.get(str(kind), str(kind)) for kind in kinds]
    check_kinds(kinds, set(_KINDS.values()))
    s = Settings({**config, "num_hidden_layers": len(kinds)}, num_experts_per_tok=2, norm_topk_prob=True)
    # transformers ignores a window.
    s.refuse(mamba_hidden_act="silu", moe_latent_size=None, sliding_window=None)
    mamba = Mamba(
        num_heads=s.size("mamba_num_heads", default=128),
        head_dim=s.size("mamba_head_dim", default=64),
        num_groups=s.size("n_groups", default=8),
        state_dim=s.size("ssm_state_size", default=128),
        kernel=s.size("conv_kernel", default=4),
        # transformers ignores time_step_limit of this family.
        step_limits=(s.number("mamba_dt_min", s.number("time_step_min", 0.001)), math.inf),
    )
    experts = None
    if "moe" in kinds:
        experts = Mixture(
            num_experts=s.size("n_routed_experts"),
            num_active=s.size("num_experts_per_tok"),
            expert_size=s.size("moe_intermediate_size"),
            scoring="sigmoid",
            is_normalized=s.flag("norm_topk_prob", True),
            scale=s.number("routed_scaling_factor", 1.0),
            num_groups=s.size("n_group", default=1),
            num_active_groups=s.size("topk_group", default=1),
            has_correction=True,
            shared_size=s.size("moe_shared_expert_intermediate_size"),
        )
    parts: list[LayerParts] = ["mixer" if kind in ("mamba", "attention") else "feed_forward" for kind in kinds]
    return plain(
        s,
        norm_eps=s.number("layer_norm_epsilon", 1e-5),
        activation=activation_of(s.get("mlp_hidden_act", "relu2")),
        has_gated_ffn=False,
        rotary=(None,) * len(kinds),
        recurrent=tuple(mamba if kind == "mamba" else None for kind in kinds),
        parts=tuple(parts),
        mixtures=tuple(experts if kind == "moe" else None for kind in kinds),
    )


def _mamba_of(s: Settings) -> Mamba:
    """Return the recurrent layers of Granite and Bamba."""
    num_heads = s.size("mamba_n_heads", default=128)
    size = s.size("mamba_expand", default=2) * s.size("hidden_size")
    is_given = s.get("mamba_d_head", "auto") != "auto"
    return Mamba(
        num_heads=num_heads,
        head_dim=s.size("mamba_d_head") if is_given else size // num_heads,
        num_groups=s.size("mamba_n_groups", default=1),
        state_dim=s.size("mamba_d_state", default=256),
        kernel=s.size("mamba_d_conv", default=4),
        step_limits=_limits(s),
    )


def _mixers(s: Settings, kinds: Sequence[object]) -> tuple[Mamba | None, ...]:
    """Return the layers that replace attention. Raises UnsupportedError if a layer is neither Mamba 2 nor attention."""
    mamba, names = _mamba_of(s), [_OTHER_NAMES.get(str(kind), str(kind)) for kind in kinds]
    check_kinds(names, {"mamba", "attention"})
    return tuple(mamba if name == "mamba" else None for name in names)


def _read_granite(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, num_local_experts=8, num_experts_per_tok=2)
    s.refuse(hidden_act="silu")
    num_layers = s.size("num_hidden_layers")
    shared_size = s.size("shared_intermediate_size", default=1024)
    experts = None
    if s.get("num_local_experts"):
        experts = Mixture(
            num_experts=s.size("num_local_experts"),
            num_active=s.size("num_experts_per_tok"),
            expert_size=s.size("intermediate_size"),
            scoring="softmax_of_chosen",
            is_normalized=False,
            shared_size=shared_size,
        )
    rotary = rotary_of(s, s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads")))
    return plain(
        s,
        intermediate_size=shared_size,
        rotary=(rotary if s.get("position_embedding_type") == "rope" else None,) * num_layers,
        recurrent=_mixers(s, s.layers("layer_types") or s.layers("layers_block_type") or ["mamba"] * num_layers),
        mixtures=(experts,) * num_layers,
        embedding_scale=s.number("embedding_multiplier", 1.0),
        scales_virtual=True,
        scale=s.number("attention_multiplier", 1.0),
        residual_scale=s.number("residual_multiplier", 1.0),
        logits_scale=1.0 / s.positive("logits_scaling", 1.0),
    )


def _read_bamba(config: Mapping[str, Any]) -> DecoderDescription:
    # transformers ignores the setting at the top level.
    s = Settings({**config, "partial_rotary_factor": 0.5}, rms_norm_eps=1e-5)
    s.refuse(hidden_act="silu")
    num_layers, with_attention = s.size("num_hidden_layers"), s.indices("attn_layer_indices")
    kinds = ["attention" if i in with_attention else "mamba" for i in range(num_layers)]
    head_dim = s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads"))
    return plain(s, rotary=(rotary_of(s, head_dim, part=0.5),) * num_layers, recurrent=_mixers(s, kinds))


def _read_falcon(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, mamba_n_heads=128, num_key_value_heads=8, rms_norm_eps=1e-5)
    s.refuse(hidden_act="silu")
    has_norm = s.flag("mamba_rms_norm", False)
    if has_norm:
        s.refuse(mamba_norm_before_gate=False)
        if config.get("mamba_norm_before_gate") is None:
            raise UnsupportedError("mamba_norm_before_gate True of config.json is not supported", field="model")
    num_layers, num_heads = s.size("num_hidden_layers"), s.size("mamba_n_heads")
    into = s.number("ssm_in_multiplier", 1.0)
    if into != 1.0:
        s.refuse(mamba_proj_bias=False)  # the factor does not apply to the bias
    gates, values, stored, read, steps = (into * scale for scale in s.numbers("ssm_multipliers", 5, [1.0] * 5))
    size = s.size("mamba_d_ssm", default=1024)
    if "mamba_d_ssm" in config and config["mamba_d_ssm"] is None:
        size = s.size("mamba_expand", default=2) * s.size("hidden_size")
    mamba = Mamba(
        num_heads=num_heads,
        head_dim=size // num_heads,
        num_groups=s.size("mamba_n_groups", default=1),
        state_dim=s.size("mamba_d_state", default=256),
        kernel=s.size("mamba_d_conv", default=4),
        step_limits=_limits(s),
        has_norm=has_norm,
        scales=(gates, values, stored, read, steps),
        output_scale=s.number("ssm_out_multiplier", 1.0),
    )
    head_dim = s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads"))
    # The factor of attention's input becomes factors of the queries, keys and values.
    factor = s.number("attention_in_multiplier", 1.0)
    if factor != 1.0:
        s.refuse(attention_bias=False)
    gate_scale, output_scale = s.numbers("mlp_multipliers", 2, [1.0, 1.0])
    return plain(
        s,
        recurrent=(mamba,) * num_layers,
        is_side_by_side=True,
        scale=head_dim**-0.5 * factor**2 * s.number("key_multiplier", 1.0),
        attention_output_scale=factor * s.number("attention_out_multiplier", 1.0),
        ffn_gate_scale=gate_scale,
        ffn_output_scale=output_scale,
        embedding_scale=s.number("embedding_multiplier", 1.0),
        logits_scale=s.number("lm_head_multiplier", 1.0),
    )


MAMBA = Family(title="Mamba", types=("mamba",), read=_read_first, names=_NAMES)
MAMBA2 = Family(title="Mamba 2", types=("mamba2",), read=_read, names=_NAMES)
NEMOTRON_H = Family(title="Nemotron-H", types=("nemotron_h",), read=_read_nemotron, names=_NAMES)
GRANITE_HYBRID = Family(
    title="Granite 4",
    types=("granitemoehybrid",),
    read=_read_granite,
    names=Names(
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        router="block_sparse_moe.router.layer",
        experts="stacked_rows",
        expert_gate_up=("block_sparse_moe.input_linear.weight",),
        expert_down="block_sparse_moe.output_linear.weight",
        shared_prefix="shared_mlp.",
        shared_gate_up=("input_linear",),
        shared_down="output_linear",
        recurrent_prefix="mamba.",
    ),
)
BAMBA = Family(
    title="Bamba",
    types=("bamba",),
    read=_read_bamba,
    names=Names(
        final_norm="model.final_layernorm",
        ffn_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        recurrent_prefix="mamba.",
    ),
)
FALCON_H1 = Family(title="Falcon-H1", types=("falcon_h1",), read=_read_falcon, names=BAMBA.names)
