"""Command R, Command R7B and Command A: attention and feed-forward network in parallel, layer norms without bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Settings, plain, rotary_of, windows_of


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, tie_word_embeddings=True, sliding_window=4096)
    num_layers, pattern = s.size("num_hidden_layers"), s.size("sliding_window_pattern", default=4)
    kinds = s.layers("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    head_dim = s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads"))
    rotary = rotary_of(s, head_dim, is_interleaved=True)
    windows = windows_of(s, s.get("sliding_window"), kinds)
    return plain(
        s,
        norm="layer",
        norm_eps=s.number("layer_norm_eps", 1e-5),
        is_parallel=True,
        rotary=tuple(None if window is None else rotary for window in windows),
        windows=windows,
        logits_scale=s.number("logit_scale", 0.0625),
    )


def _read_first(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, tie_word_embeddings=True, rope_theta=500000.0)
    s.refuse(use_qk_norm=False)
    head_dim = s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads"))
    return plain(
        s,
        norm="layer",
        norm_eps=s.number("layer_norm_eps", 1e-5),
        is_parallel=True,
        rotary=(rotary_of(s, head_dim, is_interleaved=True),) * s.size("num_hidden_layers"),
        logits_scale=s.number("logit_scale", 0.0625),
    )


COHERE = Family(title="Command R (Cohere)", types=("cohere",), read=_read_first, reads_gguf=True)
COHERE2 = Family(title="Command R7B, A (Cohere 2)", types=("cohere2",), read=_read, reads_gguf=True)
