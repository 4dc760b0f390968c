"""Gemma 1 to 3. Norm weights are stored minus 1; embeddings are scaled by the square root of their size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import (
    Family,
    Names,
    Settings,
    activation_of,
    checked_rotary,
    plain,
    rope_of,
    windows_of,
)
from midstream.model.text_config import TEXT_DEFAULTS


def _common(s: Settings) -> dict[str, Any]:
    return {
        "norm_offset": 1.0,
        "embedding_scale": s.size("hidden_size") ** 0.5,
        "activation": activation_of(s.get("hidden_activation") or s.get("hidden_act", "gelu_pytorch_tanh")),
    }


def _read_gemma(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, head_dim=256, tie_word_embeddings=True)
    # Early files specify gelu but mean its tanh approximation.
    name = s.get("hidden_act", "gelu")
    activation = "gelu_tanh" if name == "gelu" else activation_of(name)
    return plain(s, **{**_common(s), "activation": activation})


def _read_gemma2(config: Mapping[str, Any]) -> DecoderDescription:
    # Null means no soft cap.
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    s = Settings(config, head_dim=256, tie_word_embeddings=True, sliding_window=4096, **caps)
    kinds = s.layers("layer_types") or _every(s, 2)
    return plain(
        s,
        **_common(s),
        norm_place="around",
        windows=windows_of(s, s.get("sliding_window"), kinds),
        scale=s.positive("query_pre_attn_scalar", 256) ** -0.5,
        softcap=_cap(s, "attn_logit_softcapping"),
        logits_softcap=_cap(s, "final_logit_softcapping"),
    )


def _read_gemma3(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, **{**TEXT_DEFAULTS["gemma3_text"], "tie_word_embeddings": True})
    s.refuse(use_bidirectional_attention=False)
    kinds = s.layers("layer_types") or _every(s, s.size("sliding_window_pattern", default=6))
    ropes, head_dim = Settings(s.group("rope_parameters")), s.size("head_dim")
    local = {"rope_theta": s.positive("rope_local_base_freq", 10000.0)}
    # In older files, `rope_scaling` applies to the layers without a window.
    far = rope_of(s, {**ropes.group("full_attention"), **s.group("rope_scaling")}, theta=1e6)
    near = rope_of(s, {**local, **ropes.group("sliding_attention")})
    rotary = {
        "full_attention": checked_rotary(far, head_dim, head_dim),
        "sliding_attention": checked_rotary(near, head_dim, head_dim),
    }
    return plain(
        s,
        **_common(s),
        norm_place="around",
        qk_norm="head",
        rotary=tuple(rotary.get(str(kind)) for kind in kinds),
        windows=windows_of(s, s.get("sliding_window"), kinds),
        scale=s.positive("query_pre_attn_scalar", 256) ** -0.5,
        # transformers' class for models with images applies no soft cap.
        logits_softcap=_cap(s, "final_logit_softcapping") if config.get("model_type") == "gemma3_text" else 0.0,
    )


def _cap(s: Settings, name: str) -> float:
    """Return a soft cap; 0 if the setting is missing or null."""
    return 0.0 if s.get(name) is None else s.positive(name)


def _every(s: Settings, pattern: int) -> list[str]:
    """Return the kinds of the layers: every `pattern`-th layer attends to all tokens, the others to a window."""
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(s.size("num_hidden_layers"))]


_AROUND = Names(
    prefixes=("model.", "model.language_model.", "language_model.model."), ffn_norm="pre_feedforward_layernorm"
)
GEMMA = Family(title="Gemma", types=("gemma",), read=_read_gemma, reads_gguf=True)
GEMMA2 = Family(title="Gemma 2", types=("gemma2",), read=_read_gemma2, names=_AROUND, reads_gguf=True)
GEMMA3 = Family(title="Gemma 3", types=("gemma3_text", "gemma3"), read=_read_gemma3, names=_AROUND, reads_gguf=True)
