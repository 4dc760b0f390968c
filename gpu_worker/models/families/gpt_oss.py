"""gpt-oss: attention sinks, a window in every other layer, and experts with biases and clamped activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, Mixture
from gpu_worker.models.families.family import Family, Names, Settings, plain, windows_of


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    yarn = {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    rope = yarn if config.get("rope_parameters") is None else config["rope_parameters"]
    s = Settings(
        {**config, "rope_parameters": rope},
        head_dim=64,
        rms_norm_eps=1e-5,
        sliding_window=128,
        num_local_experts=128,
        rope_theta=150000.0,
    )
    s.refuse(swiglu_alpha=1.702, swiglu_limit=7.0)
    num_layers = s.size("num_hidden_layers")
    kinds = s.layers("layer_types")
    if kinds is None:
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    experts = Mixture(
        num_experts=s.size("num_local_experts", "num_experts"),
        num_active=s.size("num_experts_per_tok", "experts_per_token", default=4),
        expert_size=s.size("intermediate_size"),
        scoring="softmax_of_chosen",
        is_normalized=False,
    )
    return plain(
        s,
        windows=windows_of(s, s.get("sliding_window"), kinds),
        has_sinks=True,
        activation="clamped_swiglu",
        mixtures=(experts,) * num_layers,
    )


GPT_OSS = Family(
    title="gpt-oss",
    types=("gpt_oss",),
    read=_read,
    names=Names(
        router="mlp.router",
        experts="stacked_in_turn",
        expert_gate_up=("mlp.experts.gate_up_proj",),
        expert_down="mlp.experts.down_proj",
    ),
    reads_gguf=True,
)
