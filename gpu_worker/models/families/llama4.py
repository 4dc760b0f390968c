"""The language model of Llama 4: layers without rotary embedding, attention within chunks, a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription, Mixture, PositionScale
from gpu_worker.models.families.family import Family, Names, Settings, plain, rotary_of
from midstream.model.text_config import TEXT_DEFAULTS


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, **{**TEXT_DEFAULTS["llama4_text"], "rope_theta": 500000.0})
    num_layers, size = s.size("num_hidden_layers"), s.size("intermediate_size")
    interval = s.size("no_rope_layer_interval", default=4)
    # The setting is 1 for layers that have a rotary embedding.
    rotates = s.layers("no_rope_layers") or [(i + 1) % interval for i in range(num_layers)]
    kinds = s.layers("layer_types") or ["chunked_attention" if turns else "full_attention" for turns in rotates]
    chunk = s.size("attention_chunk_size", default=8192)
    step = s.size("interleave_moe_layer_step", default=1)
    mixed = s.indices("moe_layers", range(step - 1, num_layers, step))
    experts = Mixture(
        num_experts=s.size("num_local_experts"),
        num_active=s.size("num_experts_per_tok"),
        expert_size=size,
        scoring="sigmoid",
        is_normalized=False,
        weighs_input=True,
        shared_size=size,
    )
    rotary = rotary_of(s, s.size("head_dim"), is_interleaved=True)
    tunes = s.flag("attn_temperature_tuning", True)
    return plain(
        s,
        intermediate_size=s.size("intermediate_size_mlp"),
        rotary=tuple(rotary if turns else None for turns in rotates),
        chunks=tuple(chunk if kind == "chunked_attention" else None for kind in kinds),
        has_unit_qk_norm=s.flag("use_qk_norm", True),
        position_scale=PositionScale(s.number("floor_scale", 8192), s.number("attn_scale", 0.1)) if tunes else None,
        mixtures=tuple(experts if i in mixed else None for i in range(num_layers)),
    )


LLAMA4 = Family(
    title="Llama 4 (text)",
    types=("llama4_text", "llama4"),
    read=_read,
    names=Names(
        prefixes=("model.", "model.language_model.", "language_model.model."),
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        router="feed_forward.router",
        experts="stacked",
        expert_gate_up=("feed_forward.experts.gate_up_proj",),
        expert_down="feed_forward.experts.down_proj",
        shared_prefix="feed_forward.shared_expert.",
    ),
)
