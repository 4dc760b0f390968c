"""Reports what a worker makes of a model folder, without reading its weights. Run by `midstream check`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from gpu_worker.models.families import describe, family_of
from gpu_worker.models.families.family import settings_read
from gpu_worker.models.loader import refuse_other_heads
from gpu_worker.models.weights.quantized import read_scheme, refuse_quantized
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.facts import Fact, Use, print_facts
from midstream.model.folder import ModelFolder, open_model_folder

# Settings of config.json that other parts read.
_READ_ELSEWHERE = {
    "architectures", "auto_map", "bos_token_id", "compression_config", "eos_token_id", "id2label", "image_token_id",
    "num_labels", "pad_token_id", "quantization_config", "text_config", "tie_word_embeddings",
}  # fmt: skip
_FOR_TRAINING = (
    "dropout",
    "initializer",
    "router_aux_loss",
    "label",
    "loss",
    "pretraining",
    "problem_type",
    "gradient",
)
_ABOUT_THE_FILE = ("version", "_name_or_path", "dtype", "use_cache", "return_", "output_")


class _Config(dict[str, Any]):
    """A config.json that notes which settings are read."""

    def get(self, name: str, default: Any = None) -> Any:
        _note(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        _note(name)
        return super().__getitem__(name)


def _note(name: str) -> None:
    seen = settings_read.get()
    if seen is not None:
        seen.add(name)


def facts_of(folder: ModelFolder) -> Iterator[Fact]:
    """Yield what a worker finds out about `folder`."""
    try:
        refuse_other_heads(folder)
    except UnsupportedError as error:
        yield Fact("config.json: architectures", Use.REFUSED, error.message)
    if folder.is_encoder:
        yield Fact("config.json", Use.USED, "runs with the transformers implementation")
        yield from _quantization(folder, is_native=False)
        return
    is_native = True
    seen: set[str] = set()
    reader = settings_read.set(seen)
    try:
        description = describe(_Config(folder.config))
        if folder.weights_format == "gguf" and not family_of(description.architecture).reads_gguf:
            raise UnsupportedError(f"a GGUF file of {description.architecture!r} is not supported", field="model")
    except UnsupportedError as error:
        is_native = False
        reason = error.message
    except ConfigError as error:
        yield Fact("config.json", Use.REFUSED, error.message)
        return
    finally:
        settings_read.reset(reader)
    if not is_native:
        yield Fact("config.json", Use.USED, f"runs with the transformers implementation, if at all: {reason}")
    yield from _quantization(folder, is_native=is_native)
    if is_native:
        yield from _settings(folder, seen)


def _quantization(folder: ModelFolder, *, is_native: bool) -> Iterator[Fact]:
    try:
        if not is_native:
            refuse_quantized(folder)
        scheme = read_scheme(folder)
    except (ConfigError, UnsupportedError) as error:
        yield Fact("quantization", Use.REFUSED, error.message)
        return
    if scheme is not None:
        yield Fact("quantization", Use.USED, scheme.method)


def _settings(folder: ModelFolder, seen: set[str]) -> Iterator[Fact]:
    """Yield the settings of config.json that are read, and those that are not, with a reason."""
    nested = folder.config.get("text_config")
    names = list(nested if isinstance(nested, dict) else folder.config)
    read = [name for name in names if name in seen or name in _READ_ELSEWHERE]
    yield Fact("config.json", Use.USED, ", ".join(read))
    reasons: dict[str, list[str]] = {}
    for name in names:
        if name not in read:
            reasons.setdefault(_reason(name), []).append(name)
    for reason, unread in reasons.items():
        yield Fact(f"config.json: {', '.join(unread)}", Use.IGNORED, reason)


def _reason(name: str) -> str:
    if any(part in name for part in _FOR_TRAINING):
        return "only for training"
    if any(part in name for part in _ABOUT_THE_FILE):
        return "does not change the model"
    return "not a setting of this family"


if __name__ == "__main__":
    print_facts(facts_of(open_model_folder(sys.argv[1])))
