"""Reads how a model folder of sentence-transformers makes a vector of a text.

modules.json lists the modules in order and the folder of each; config_sentence_transformers.json has the prompts; and
the config of the Pooling module, in the current form and in the one before version 6, how hidden states are pooled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midstream.errors import ConfigError
from midstream.model.json_file import read_json

_MODULES, _SETTINGS, _LENGTH = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
_DEFAULT_POOLING = "1_Pooling"
_NO_LENGTH = 1 << 30
# Older keys of the config of Pooling, and the modes for which they stand.
_OLDER_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Additional outputs of encoders with the pooled states of a text, by the mode of pooling.
POOLED_STATES = {mode: f"pooled_states.{mode}" for mode in _OLDER_MODES.values()}
# The additional output of classifiers with the scores of all classes.
CLASS_SCORES = "class_scores"
# Modules that this project computes or that change nothing when a trained model is used. Others change vectors.
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize", "Dropout", "LogitScore")


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """How a text becomes a vector.

    Attributes:
        pooling: The modes of pooling, by their names in sentence-transformers, whose vectors are concatenated; a model
            that is not of sentence-transformers has the hidden state at the last token or, if it is an encoder, the
            mean, which is sentence-transformers' default.
        pooling_file: The file that names them, for messages.
        includes_prompt: Whether the tokens of the prompt are pooled.
        other_modules: Modules that are not computed, as TYPE (FOLDER); the vectors need them.
        has_normalize: Whether the vectors are scaled to unit length.
        prompts: Texts that are put before an input, by name.
        default_prompt: Name of the prompt for inputs for which none is named.
        max_tokens: Maximum number of tokens of an input; None if not limited.
    """

    pooling: tuple[str, ...] = ("lasttoken",)
    pooling_file: str = ""
    includes_prompt: bool = True
    other_modules: tuple[str, ...] = ()
    has_normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None


def read_text_encoder(folder: Path, *, is_encoder: bool = False) -> TextEncoder:
    """Return how the model in `folder` makes vectors; `is_encoder` means that its tokens attend to the whole text.

    Raises ConfigError if a file is damaged.
    """
    modules = _modules(folder)
    prompts, default = _prompts(folder)
    places = [place for kind, place in modules if kind == "Pooling"]
    pooling_file = folder / (places[0] if places else _DEFAULT_POOLING) / "config.json"
    pooling: tuple[str, ...] = ("mean" if is_encoder else "lasttoken",)
    includes_prompt = True
    if places or (not modules and pooling_file.is_file()):
        pooling, includes_prompt = _pooling(pooling_file)
    elif any(kind == "Transformer" for kind, _ in modules):
        pooling = ()
    return TextEncoder(
        pooling=pooling,
        pooling_file=str(pooling_file.relative_to(folder)),
        includes_prompt=includes_prompt,
        other_modules=tuple(f"{kind} ({place})" for kind, place in modules if kind not in _KNOWN_MODULES),
        has_normalize=any(kind == "Normalize" for kind, _ in modules),
        prompts=prompts,
        default_prompt=default,
        max_tokens=_max_tokens(folder, next((place for kind, place in modules if kind == "Transformer"), None)),
    )


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return the type and the folder of each module; empty if there is no list."""
    file = folder / _MODULES
    if not file.is_file():
        return []
    try:
        listed = [(str(item["type"]).rpartition(".")[2], str(item.get("path", ""))) for item in _json(file)]
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{file} is not a list of modules: {error!r}", field="model") from None
    root = folder.resolve()
    for _, place in listed:
        if Path(place).is_absolute() or ".." in Path(place).parts or not (root / place).is_relative_to(root):
            raise ConfigError(f"{file} names a folder outside its own: {place!r}", field="model")
    return listed


def _pooling(file: Path) -> tuple[tuple[str, ...], bool]:
    """Return the modes of pooling, and whether the prompt is pooled; defaults are those of sentence-transformers."""
    config = read_json(file)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLDER_MODES.items() if config.get(key)] or "mean"
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or not set(map(str, modes)) <= set(_OLDER_MODES.values()):
        raise ConfigError(f"{file}: pooling_mode {modes!r} is not known", field="model")
    return tuple(map(str, modes)), config.get("include_prompt", True) is not False


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default one."""
    file = folder / _SETTINGS
    settings = read_json(file, optional=True)
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ConfigError(f"{file}: prompts is not an object of texts", field="model")
    if default is not None and default not in prompts:
        raise ConfigError(f"{file}: default_prompt_name {default!r} is not one of the prompts", field="model")
    return {name: text or "" for name, text in prompts.items()}, default


def _max_tokens(folder: Path, place: str | None) -> int | None:
    """Return the maximum number of tokens; `place` is the folder of the module Transformer, None if there is none."""
    file = folder / (place or "") / _LENGTH
    value = read_json(file, optional=True).get("max_seq_length")
    if value is None and place is not None:
        # Version 6 sets the length of the tokenizer instead. Tokenizers without a length have a huge number.
        length = read_json(folder / place / "tokenizer_config.json", optional=True).get("model_max_length")
        value = length if isinstance(length, int) and 0 < length < _NO_LENGTH else None
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{file}: max_seq_length is {value!r}; must be a positive number", field="model")
    return value


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}", field="model") from None
