"""Mistral, Ministral and Mixtral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, Mixture
from gpu_worker.models.families.family import Family, Names, Settings, plain, windows_of


def _read_mistral(config: Mapping[str, Any]) -> DecoderDescription:
    # If the setting is missing, the window is 4,096 tokens; if it is null, there is no window.
    s = Settings(config, sliding_window=4096)
    window = s.get("sliding_window")
    kinds = s.layers("layer_types") if s.get("model_type") == "ministral" else None
    if window is None:
        kinds = ["full_attention"] * s.size("num_hidden_layers")
    return plain(s, windows=windows_of(s, window, kinds))


def _read_mixtral(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, rms_norm_eps=1e-5, num_local_experts=8, num_experts_per_tok=2, rope_theta=1e6)
    experts = Mixture(
        num_experts=s.size("num_local_experts", "num_experts"),
        num_active=s.size("num_experts_per_tok"),
        expert_size=s.size("intermediate_size"),
    )
    windows = windows_of(s, s.get("sliding_window"), None)
    return plain(s, windows=windows, mixtures=(experts,) * s.size("num_hidden_layers"))


MISTRAL = Family(title="Mistral", types=("mistral",), read=_read_mistral)
MINISTRAL = Family(title="Ministral 8B", types=("ministral",), read=_read_mistral)
MIXTRAL = Family(
    title="Mixtral",
    types=("mixtral",),
    read=_read_mixtral,
    names=Names(
        router="block_sparse_moe.gate",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
    reads_gguf=True,
)
