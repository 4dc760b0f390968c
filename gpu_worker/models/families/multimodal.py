"""The language models of models of text and images, whose settings are in `text_config`. gpu_worker/models/images.py
encodes the images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families.family import Family, Names
from gpu_worker.models.families.granite import GRANITE
from gpu_worker.models.families.llama import LLAMA
from gpu_worker.models.families.mistral import MISTRAL
from gpu_worker.models.families.qwen import QWEN
from midstream.errors import UnsupportedError
from midstream.model.text_config import text_config

# Language models whose tensors have the same names.
_INNER = {model_type: family for family in (LLAMA, MISTRAL, QWEN, GRANITE) for model_type in family.types}


def _read(config: Mapping[str, Any]) -> DecoderDescription:
    text = text_config(config)
    kind = text.get("model_type")
    if kind not in _INNER or not isinstance(config.get("text_config"), Mapping):
        known = ", ".join(_INNER)
        raise UnsupportedError(
            f"text_config of config.json must describe one of {known}; it is {kind!r}", field="model"
        )
    return replace(_INNER[kind].read(text), architecture=str(config.get("model_type")))


def _family(title: str, *types: str, part: str = "language_model") -> Family:
    prefixes = ("model.", f"model.{part}.", f"{part}.model.")
    return Family(title=title, types=types, read=_read, names=Names(prefixes=prefixes))


IDEFICS3 = _family("Idefics 3, SmolVLM", "idefics3", "smolvlm", part="text_model")
LLAVA = _family("LLaVA 1.5, Pixtral", "llava")
LLAVA_NEXT = _family("LLaVA-NeXT, Granite Vision", "llava_next")
MISTRAL3 = _family("Mistral Small 3.1", "mistral3")
INTERNVL = _family("InternVL", "internvl")
