"""ERNIE 4.5, dense or with experts, whose rotary embedding rotates adjacent pairs of elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, Mixture
from gpu_worker.models.families.family import Family, Names, Settings, plain, rotary_of
from midstream.errors import UnsupportedError

# Sums of the weights of a token's experts are larger than this.
_LEAST_SUM = 1e-6


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, tie_word_embeddings=True, rope_theta=500000.0, rms_norm_eps=1e-5, head_dim=128)
    return plain(
        s,
        rotary=(rotary_of(s, s.size("head_dim"), is_interleaved=True),) * s.size("num_hidden_layers"),
        has_mlp_bias=s.flag("use_bias", False),
    )


def _read_mixture(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, tie_word_embeddings=True, rope_theta=500000.0, rms_norm_eps=1e-5)
    s.refuse(use_bias=False)
    num_layers, size = s.size("num_hidden_layers"), s.size("moe_intermediate_size", default=1536)
    experts = Mixture(
        num_experts=s.size("moe_num_experts", "num_experts", default=64),
        num_active=s.size("moe_k", "num_experts_per_tok", default=6),
        expert_size=size,
        has_correction=True,
        shared_size=size * int(s.number("moe_num_shared_experts", 2)),
    )
    # The weights of the chosen experts are divided by their sum, or by this number if it is larger.
    least = s.number("moe_norm_min", 1e-12)
    if least > _LEAST_SUM:
        raise UnsupportedError(f"moe_norm_min {least} of config.json is not supported", field="model")
    first, last = int(s.number("moe_layer_start_index", 1)), int(s.number("moe_layer_end_index", -1))
    interval = s.size("moe_layer_interval", default=1)
    mixed = range(first, (num_layers - 1 if last == -1 else last) + 1)
    head_dim = s.size("head_dim", default=s.size("hidden_size") // s.size("num_attention_heads"))
    return plain(
        s,
        rotary=(rotary_of(s, head_dim, is_interleaved=True),) * num_layers,
        mixtures=tuple(experts if i in mixed and (i + 1) % interval == 0 else None for i in range(num_layers)),
    )


ERNIE4_5 = Family(title="ERNIE 4.5", types=("ernie4_5",), read=_read, reads_gguf=True)
ERNIE4_5_MIXTURE = Family(
    title="ERNIE 4.5 MoE",
    types=("ernie4_5_moe",),
    read=_read_mixture,
    names=Names(correction="mlp.moe_statics.e_score_correction_bias"),
)
