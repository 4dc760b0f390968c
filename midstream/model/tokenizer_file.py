"""Reads a folder's tokenizer as transformers does: tokenizer.json, completed with the tokens of the other files.

1. Tokens are *listed* by id in `added_tokens_decoder` of tokenizer_config.json. Without it, they are those of
   added_tokens.json and tokenizer.json, and special_tokens_map.json may name more in the next step.
2. Tokens are *named* by keys such as `eos_token` of tokenizer_config.json; any other key that ends in `_token` names
   one as well, and so do `model_specific_special_tokens` and `extra_special_tokens` if these are objects.
3. As lists, `extra_special_tokens` and `additional_special_tokens` have *more* tokens.

All listed tokens are added to those of tokenizer.json in the order of their ids, with the flags of the list. Then come
the named ones and the others that neither the list nor tokenizer.json has. A token is special if any of these places
says so, or if it is listed and named; no later place can undo that.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream.errors import ConfigError
from midstream.model.json_file import read_json

# Special tokens by their names in transformers, in the order in which it adds them.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ADDITIONAL, _EXTRA, _MODEL_SPECIFIC = (
    "additional_special_tokens",
    "extra_special_tokens",
    "model_specific_special_tokens",
)
_LISTED = "added_tokens_decoder"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a model folder tells about its tokenizer. The manifest keeps it, since reading it takes up to a second.

    Attributes:
        special_tokens: As in TokenizerFiles.
        end_id: Id of `eos_token`, if there is one.
        digest: A sha256, in hexadecimal, over everything that decides the tokens of a text and the text of tokens: the
            tokenizer and the tokens that the other files add.
    """

    special_tokens: Mapping[str, str | None]
    end_id: int | None
    digest: str

    def fingerprint(self, end_ids: Iterable[int]) -> str:
        """Return a sha256, in hexadecimal, of the digest and the ids that end an output."""
        return hashlib.sha256(json.dumps([self.digest, list(end_ids)]).encode()).hexdigest()


def file_stamps(folder: Path) -> dict[str, list[int]]:
    """Return the size and the time of the last change of each file of a tokenizer."""
    files = [folder / name for name in ("tokenizer.json", _CONFIG, _MAP, _ADDED)]
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()}


def read_tokenizer(file: Path) -> str:
    """Return the contents of a tokenizer.json, completed with the files next to it.

    Raises:
        ConfigError: The file is missing, or one of them is damaged.
    """
    return TokenizerFiles(file.parent).text


class TokenizerFiles:
    """The files of a folder's tokenizer.

    Attributes:
        special_tokens: Special tokens by their names in transformers; None for those that the files declare not to
            exist.
    """

    def __init__(self, folder: Path) -> None:
        """Read the files. Raises ConfigError if tokenizer.json is missing, or a file is damaged."""
        self._folder = folder
        # As the library writes it, the model is last and nearly all of the file, and is seldom needed here.
        self._fields = read_json(folder / "tokenizer.json", until="model")
        if not {"added_tokens", "padding"} <= self._fields.keys():
            self._fields = self._whole
        self._original = self._fields.get("added_tokens")
        self._config = read_json(folder / _CONFIG, optional=True)
        named, more = self._merge()
        self.special_tokens = {name: _content(value) for name, value in named.items()}
        self._added_ids = {token["content"]: token["id"] for token in _added_tokens(self._fields)}
        self._add(self._listed, named, more)

    @functools.cached_property
    def text(self) -> str:
        """The contents of tokenizer.json, completed."""
        if self._fields.get("added_tokens") == self._original:
            return (self._folder / "tokenizer.json").read_bytes().decode()
        return json.dumps(self._whole | self._fields, ensure_ascii=False)

    @functools.cached_property
    def _whole(self) -> _Json:
        return read_json(self._folder / "tokenizer.json")

    @functools.cached_property
    def _vocabulary(self) -> dict[str, int]:
        model = self._whole.get("model")
        vocabulary = (model.get("vocab") if isinstance(model, dict) else None) or {}
        if isinstance(vocabulary, list):  # tokens with scores
            return {item[0] if isinstance(item, list) else item: number for number, item in enumerate(vocabulary)}
        return vocabulary if isinstance(vocabulary, dict) else {}

    @property
    def splits_special_tokens(self) -> bool:
        """Whether a text's special tokens are read as ordinary text."""
        return self._config.get("split_special_tokens") is True

    @property
    def cleans_up_spaces(self) -> bool:
        """Whether transformers would remove spaces before punctuation from the text of tokens, which we do not."""
        if not self._config.get("clean_up_tokenization_spaces"):
            return False
        model = self._whole.get("model")
        is_bpe = isinstance(model, dict) and model.get("type") == "BPE"
        even_so = self._config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
        return not is_bpe or bool(even_so)

    def id_of(self, name: str) -> int | None:
        """Return the id of a special token; None if there is no token of this name."""
        content = self.special_tokens.get(name)
        return None if content is None else self._find(content)

    def _find(self, content: str) -> int | None:
        number = self._added_ids.get(content)
        return self._vocabulary.get(content) if number is None else number

    def facts(self) -> TokenizerFacts:
        """Return what the other parts of a service need to know."""
        added = self._fields.get("added_tokens")
        decisive = [self.special_tokens, added, self.splits_special_tokens]
        digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode())
        digest.update(hashlib.sha256((self._folder / "tokenizer.json").read_bytes()).digest())
        return TokenizerFacts(self.special_tokens, self.id_of("eos_token"), digest.hexdigest())

    def _merge(self) -> tuple[dict[str, object], list[object]]:
        """Return the named tokens and the others; set the listed ones."""
        settings = dict(self._config)
        if not settings.get(_EXTRA) and _ADDITIONAL in settings:
            settings[_EXTRA] = settings.pop(_ADDITIONAL)
        specific = {name: settings.pop(name) for name in list(settings) if _names_token(name, settings[name])}
        if isinstance(settings.get(_EXTRA), dict):
            specific |= settings.pop(_EXTRA)
        if specific:
            settings[_MODEL_SPECIFIC] = specific
        if _LISTED in settings:
            self._listed = _by_id(self._folder, settings[_LISTED])
        else:
            self._merge_map(settings)
            self._listed = self._older_tokens(settings)
        if _ADDITIONAL in settings and _EXTRA not in settings:
            settings[_EXTRA] = settings.pop(_ADDITIONAL)
        padding = self._fields.get("padding")
        if isinstance(padding, dict) and isinstance(padding.get("pad_token"), str):
            settings.setdefault("pad_token", padding["pad_token"])
        named = {name: settings[name] for name in _SPECIAL_TOKENS if name in settings}
        named |= {name: value for name, value in settings.items() if name.endswith("_token") and _content(value)}
        more = settings.get(_MODEL_SPECIFIC)
        named |= more if isinstance(more, dict) else {}
        extra = settings.get(_EXTRA)
        if isinstance(extra, dict):
            named |= extra
        return named, extra if isinstance(extra, list) else []

    def _merge_map(self, settings: _Json) -> None:
        """Add the tokens of special_tokens_map.json, which older folders have, to the settings."""
        for name, value in read_json(self._folder / _MAP, optional=True).items():
            if isinstance(value, dict) and name != _EXTRA:
                settings[name] = {**value, "special": True}
            elif name == _EXTRA and isinstance(value, list):
                known = settings.get(_EXTRA)
                known = known if isinstance(known, list) else []
                tokens = [{**token, "special": True} if isinstance(token, dict) else token for token in value]
                settings[_EXTRA] = known + [token for token in tokens if token not in known]
            else:
                settings[name] = value
        if isinstance(settings.get(_EXTRA), dict):
            settings[_MODEL_SPECIFIC] = {**(settings.get(_MODEL_SPECIFIC) or {}), **settings.pop(_EXTRA)}

    def _older_tokens(self, settings: _Json) -> list[_Json]:
        """Return the tokens of added_tokens.json and tokenizer.json in the order of their ids."""
        extra = settings.get(_EXTRA)
        values = [settings.get(name) for name in _SPECIAL_TOKENS] + (extra if isinstance(extra, list) else [])
        # transformers compares the texts before it has read the objects of tokenizer_config.json as tokens.
        special = {_content(value) for value in values if not isinstance(value, dict) or "__type" not in value}
        tokens: dict[int, _Json] = {}
        for content, number in read_json(self._folder / _ADDED, optional=True).items():
            if not isinstance(number, int):
                raise ConfigError(f"{self._folder / _ADDED}: {content!r:.200} has no id", field="model")
            is_special = content in special
            flags = {"special": is_special, "normalized": not is_special}
            tokens[number] = _token(self._folder, _ADDED, content, flags)
        for token in _added_tokens(self._fields):
            tokens[token["id"]] = token
        return [tokens[number] for number in sorted(tokens)]

    def _add(self, listed: list[_Json], named: dict[str, object], more: list[object]) -> None:
        """Complete the added tokens of tokenizer.json."""
        known = {token["content"]: token for token in _added_tokens(self._fields)}
        names = {_content(value) for value in named.values()}
        tokens = [{**token, "special": token["special"] or token["content"] in names} for token in listed]
        listed_contents = known.keys() | {token["content"] for token in tokens}
        for value in [*named.values(), *more]:
            content = _content(value)
            if content and content not in listed_contents:
                flags = value if isinstance(value, dict) else {"special": True}
                token = _token(self._folder, "the special tokens", content, flags)
                tokens.append({**token, "special": token["special"] or content in names})
        for token in tokens:
            content = token["content"]
            before = known.get(content)
            number = self._find(content)
            if number is None:
                number = self._added_ids[content] = self._next_id(known)
            is_special = token["special"] or (before is not None and before["special"])
            known[content] = {
                "id": number,
                **{name: token[name] for name in ("content", *_FLAGS)},
                "special": is_special,
            }
        added = sorted(known.values(), key=lambda token: token["id"])
        if added != self._original:
            self._fields["added_tokens"] = added

    def _next_id(self, known: dict[str, _Json]) -> int:
        """Return the id that the tokenizers library gives a new token."""
        size = len(self._vocabulary)
        return max((token["id"] + 1 for token in known.values() if token["id"] >= size), default=size)


def _names_token(name: str, value: object) -> bool:
    return name.endswith("_token") and name not in _SPECIAL_TOKENS and isinstance(value, str)


def _content(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _by_id(folder: Path, listed: object) -> list[_Json]:
    """Return the added tokens that tokenizer_config.json lists, in the order of their ids."""
    try:
        items = sorted((listed or {}).items(), key=lambda item: int(item[0]))  # type: ignore[attr-defined]
        contents = [(token["content"], token) for _, token in items]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(f"{folder / _CONFIG}: {_LISTED} does not contain tokens by id", field="model") from None
    return [_token(folder, _LISTED, content, flags) for content, flags in contents]


def _added_tokens(fields: _Json) -> list[_Json]:
    """Return the added tokens of tokenizer.json; the library checks them."""
    tokens = fields.get("added_tokens")
    return [
        token | {name: bool(token.get(name)) for name in _FLAGS}
        for token in (tokens if isinstance(tokens, list) else [])
        if isinstance(token, dict) and isinstance(token.get("content"), str) and isinstance(token.get("id"), int)
    ]


def _token(folder: Path, place: str, content: object, flags: _Json) -> _Json:
    token = {"content": content, **{name: flags.get(name, False) for name in _FLAGS}}
    token["normalized"] = flags.get("normalized", not token["special"])
    if not isinstance(content, str) or not all(isinstance(token[name], bool) for name in _FLAGS):
        raise ConfigError(f"{folder / _CONFIG}: {place} must not contain {str(token)[:200]}", field="model")
    return token
