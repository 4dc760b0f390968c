"""Granite: Llama with factors on embeddings, attention, residuals and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Settings, plain


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config)
    return plain(
        s,
        embedding_scale=s.number("embedding_multiplier", 1.0),
        scale=s.number("attention_multiplier", 1.0),
        residual_scale=s.number("residual_multiplier", 1.0),
        logits_scale=1.0 / s.number("logits_scaling", 1.0),
    )


GRANITE = Family(title="Granite", types=("granite",), read=_read)
