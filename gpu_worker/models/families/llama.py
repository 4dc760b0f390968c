"""Llama 1 to 3, and models with the same architecture, such as Seed-OSS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Settings, plain


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    return plain(Settings(config))


def _read_seed(config: Mapping[str, Any]) -> DecoderDescription:
    return plain(Settings(config, head_dim=128))


SEED_OSS = Family(title="Seed-OSS", types=("seed_oss",), read=_read_seed)
LLAMA = Family(title="Llama", types=("llama",), read=_read, reads_gguf=True)
