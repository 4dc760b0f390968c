"""OLMo 2, OLMo 3 and OLMoE: queries and keys are normalized over all heads; OLMo 2 and 3 normalize the outputs of
sublayers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, Mixture
from gpu_worker.models.families.family import Family, Names, Settings, plain, windows_of


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, rms_norm_eps=1e-5)
    kinds = s.layers("layer_types")
    windows: tuple[int | None, ...] = (None,) * s.size("num_hidden_layers")
    if kinds is not None:
        windows = windows_of(s, s.get("sliding_window", 4096), kinds)
    return plain(s, norm_place="after", qk_norm="row", windows=windows)


def _read_mixture(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8)
    if s.get("clip_qkv") is not None:
        s.refuse(clip_qkv=None)
    experts = Mixture(
        num_experts=s.size("num_experts", "num_local_experts"),
        num_active=s.size("num_experts_per_tok"),
        expert_size=s.size("intermediate_size"),
        is_normalized=bool(s.get("norm_topk_prob", False)),
    )
    return plain(s, qk_norm="row", mixtures=(experts,) * s.size("num_hidden_layers"))


OLMO2 = Family(title="OLMo 2", types=("olmo2",), read=_read)
OLMOE = Family(title="OLMoE", types=("olmoe",), read=_read_mixture, names=Names())
