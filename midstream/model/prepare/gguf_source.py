"""Creates a model folder from a GGUF file: the file itself, and its configuration and tokenizer as JSON."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from midstream.errors import ConfigError, UnsupportedError
from midstream.model.prepare.gguf_file import Metadata, MetadataValue, gguf_parts, read_gguf_head
from midstream.model.prepare.gguf_special_tokens import special_tokens_of
from midstream.model.prepare.gguf_tokenizer import build_tokenizer

_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
# Names of sampling parameters in llama.cpp, and in generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Template files of a model folder, by the templates' keys in the GGUF file.
_TEMPLATES = {
    "tokenizer.chat_template": "chat_template.jinja",
    "tokenizer.chat_template.tool_use": "additional_chat_templates/tool_use.jinja",
}


def lay_down(gguf_file: Path, folder: Path, sampling: Mapping[str, float]) -> None:
    """Fill the empty `folder` with config.json, the tokenizer's files, the chat templates if there are any, and
    model.gguf.

    Sampling parameters that the file recommends (`general.sampling.*`) override those of `sampling`.

    model.gguf is a hard link to `gguf_file` if the file system allows it, otherwise a copy; the parts of a divided file
    become model-00001-of-00003.gguf and so on. Raises ConfigError if a file is not GGUF or is damaged, or a part is
    missing, and UnsupportedError if its architecture or tokenizer is not supported.
    """
    parts = gguf_parts(gguf_file)
    heads = [read_gguf_head(part) for part in parts]
    for number, head in enumerate(heads):
        place = head.metadata.get("split.no", 0), head.metadata.get("split.count", 0) or 1
        if place != (number, len(parts)):
            raise ConfigError(
                f"{parts[number]} is part {place[0]} of {place[1]} by its keys split.no and split.count; must be named "
                "NAME-00001-of-00003.gguf with its number, counted from 1, and the number of parts",
                field="model",
            )
    metadata = heads[0].metadata
    _write(folder / "config.json", build_config(metadata, {name for head in heads for name in head.tensors}))
    tokenizer, tokenizer_config = build_tokenizer(metadata)
    _write(folder / "tokenizer.json", tokenizer)
    _write(folder / "tokenizer_config.json", tokenizer_config)
    _write(folder / "generation_config.json", {**_special_ids(metadata), **sampling, **_sampling(metadata)})
    for key, file in _TEMPLATES.items():
        if isinstance(template := metadata.get(key), str):
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(template, encoding="utf-8")
    for number, part in enumerate(parts, 1):
        name = "model.gguf" if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.gguf"
        source, target = part.resolve(), folder / name
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


def build_config(metadata: Metadata, tensor_names: set[str]) -> dict[str, object]:
    """Return the contents of config.json, with transformers' names, that `metadata` describes."""
    architecture = str(metadata.get("general.architecture", ""))
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedError(
            f"GGUF architecture {architecture!r} is not supported; supported are {known}", field="model"
        )
    model_type, class_name = _ARCHITECTURES[architecture]

    def get(name: str, default: MetadataValue | None = None) -> MetadataValue:
        value = metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise ConfigError(f"the GGUF file lacks {architecture}.{name}", field="model")
        return value

    if num_experts := get("expert_count", 0):
        raise UnsupportedError(f"{architecture}.expert_count {num_experts} is not supported", field="model")
    hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
    assert isinstance(hidden_size, int)
    if not isinstance(num_heads, int) or num_heads <= 0:
        raise ConfigError(
            f"{architecture}.attention.head_count must be a positive integer; got {num_heads}", field="model"
        )
    head_dim = get("attention.key_length", hidden_size // num_heads)
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    assert not isinstance(tokens, (int, float))
    config: dict[str, object] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": get("vocab_size", len(tokens)),
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "torch_dtype": "float32",
        **_special_ids(metadata),
    }
    # The setting is also written if there is no window: a missing setting would get a default.
    config["sliding_window"] = metadata.get(f"{architecture}.attention.sliding_window") or None
    if (scaling := _rope_scaling(metadata, f"{architecture}.rope.")) is not None:
        config["rope_scaling"] = scaling
    rotated = get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedError(
            f"{architecture}.rope.dimension_count {rotated} is not supported; must be {head_dim}, a whole head",
            field="model",
        )
    return config


def _rope_scaling(metadata: Metadata, prefix: str) -> dict[str, object] | None:
    """Return `rope_scaling` of config.json; None if rotary frequencies are not scaled. Missing settings have the
    defaults of llama.cpp.
    """

    def number(name: str) -> float | None:
        value = metadata.get(prefix + name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{prefix}{name} must be a number; got {value!r}", field="model")
        return value

    # Older files have the factor of linear scaling under another name.
    factor = number("scaling.factor") or number("scale_linear")
    kind = metadata.get(f"{prefix}scaling.type", "linear" if factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(f"rope scaling {kind!r} is not known", field="model")
    multiplier = number("scaling.attn_factor")
    if kind != "yarn" and multiplier not in (None, 1):
        raise UnsupportedError(f"{prefix}scaling.attn_factor {multiplier} is supported only with yarn", field="model")
    if kind == "none":
        return None
    _check_extrapolation(number("scaling.yarn_ext_factor"), kind, prefix)
    if factor is None:
        raise ConfigError(f"the GGUF file lacks {prefix}scaling.factor", field="model")
    scaling: dict[str, object] = {"rope_type": kind, "factor": factor}
    if original := metadata.get(f"{prefix}scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        magnitude = number("scaling.yarn_attn_factor")
        # llama.cpp's attn_factor multiplies the factor derived from the scale; transformers' attention_factor replaces
        # it.
        if multiplier is not None:
            magnitude = multiplier * (magnitude or 1 + 0.1 * math.log(max(factor, 1)))
        found = {
            "attention_factor": magnitude,
            "beta_fast": number("scaling.yarn_beta_fast"),
            "beta_slow": number("scaling.yarn_beta_slow"),
        }
        scaling |= {name: value for name, value in found.items() if value is not None}
    return scaling


def _check_extrapolation(factor: float | None, kind: MetadataValue, prefix: str) -> None:
    """Raise UnsupportedError if `factor` mixes two kinds of scaling; a negative factor means the kind's default."""
    usual = int(kind == "yarn")
    if factor is not None and factor >= 0 and factor != usual:
        raise UnsupportedError(
            f"{prefix}scaling.yarn_ext_factor {factor:g} is not supported with {kind}; must be {usual}", field="model"
        )


def _sampling(metadata: Metadata) -> dict[str, object]:
    values = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: value for name, value in values.items() if value is not None}


def _special_ids(metadata: Metadata) -> dict[str, object]:
    special = special_tokens_of(metadata)
    found: dict[str, object] = {
        name: special.named[key]
        for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding"))
        if key in special.named
    }
    if special.ends:
        found["eos_token_id"] = special.ends[0] if len(special.ends) == 1 else list(special.ends)
    return found


def _write(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
