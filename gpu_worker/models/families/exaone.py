"""EXAONE 4 and K-EXAONE: layers with windows, and layers without windows or rotary embedding.

EXAONE 4 has norms after the sublayers; K-EXAONE has norms before the sublayers, and experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, Mixture
from gpu_worker.models.families.deepseek import chosen_in_groups
from gpu_worker.models.families.family import Family, Names, Settings, plain, rotary_of, windows_of


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    has_experts = config.get("model_type") == "exaone_moe"
    s = Settings(config, rms_norm_eps=1e-5, **({"routed_scaling_factor": 2.5} if has_experts else {}))
    num_layers, kinds = s.size("num_hidden_layers"), s.layers("layer_types")
    # If the setting is missing, the window is 4,096 tokens; if it is null, no layer has a window.
    window = config.get("sliding_window", 4096)
    if window is None:
        kinds = ["full_attention"] * num_layers
    elif kinds is None:
        pattern = s.size("sliding_window_pattern", default=4)
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    rotary = rotary_of(s, s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads")))
    mixtures: tuple[Mixture | None, ...] = ()
    if has_experts:
        first, experts = s.count("first_k_dense_replace", 1), chosen_in_groups(s)
        places = s.layers("mlp_layer_types") or ["dense" if i < first else "sparse" for i in range(num_layers)]
        mixtures = tuple(experts if place == "sparse" else None for place in places)
    return plain(
        s,
        norm_place="before" if has_experts else "after",
        mixtures=mixtures,
        qk_norm="head",
        rotary=tuple(rotary if window is None or kind == "sliding_attention" else None for kind in kinds),
        windows=windows_of(s, window, kinds),
    )


EXAONE4 = Family(title="EXAONE 4", types=("exaone4",), read=_read)
EXAONE_MIXTURE = Family(
    title="K-EXAONE", types=("exaone_moe",), read=_read, names=Names(correction="mlp.e_score_correction_bias")
)
