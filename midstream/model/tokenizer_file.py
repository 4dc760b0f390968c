"""Reads a folder's tokenizer as transformers does: tokenizer.json, completed with tokens of tokenizer_config.json.

1. Added tokens that only tokenizer_config.json lists are added, in the order of their ids.
2. Special tokens that tokenizer_config.json names, such as `eos_token`, are added and marked as special.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from midstream.errors import ConfigError
from midstream.model.json_file import read_json

# Special tokens by their names in transformers.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE_SPECIAL = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_Json = dict[str, Any]


def read_tokenizer(file: Path) -> str:
    """Return the contents of a tokenizer.json, completed with the tokenizer_config.json next to it.

    Raises:
        ConfigError: The file is missing, or one of the two is damaged.
    """
    fields = read_json(file)
    if _add_tokens(file.parent, fields):
        return json.dumps(fields, ensure_ascii=False)
    return file.read_text(encoding="utf-8")


def special_tokens(folder: Path) -> dict[str, str | None]:
    """Return the special tokens that the tokenizer's files name; None for those that they declare not to exist."""
    return {name: _content(value) for name, value in _named_tokens(folder, _config(folder)).items()}


def tokenizer_fingerprint(folder: Path, end_ids: Iterable[int]) -> str:
    """Return a sha256, in hexadecimal, over everything that decides the tokens of a text and the text of tokens: the
    tokenizer, the tokens that the other files add, and the ids that end an output.
    """
    config = _config(folder)
    names = ("added_tokens_decoder", *_MORE_SPECIAL)
    added = [_named_tokens(folder, config), {name: config.get(name) for name in names}, list(end_ids)]
    digest = hashlib.sha256(json.dumps(added, sort_keys=True).encode())
    digest.update(hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest())
    return digest.hexdigest()


def _config(folder: Path) -> _Json:
    return read_json(folder / "tokenizer_config.json", optional=True)


def _named_tokens(folder: Path, config: _Json) -> _Json:
    # special_tokens_map.json is for older folders; newer ones list all tokens in tokenizer_config.json.
    older = {} if "added_tokens_decoder" in config else read_json(folder / "special_tokens_map.json", optional=True)
    return {name: value for name, value in {**config, **older}.items() if name in _SPECIAL_TOKENS}


def _content(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _add_tokens(folder: Path, fields: _Json) -> bool:
    """Add the missing tokens to `fields`; return whether there are any."""
    config = _config(folder)
    added = [token for token in fields.get("added_tokens") or [] if isinstance(token, dict)]
    named = _named_tokens(folder, config)
    names = {_content(value) for value in named.values()}
    known = {token.get("content"): token for token in added}
    missing = [
        token for token in _listed_tokens(folder, config) if token.items() - known.get(token["content"], {}).items()
    ]
    listed = {token["content"] for token in missing} | known.keys()
    missing += [token for token in _special_tokens(folder, config, named) if token["content"] not in listed]
    if not missing:
        return False
    ids = _ids(fields)
    for token in missing:
        content = token["content"]
        number = ids.setdefault(content, max(ids.values(), default=-1) + 1)
        known[content] = {"id": number, **token, "special": token["special"] or content in names}
    fields["added_tokens"] = sorted(known.values(), key=lambda token: token["id"])
    return True


def _listed_tokens(folder: Path, config: _Json) -> list[_Json]:
    """Return the added tokens that tokenizer_config.json lists, in the order of their ids."""
    listed = config.get("added_tokens_decoder") or {}
    try:
        tokens = [token for _, token in sorted(listed.items(), key=lambda item: int(item[0]))]
        contents = [(token["content"], token) for token in tokens]
    except (AttributeError, KeyError, TypeError, ValueError):
        file = folder / "tokenizer_config.json"
        raise ConfigError(f"{file}: added_tokens_decoder does not contain tokens by id", field="model") from None
    return [_token(folder, "added_tokens_decoder", content, flags) for content, flags in contents]


def _special_tokens(folder: Path, config: _Json, named: _Json) -> Iterator[_Json]:
    """Yield the special tokens that the files name."""
    values = list(named.values())
    for name in _MORE_SPECIAL:
        more = config.get(name)
        values += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    for value in values:
        if content := _content(value):
            yield _token(folder, "the special tokens", content, value if isinstance(value, dict) else {"special": True})


def _token(folder: Path, place: str, content: object, flags: _Json) -> _Json:
    token = {"content": content, **{name: flags.get(name, False) for name in _FLAGS}}
    if not isinstance(content, str) or not all(isinstance(token[name], bool) for name in _FLAGS):
        file = folder / "tokenizer_config.json"
        raise ConfigError(f"{file}: {place} must not contain {str(token)[:200]}", field="model")
    return token


def _ids(fields: _Json) -> dict[str, int]:
    """Return the ids of all tokens by their text."""
    vocabulary = (fields.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # tokens with scores
        vocabulary = {item[0] if isinstance(item, list) else item: number for number, item in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in fields.get("added_tokens") or []}}
