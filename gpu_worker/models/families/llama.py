"""Llama 1 to 3, and models that differ little from them: Seed-OSS, Code World Model (CWM) and Helium."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Settings, plain, rotary_of, windows_of

_CWM_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    return plain(Settings(config))


def _read_seed(config: Mapping[str, Any]) -> DecoderDescription:
    return plain(Settings(config, head_dim=128))


def _read_cwm(config: Mapping[str, Any]) -> DecoderDescription:
    rope = {"rope_parameters": _CWM_ROPE} if config.get("rope_parameters") is None else {}
    s = Settings({**config, **rope}, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e6)
    kinds = s.layers("layer_types")
    if kinds is None:
        count = range(s.size("num_hidden_layers"))
        kinds = ["sliding_attention" if i % 4 else "full_attention" for i in count]
    return plain(s, windows=windows_of(s, config.get("sliding_window", 8192), kinds))


def _read_helium(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, head_dim=128, rms_norm_eps=1e-8, rope_theta=1e5)
    rotary = rotary_of(s, s.size("head_dim"), is_interleaved=True)
    return plain(s, rotary=(rotary,) * s.size("num_hidden_layers"))


CWM = Family(title="Code World Model", types=("cwm",), read=_read_cwm)
HELIUM = Family(title="Helium", types=("helium",), read=_read_helium)
SEED_OSS = Family(title="Seed-OSS", types=("seed_oss",), read=_read_seed, reads_gguf=True)
LLAMA = Family(title="Llama", types=("llama",), read=_read, reads_gguf=True)
