"""Phi-3, Phi-3.5 and Phi-4: matrices that the file stores fused, partial rotary embedding, LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Names, Settings, plain, rotary_of, windows_of


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, rms_norm_eps=1e-5)
    head_dim = s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads"))
    rotary = rotary_of(s, head_dim)
    longest = s.size("max_position_embeddings")
    if rotary.settings["rope_type"] == "longrope":
        # Beyond this length all positions use other angles, including those already cached.
        longest = min(longest, int(rotary.settings["original_max_position_embeddings"]))
    return plain(
        s,
        rotary=(rotary,) * s.size("num_hidden_layers"),
        windows=windows_of(s, s.get("sliding_window"), None),
        max_sequence_length=longest,
    )


PHI3 = Family(
    title="Phi-3, Phi-4",
    types=("phi3",),
    read=_read,
    names=Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
)
