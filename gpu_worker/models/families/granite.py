"""Granite 3: Llama with factors on embeddings, attention, residuals and logits; dense, or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, Mixture
from gpu_worker.models.families.family import Family, Settings, plain
from gpu_worker.models.families.mamba import GRANITE_HYBRID


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    return _scaled(Settings(config))


def _read_mixture(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, num_local_experts=8, num_experts_per_tok=2)
    experts = Mixture(
        num_experts=s.size("num_local_experts", "num_experts"),
        num_active=s.size("num_experts_per_tok"),
        expert_size=s.size("intermediate_size"),
        scoring="softmax_of_chosen",
        is_normalized=False,
        shared_size=s.count("shared_intermediate_size", 0),
    )
    return _scaled(s, mixtures=(experts,) * s.size("num_hidden_layers"))


def _scaled(s: Settings, **changes: Any) -> DecoderDescription:
    return plain(
        s,
        **changes,
        embedding_scale=s.number("embedding_multiplier", 1.0),
        scales_virtual=True,
        scale=s.number("attention_multiplier", 1.0),
        residual_scale=s.number("residual_multiplier", 1.0),
        logits_scale=1.0 / s.positive("logits_scaling", 1.0),
    )


GRANITE = Family(title="Granite", types=("granite",), read=_read, reads_gguf=True)
GRANITE_MIXTURE = Family(
    title="Granite 3 MoE",
    types=("granitemoe", "granitemoeshared"),
    read=_read_mixture,
    names=GRANITE_HYBRID.names,
    reads_gguf=True,
)
