"""OLMo 2, OLMo 3, OLMoE and FlexOlmo: norms over all query and key heads and, except in OLMoE, of sublayer outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, Mixture
from gpu_worker.models.families.family import Family, Settings, checked_rotary, plain, rope_of, windows_of


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    return plain(Settings(config, rms_norm_eps=1e-5), norm_place="after", qk_norm="row")


def _read_3(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, rms_norm_eps=1e-5, rope_theta=500000.0)
    kinds = s.layers("layer_types")
    if kinds is None:
        count = range(s.size("num_hidden_layers"))
        kinds = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in count]
    head_dim = s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads"))
    ropes = Settings(s.group("rope_parameters"))
    # In older files, `rope_scaling` applies to the layers without a window.
    far = rope_of(s, {**ropes.group("full_attention"), **s.group("rope_scaling")})
    near = rope_of(s, ropes.group("sliding_attention"))
    rotary = {
        "full_attention": checked_rotary(far, head_dim, head_dim),
        "sliding_attention": checked_rotary(near, head_dim, head_dim),
    }
    return plain(
        s,
        norm_place="after",
        qk_norm="row",
        rotary=tuple(rotary.get(str(kind)) for kind in kinds),
        windows=windows_of(s, s.get("sliding_window", 4096), kinds),
    )


def _read_mixture(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8)
    if s.get("clip_qkv") is not None:
        s.refuse(clip_qkv=None)
    return plain(s, qk_norm="row", mixtures=_mixtures(s))


def _read_flex(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, rope_theta=500000.0, num_experts=7, num_experts_per_tok=5)
    return plain(s, norm_place="after", qk_norm="row", mixtures=_mixtures(s))


def _mixtures(s: Settings) -> tuple[Mixture, ...]:
    experts = Mixture(
        num_experts=s.size("num_experts", "num_local_experts"),
        num_active=s.size("num_experts_per_tok"),
        expert_size=s.size("intermediate_size"),
        is_normalized=s.flag("norm_topk_prob", False),
    )
    return (experts,) * s.size("num_hidden_layers")


OLMO2 = Family(title="OLMo 2", types=("olmo2",), read=_read, reads_gguf=True)
OLMO3 = Family(title="OLMo 3", types=("olmo3",), read=_read_3, reads_gguf=True)
OLMOE = Family(title="OLMoE", types=("olmoe",), read=_read_mixture, reads_gguf=True)
FLEX_OLMO = Family(title="FlexOlmo", types=("flex_olmo",), read=_read_flex)
