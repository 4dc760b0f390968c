"""DeepSeek-V3, Kimi K2 and GLM-4.7 Flash: latent attention, and experts that are chosen within groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, Latent, Mixture
from gpu_worker.models.families.family import Family, Settings, plain, rotary_of
from gpu_worker.models.layers.rotary import yarn_magnitude

_DEFAULTS = {"q_lora_rank": 1536, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
_GLM_DEFAULTS = {"q_lora_rank": 768, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5}


def chosen_in_groups(s: Settings) -> Mixture:
    """Return the mixture of experts defined by DeepSeek-V3's settings."""
    size = s.size("moe_intermediate_size")
    return Mixture(
        num_experts=s.size("n_routed_experts", "num_local_experts", "num_experts"),
        num_active=s.size("num_experts_per_tok"),
        expert_size=size,
        scoring="sigmoid",
        is_normalized=s.flag("norm_topk_prob", True),
        scale=s.number("routed_scaling_factor", 1.0),
        num_groups=s.size("n_group", default=1),
        num_active_groups=s.size("topk_group", default=1),
        has_correction=True,
        shared_size=size * s.size("n_shared_experts", "num_shared_experts", default=1),
    )


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    is_glm = config.get("model_type") == "glm4_moe_lite"
    s = Settings(config, **(_GLM_DEFAULTS if is_glm else _DEFAULTS))
    s.refuse(attention_bias=False)
    latent = Latent(
        q_rank=None if s.get("q_lora_rank") is None else s.size("q_lora_rank"),
        kv_rank=s.size("kv_lora_rank"),
        nope_dim=s.size("qk_nope_head_dim"),
        rope_dim=s.size("qk_rope_head_dim"),
        value_dim=s.size("v_head_dim"),
        norm_eps=1e-6,  # regardless of `rms_norm_eps`
    )
    if not is_glm:
        s.refuse(head_dim=latent.rope_dim)
    rotary = rotary_of(s, latent.rope_dim, is_interleaved=s.flag("rope_interleave", True))
    scale, rope = (latent.nope_dim + latent.rope_dim) ** -0.5, rotary.settings
    if rope["rope_type"] != "default" and rope.get("mscale_all_dim"):
        scale *= yarn_magnitude(float(rope["factor"]), float(rope["mscale_all_dim"])) ** 2
    num_layers, experts = s.size("num_hidden_layers"), chosen_in_groups(s)
    first = 1 if is_glm else s.count("first_k_dense_replace", 3)
    kinds = (s.layers("mlp_layer_types") if is_glm else None) or [
        "dense" if i < first else "sparse" for i in range(num_layers)
    ]
    return plain(
        s,
        num_kv_heads=1,
        head_dim=latent.kv_rank + latent.rope_dim,
        latent=latent,
        rotary=(rotary,) * num_layers,
        scale=scale,
        mixtures=tuple(experts if kind == "sparse" else None for kind in kinds),
    )


DEEPSEEK = Family(title="DeepSeek-V3, Kimi K2", types=("deepseek_v3", "kimi_k2"), read=_read, reads_gguf=True)
GLM_LITE = Family(title="GLM-4.7 Flash", types=("glm4_moe_lite",), read=_read)
