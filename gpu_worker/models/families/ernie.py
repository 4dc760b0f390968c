"""ERNIE 4.5, dense, whose rotary embedding rotates adjacent pairs of elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Settings, plain, rotary_of


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, tie_word_embeddings=True, rope_theta=500000.0, rms_norm_eps=1e-5, head_dim=128)
    return plain(
        s,
        rotary=(rotary_of(s, s.size("head_dim"), is_interleaved=True),) * s.size("num_hidden_layers"),
        has_mlp_bias=bool(s.get("use_bias", False)),
    )


ERNIE4_5 = Family(title="ERNIE 4.5", types=("ernie4_5",), read=_read)
