"""Arcee (AFM): Llama with feed-forward networks that have no gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Names, Settings, activation_of, plain


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    s = Settings(config, rms_norm_eps=1e-5)
    return plain(s, has_gated_ffn=False, activation=activation_of(s.get("hidden_act", "relu2")))


ARCEE = Family(title="Arcee", types=("arcee",), read=_read, names=Names(gate_up=("mlp.up_proj",)), reads_gguf=True)
