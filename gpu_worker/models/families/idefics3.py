"""The language model of Idefics 3 and SmolVLM, which is a Llama. gpu_worker/models/images.py encodes the images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Names, Settings, plain
from midstream.errors import UnsupportedError


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    text = config.get("text_config")
    kind = text.get("model_type", "llama") if isinstance(text, Mapping) else None
    if kind != "llama":
        raise UnsupportedError(f"text_config of config.json must describe a llama; it is {kind!r}", field="model")
    # Only the setting at the top level decides whether the head is tied.
    return plain(Settings(config), ties_embeddings=bool(config.get("tie_word_embeddings", False)))


IDEFICS3 = Family(
    title="Idefics 3, SmolVLM",
    types=("idefics3", "smolvlm"),
    read=_read,
    names=Names(prefixes=("model.", "model.text_model.")),
)
