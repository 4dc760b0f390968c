"""Qwen 2 and 3, dense and as mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, Mixture
from gpu_worker.models.families.family import Family, Names, Settings, plain, windows_of


def _windows(s: Settings, config: Mapping[str, Any]) -> tuple[int | None, ...]:
    num_layers = s.size("num_hidden_layers")
    if not s.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = s.layers("layer_types")
    if kinds is None:
        first = int(s.get("max_window_layers", 28))
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return windows_of(s, config.get("sliding_window", 4096), kinds)


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config)
    return plain(s, windows=_windows(s, config), qk_norm="head" if s.get("model_type") == "qwen3" else None)


def _read_mixture(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, num_experts_per_tok=8 if config.get("model_type") == "qwen3_moe" else 4)
    is_qwen2 = s.get("model_type") == "qwen2_moe"
    experts = Mixture(
        num_experts=s.size("num_experts", "num_local_experts"),
        num_active=s.size("num_experts_per_tok"),
        expert_size=s.size("moe_intermediate_size"),
        is_normalized=bool(s.get("norm_topk_prob", False)),
        shared_size=s.size("shared_expert_intermediate_size") if is_qwen2 else 0,
        has_shared_gate=is_qwen2,
    )
    dense, step = s.get("mlp_only_layers", []), s.size("decoder_sparse_step", default=1)
    return plain(
        s,
        windows=_windows(s, config),
        qk_norm=None if is_qwen2 else "head",
        mixtures=tuple(
            experts if i not in dense and (i + 1) % step == 0 else None for i in range(s.size("num_hidden_layers"))
        ),
    )


QWEN = Family(title="Qwen 2, Qwen 3", types=("qwen2", "qwen3"), read=_read, reads_gguf=True)
QWEN_MIXTURE = Family(
    title="Qwen 2 MoE, Qwen 3 MoE",
    types=("qwen2_moe", "qwen3_moe"),
    read=_read_mixture,
    names=Names(shared_prefix="mlp.shared_expert."),
)
