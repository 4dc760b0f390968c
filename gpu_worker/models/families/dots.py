"""dots.llm1: DeepSeek-V3's experts, with queries and keys normalized by head, and windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.deepseek import chosen_in_groups
from gpu_worker.models.families.family import Family, Settings, plain, windows_of


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config)
    num_layers, num_dense = s.size("num_hidden_layers"), s.count("first_k_dense_replace", 0)
    experts = replace(chosen_in_groups(s), is_normalized=s.flag("norm_topk_prob", False))
    # If the window is missing it is 4,096 tokens; if it is null, there is none.
    first, window = s.count("max_window_layers", 62), config.get("sliding_window", 4096)
    kinds = s.layers("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
    ]
    return plain(
        s,
        qk_norm="head",
        windows=windows_of(s, window, kinds),
        mixtures=tuple(None if i < num_dense else experts for i in range(num_layers)),
    )


DOTS1 = Family(title="dots.llm1", types=("dots1",), read=_read)
