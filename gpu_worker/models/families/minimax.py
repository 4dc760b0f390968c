"""MiniMax M2: a mixture of experts in every layer, queries and keys normalized over all heads, partial rotary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, Mixture
from gpu_worker.models.families.family import Family, Names, Settings, plain, rotary_of


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, rope_theta=5e6, head_dim=128, num_experts_per_tok=8)
    s.refuse(use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True)
    num_layers, head_dim = s.size("num_hidden_layers"), s.size("head_dim")
    experts = Mixture(
        num_experts=s.size("num_local_experts", "num_experts"),
        num_active=s.size("num_experts_per_tok"),
        expert_size=s.size("intermediate_size"),
        scoring="sigmoid",
        has_correction=True,
    )
    # Released files give the number of rotated elements instead of their fraction.
    rotary = rotary_of(s, head_dim, part=s.size("rotary_dim", default=head_dim) / head_dim)
    return plain(s, qk_norm="row", rotary=(rotary,) * num_layers, mixtures=(experts,) * num_layers)


MINIMAX_M2 = Family(
    title="MiniMax M2",
    types=("minimax_m2",),
    read=_read,
    names=Names(
        router="block_sparse_moe.gate",
        correction="block_sparse_moe.e_score_correction_bias",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
)
