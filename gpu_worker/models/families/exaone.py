"""EXAONE 4: norms after the sublayers; layers with windows, and layers without windows or rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Settings, plain, rotary_of, windows_of


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, rms_norm_eps=1e-5)
    num_layers, kinds = s.size("num_hidden_layers"), s.layers("layer_types")
    # If the setting is missing, the window is 4,096 tokens; if it is null, no layer has a window.
    window = config.get("sliding_window", 4096)
    if window is None:
        kinds = ["full_attention"] * num_layers
    elif kinds is None:
        pattern = s.size("sliding_window_pattern", default=4)
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    rotary = rotary_of(s, s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads")))
    return plain(
        s,
        norm_place="after",
        qk_norm="head",
        rotary=tuple(rotary if window is None or kind == "sliding_attention" else None for kind in kinds),
        windows=windows_of(s, window, kinds),
    )


EXAONE4 = Family(title="EXAONE 4", types=("exaone4",), read=_read)
