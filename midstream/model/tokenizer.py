"""The model's tokenizer. It uses neither the network nor code from the model."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import tokenizers

from midstream.errors import ConfigError, InvalidArgumentError
from midstream.model.token_bytes import byte_level_alphabet, byte_level_bytes, fallback_byte
from midstream.model.tokenizer_check import check_tokenizer
from midstream.model.tokenizer_file import TokenizerFiles

logger = logging.getLogger(__name__)

# Maximum number of ids, since tables have an entry for each id up to the greatest one.
_MAX_IDS = 1 << 24


@functools.lru_cache(maxsize=1)
def open_tokenizer(path: Path, fingerprint: str) -> Tokenizer:
    """Return the tokenizer of the model folder `path`; the parts of a process share it, as it takes a second to load.

    Args:
        path: The folder.
        fingerprint: ModelFolder.tokenizer_fingerprint, which changes with the folder's contents.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    return Tokenizer(path)


class Tokenizer:
    """Encodes and decodes text. Thread-safe; encoding releases the GIL.

    Attributes:
        vocab_size: The greatest id plus one; some ids below it may have no token.
        special_ids: Ids of special tokens.
        added_tokens: Ids of tokens added to the vocabulary, by their text; includes special tokens.
        decoder: The `decoder` section of tokenizer.json.
    """

    def __init__(self, path: Path) -> None:
        """Load the tokenizer of the model folder `path`. Raises ConfigError if a file is missing or damaged."""
        file = path / "tokenizer.json"
        try:
            files = TokenizerFiles(path)
            text = files.text
            self.decoder: dict[str, Any] = check_tokenizer(file, text).get("decoder") or {}
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except ConfigError:
            raise
        except Exception as error:
            # The library raises plain Exception for any invalid file.
            raise ConfigError(f"{file} is not a tokenizer: {error}", field="model") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = files.splits_special_tokens
        if files.cleans_up_spaces:
            logger.warning("%s: clean_up_tokenization_spaces has no effect", path / "tokenizer_config.json")
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(ids, default=-1) + 1
        if self.vocab_size > _MAX_IDS:
            raise ConfigError(f"{file} has the token id {self.vocab_size - 1}; must be below {_MAX_IDS}", field="model")
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_tokens: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; `add_special_tokens` follows the tokenizer's own rules (usually, it adds a
        BOS). Raises InvalidArgumentError, without a field, if the tokenizer has no token for a part of the text.
        """
        ids: list[int] = self._encode([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_pair(self, first: str, second: str, max_tokens: int | None = None) -> tuple[list[int], list[int]]:
        """Return the token ids of two texts as one input, and the type of each token, by the tokenizer's own rules.

        Raises as `encode` does.

        Args:
            max_tokens: If set, tokens at the ends of the texts are left out, first of the longer one.
        """
        encodings = self._encode([first, second], add_special_tokens=False)
        if max_tokens is not None:
            room = max(max_tokens - self._tokenizer.num_special_tokens_to_add(is_pair=True), 0)
            lengths = _longest_first(len(encodings[0].ids), len(encodings[1].ids), room)
            for encoding, length in zip(encodings, lengths, strict=True):
                encoding.truncate(length)
        joined = self._tokenizer.post_process(encodings[0], encodings[1], True)  # adds special tokens
        return joined.ids, joined.type_ids

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        try:
            # Of the library's methods, only those for batches release the GIL.
            found: list[Any] = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
            raise InvalidArgumentError(f"cannot be tokenized by this model: {error}") from None
        return found

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; unknown ids are skipped."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary entry for an id, in the tokenizer's byte alphabet; None if there is none."""
        return self._tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; for part of a character, the bytes of that part."""
        token = self.token(token_id) or ""
        kinds = self._decoder_kinds
        if "ByteLevel" in kinds and token not in self.added_tokens:
            return byte_level_bytes(token, self._alphabet)
        byte = fallback_byte(token) if "ByteFallback" in kinds else None
        if byte is not None:
            return bytes([byte])
        if kinds & {"Metaspace", "ByteFallback"} and token not in self.added_tokens:
            # Decoding would strip the space before the first word of a text.
            return token.replace("▁", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    @functools.cached_property
    def _alphabet(self) -> dict[str, int]:
        return byte_level_alphabet()

    @functools.cached_property
    def _decoder_kinds(self) -> frozenset[str]:
        steps: list[dict[str, Any]] = self.decoder.get("decoders", [self.decoder])
        return frozenset(str(step.get("type")) for step in steps)

    @functools.cached_property
    def longest_token(self) -> int:
        """Number of characters in the longest entry: n characters of text are at least n / longest_token tokens."""
        return max(len(token) for token in self._tokenizer.get_vocab(with_added_tokens=True))


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the lengths to which two texts are truncated so that they have at most `room` tokens together, as the
    strategy `longest_first` of the tokenizers library does.
    """
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    longer = room - shorter
    return (shorter, longer) if first <= second else (longer, shorter)
