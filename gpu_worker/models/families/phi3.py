"""Phi-3, Phi-3.5 and Phi-4: matrices that the file stores fused, partial rotary embedding, LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Names, Settings, plain, rotary_of, windows_of


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(_with_current_names(config), rms_norm_eps=1e-5, original_max_position_embeddings=4096)
    head_dim = s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads"))
    return plain(
        s,
        rotary=(rotary_of(s, head_dim, part=1.0),) * s.size("num_hidden_layers"),
        windows=windows_of(s, s.get("sliding_window"), None),
    )


def _with_current_names(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings with the current name of LongRoPE, which early files call su or yarn."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            config = {**config, key: {**rope, "rope_type": "longrope"}}
    return config


PHI3 = Family(
    title="Phi-3, Phi-4",
    types=("phi3",),
    read=_read,
    names=Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    reads_gguf=True,
)
