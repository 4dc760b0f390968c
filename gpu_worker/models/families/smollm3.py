"""SmolLM3: Llama with some layers that have no rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Settings, plain, rotary_of, windows_of


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, tie_word_embeddings=True, rope_theta=2000000.0)
    num_layers, interval = s.size("num_hidden_layers"), s.size("no_rope_layer_interval", default=4)
    # The setting is 1 for layers that have a rotary embedding.
    rotates = s.layers("no_rope_layers") or [(i + 1) % interval for i in range(num_layers)]
    kinds = s.layers("layer_types")
    if kinds is None:
        # By default, the layers without rotary embedding have the window, if there is one.
        has_windows = s.flag("use_sliding_window", False)
        kinds = ["full_attention" if turns or not has_windows else "sliding_attention" for turns in rotates]
    windows = windows_of(s, s.get("sliding_window"), kinds)
    head_dim = s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads"))
    rotary = rotary_of(s, head_dim)
    return plain(s, rotary=tuple(rotary if turns else None for turns in rotates), windows=windows)


SMOLLM3 = Family(title="SmolLM3", types=("smollm3",), read=_read, reads_gguf=True)
