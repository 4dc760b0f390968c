"""Combines weights and a tokenizer from two folders, or from memory, into one model folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midstream.errors import ConfigError, InvalidArgumentError
from midstream.executor.config import GuidedDecodingConfig
from midstream.model.folder import open_model_folder
from midstream.model.text_config import text_config
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
        tokenizer_dir: Same kinds as engine_dir, but only its tokenizer is used; None means the engine's tokenizer
            or, if it has none, one whose tokens are their numbers, for programs that use token ids only.
        target: The folder to create, with links to the files.

    Raises:
        ConfigError: A folder or file is missing.
        InvalidArgumentError: The tokenizer has ids that the model lacks.
    """
    if tokenizer_dir is None or tokenizer_dir == engine_dir:
        folder = Path(engine_dir).expanduser()
        if folder.is_dir() and not (folder / "tokenizer.json").exists():
            return _with_numbers(folder, target)
        return engine_dir
    engine, tokenizer = _folder(engine_dir), _folder(tokenizer_dir)
    if engine.resolve() == tokenizer.resolve():
        return engine_dir
    _check_vocabulary(engine, tokenizer)
    combined = _linked(engine, target)
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


def write_engine(engine: bytes | bytearray | memoryview, config: str, target: Path) -> str:
    """Write a model given as the contents of its files to a folder, and return the model's path.

    Args:
        engine: Contents of a GGUF file or of a model.safetensors.
        config: Contents of config.json; empty for a GGUF file.
        target: The folder to create.
    """
    target.mkdir(parents=True)
    if bytes(engine[:4]) == b"GGUF":
        (target / "model.gguf").write_bytes(engine)
        return str(target / "model.gguf")
    (target / "model.safetensors").write_bytes(engine)
    (target / "config.json").write_text(config, encoding="utf-8")
    return str(target)


def read_config(model: str) -> dict[str, Any]:
    """Return the contents of a model's config.json; empty if there is none."""
    try:
        found = json.loads((_folder(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check_vocabulary(config: GuidedDecodingConfig, model: str) -> None:
    """Check the tokenizer that a guided decoding configuration gives against that of the model.

    Raises:
        InvalidArgumentError: They differ.
    """
    texts = _vocabulary(read_tokenizer(_folder(model) / "tokenizer.json"))
    if config.encoded_vocab is not None:
        given = dict(enumerate(config.encoded_vocab))
        wrong = [token for token, text in texts.items() if given.get(token) != text]
        if wrong or len(given) > max(texts, default=-1) + 1:
            token = min(wrong, default=len(texts))
            raise InvalidArgumentError(
                f"has {given.get(token)!r} for token {token}, and the model {texts.get(token)!r}; leave it out, since "
                "the service reads the model's tokenizer",
                field="guided_decoding_config.encoded_vocab",
            )
    if config.tokenizer_str is not None and _vocabulary(config.tokenizer_str) != texts:
        raise InvalidArgumentError(
            "is not the model's tokenizer; leave it out, since the service reads that",
            field="guided_decoding_config.tokenizer_str",
        )


def _vocabulary(tokenizer: str | bytes) -> dict[int, str]:
    """Return the tokens of a tokenizer.json."""
    contents = json.loads(tokenizer)
    vocabulary = contents["model"]["vocab"]
    texts = (
        {number: text for text, number in vocabulary.items()}
        if isinstance(vocabulary, dict)
        else {number: entry[0] for number, entry in enumerate(vocabulary)}
    )
    return texts | {token["id"]: token["content"] for token in contents.get("added_tokens", ())}


def _with_numbers(engine: Path, target: Path) -> str:
    """Return a folder with the engine's weights and a tokenizer whose tokens are their numbers."""
    try:
        config = json.loads((engine / "config.json").read_text(encoding="utf-8"))
        vocab_size = int(config.get("vocab_size") or text_config(config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read the model's configuration: {error}", field="engine_dir") from None
    folder = _linked(engine, target)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {str(number): number for number in range(vocab_size)},
            "unk_token": "0",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return str(folder)


def _linked(engine: Path, target: Path) -> Path:
    """Create a folder with links to the engine's files, except the tokenizer's."""
    combined = target / engine.resolve().name
    combined.mkdir(parents=True)
    for file in engine.iterdir():
        if file.name not in _TOKENIZER_FILES and not file.name.startswith("."):
            (combined / file.name).symlink_to(file.resolve())
    return combined


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
