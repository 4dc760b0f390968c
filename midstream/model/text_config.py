"""The settings of the language model in config.json.

In a model of text and images they are in `text_config`, and published files list only those that differ from
transformers' defaults, so the defaults are here: services cannot import transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model of text and images whose language model is one of several kinds.

    Attributes:
        text_type: `model_type` of the language model if config.json does not name it.
        ties_embeddings: Default of `tie_word_embeddings`.
        image_token_id: Default of the token that stands for a part of an image.
        follows_text: Whether the head is also tied if `text_config` says so.
    """

    text_type: str
    ties_embeddings: bool
    image_token_id: int
    follows_text: bool = False


WRAPPERS = {
    "idefics3": Wrapper("llama", ties_embeddings=False, image_token_id=128257),
    "smolvlm": Wrapper("llama", ties_embeddings=False, image_token_id=128257),
    "llava": Wrapper("llama", ties_embeddings=False, image_token_id=32000, follows_text=True),
    "llava_next": Wrapper("llama", ties_embeddings=False, image_token_id=32000),
    "mistral3": Wrapper("mistral", ties_embeddings=True, image_token_id=10),
    "internvl": Wrapper("qwen2", ties_embeddings=True, image_token_id=151667),
}

TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
    "granite": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "llama4_text": {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
    },
}
# `model_type` of the language models of other kinds, if config.json does not name it.
_TEXT_TYPES = {"gemma3": "gemma3_text", "llama4": "llama4_text"}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the language model, with transformers' defaults if they are a part of config.json, and
    with `tie_word_embeddings` as in the whole model.
    """
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return dict(config)
    kind = str(config.get("model_type"))
    wrapper = WRAPPERS.get(kind)
    text_type = nested.get("model_type") or (wrapper.text_type if wrapper else _TEXT_TYPES.get(kind))
    text = {**TEXT_DEFAULTS.get(str(text_type), {}), **nested}
    if text_type is not None:
        text["model_type"] = text_type
    ties = config.get("tie_word_embeddings")
    if wrapper is not None:
        ties = wrapper.ties_embeddings if ties is None else ties
        ties = ties or (wrapper.follows_text and bool(nested.get("tie_word_embeddings")))
    # Only the setting at the top level decides whether the head is tied.
    if ties is not None:
        text["tie_word_embeddings"] = ties
    return text
