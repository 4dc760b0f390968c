"""Combines weights and a tokenizer from two folders into one model folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from midstream.errors import ConfigError, InvalidArgumentError
from midstream.model.folder import open_model_folder
from midstream.model.tokenizer_file import read_tokenizer

# Names of the tokenizer's files, and of the folder of its templates.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)


def with_tokenizer(engine_dir: str, tokenizer_dir: str | None, target: Path) -> str:
    """Return a folder with the engine's weights and the given tokenizer; `engine_dir` itself if the tokenizer is the
    engine's own.

    Args:
        engine_dir: Model folder, GGUF file, or `smollm2`; a folder may lack a tokenizer.
        tokenizer_dir: Same kinds as engine_dir, but only its tokenizer is used; None means the engine's tokenizer.
        target: The folder to create, with links to the files.

    Raises:
        ConfigError: A folder or file is missing.
        InvalidArgumentError: The tokenizer has ids that the model lacks.
    """
    if tokenizer_dir is None or tokenizer_dir == engine_dir:
        return engine_dir
    engine, tokenizer = _folder(engine_dir), _folder(tokenizer_dir)
    if engine.resolve() == tokenizer.resolve():
        return engine_dir
    _check_vocabulary(engine, tokenizer)
    combined = target / engine.resolve().name
    combined.mkdir(parents=True)
    for file in engine.iterdir():
        if file.name not in _TOKENIZER_FILES and not file.name.startswith("."):
            (combined / file.name).symlink_to(file.resolve())
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).exists():
            (combined / name).symlink_to((tokenizer / name).resolve())
    return str(combined)


def one_tokenizer(tokenizer_dir: str | None, postprocess_tokenizer_dir: str | None) -> str | None:
    """Return the tokenizer folder that routers and detokenizers share.

    Raises:
        InvalidArgumentError: The two folders have different tokenizers.
    """
    given = [folder for folder in (tokenizer_dir, postprocess_tokenizer_dir) if folder is not None]
    if len(given) == 2 and given[0] != given[1]:
        first, second = (_folder(folder) / "tokenizer.json" for folder in given)
        if read_tokenizer(first) != read_tokenizer(second):
            raise InvalidArgumentError("is not the tokenizer in tokenizer_dir", field="postprocess_tokenizer_dir")
    return given[0] if given else None


def _folder(model: str) -> Path:
    path = Path(model).expanduser()
    return path if path.is_dir() else open_model_folder(model).path


def _check_vocabulary(engine: Path, tokenizer: Path) -> None:
    try:
        vocab_size = json.loads((engine / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        contents = json.loads(read_tokenizer(tokenizer / "tokenizer.json"))
        largest = max(_token_ids(contents), default=-1)
        fits = largest < vocab_size
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read the model and its tokenizer: {error}", field="tokenizer_dir") from None
    if not fits:
        raise InvalidArgumentError(f"has token id {largest}; the model has {vocab_size} tokens", field="tokenizer_dir")


def _token_ids(contents: dict[str, dict[str, object] | list[dict[str, int]]]) -> Iterator[int]:
    model = contents["model"]
    vocabulary = model["vocab"] if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary.values()
    elif isinstance(vocabulary, list):
        yield len(vocabulary) - 1
    yield from (token["id"] for token in contents.get("added_tokens", []) if isinstance(token, dict))
