"""GLM-4 and GLM-4.5, with rotary embedding on half of each head, and Solar Open. The last two have experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, Mixture
from gpu_worker.models.families.deepseek import chosen_in_groups
from gpu_worker.models.families.family import Family, Names, Settings, plain, rotary_of

_ROTATED_PART = 0.5


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, head_dim=128, rms_norm_eps=1.5625e-7)
    rotary = rotary_of(s, s.size("head_dim"), part=_ROTATED_PART, is_interleaved=True)
    is_around = s.get("model_type") == "glm4"
    return plain(s, rotary=(rotary,) * s.size("num_hidden_layers"), norm_place="around" if is_around else "before")


def _read_mixture(config: Mapping[str, Any]) -> DecoderDescription:
    is_solar = config.get("model_type") == "solar_open"
    s = Settings(config, rms_norm_eps=1e-5, **({"head_dim": 128, "rope_theta": 1e6} if is_solar else {}))
    head_dim = s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads"))
    num_layers, experts = s.size("num_hidden_layers"), chosen_in_groups(s)
    num_dense = 0 if is_solar else s.count("first_k_dense_replace", 1)
    mixtures: tuple[Mixture | None, ...] = tuple(None if i < num_dense else experts for i in range(num_layers))
    return plain(
        s,
        rotary=(rotary_of(s, head_dim, part=None if is_solar else _ROTATED_PART),) * num_layers,
        qk_norm="head" if s.flag("use_qk_norm", False) and not is_solar else None,
        # Solar Open has no other feed-forward layers.
        intermediate_size=s.size("moe_intermediate_size" if is_solar else "intermediate_size"),
        mixtures=mixtures,
    )


GLM = Family(title="GLM-4 (9B)", types=("glm",), read=_read, names=Names(gate_up=("mlp.gate_up_proj",)))
GLM4 = Family(
    title="GLM-4 0414",
    types=("glm4",),
    read=_read,
    names=Names(
        gate_up=("mlp.gate_up_proj",),
        attention_output_norm="post_self_attn_layernorm",
        ffn_output_norm="post_mlp_layernorm",
    ),
    reads_gguf=True,
)
GLM_MIXTURE = Family(title="GLM-4.5", types=("glm4_moe",), read=_read_mixture, reads_gguf=True)
SOLAR_OPEN = Family(title="Solar Open", types=("solar_open",), read=_read_mixture)
