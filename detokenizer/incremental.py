"""Incremental decoding at a constant cost per token, without splitting characters.

A token represents bytes; the text is their concatenation decoded as UTF-8. A decoder therefore keeps only the bytes of
an incomplete character, and the concatenated chunks equal the tokenizer's decoding of all tokens at once.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterable
from typing import Any, Protocol

from midstream.model.token_bytes import byte_level_alphabet, byte_level_bytes, fallback_byte
from midstream.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Maximum number of tokens held without a complete character, which has at most 4 bytes; this bounds the cost per token.
_MAX_WAITING = 32
_REPLACEMENT = "\ufffd"


class TextDecoder(Protocol):
    """Decoder state of one sequence."""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text that becomes final with these tokens."""

    def finish(self) -> str:
        """Return the remaining text, with U+FFFD for incomplete bytes; do not use the decoder afterwards."""


class DecoderFactory(Protocol):
    """Creates decoders, and holds the tables that they share."""

    def open(self, *, skip_special_tokens: bool) -> TextDecoder:
        """Return a new decoder for one sequence."""


def decoder_factory(tokenizer: Tokenizer) -> DecoderFactory:
    """Return a decoder factory for a tokenizer: our own tables for known decoders, otherwise the tokenizers library."""
    steps: list[dict[str, Any]] = tokenizer.decoder.get("decoders", [tokenizer.decoder])
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelFactory(tokenizer)
    replace, strip = {"pattern": {"String": "▁"}, "content": " "}, {"content": " ", "start": 1, "stop": 0}
    if (
        kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"])
        and replace.items() <= steps[0].items()
        and (len(steps) == 3 or strip.items() <= steps[3].items())
    ):
        return ByteFallbackFactory(tokenizer, strip_first_space=len(steps) == 4)
    logger.info("decoding text with the tokenizers library (decoder: %s)", " + ".join(kinds))
    return LibraryFactory(tokenizer)


class ByteLevelFactory:
    """Decoders for GPT-2's byte-level alphabet, in which each character of a vocabulary entry represents one byte."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        alphabet = byte_level_alphabet()
        self._all = [
            byte_level_bytes(tokenizer.token(token_id) or "", alphabet) for token_id in range(tokenizer.vocab_size)
        ]
        self._plain = [b"" if i in tokenizer.special_ids else piece for i, piece in enumerate(self._all)]

    def open(self, *, skip_special_tokens: bool) -> TextDecoder:
        return _ByteLevelDecoder(self._plain if skip_special_tokens else self._all)


class _ByteLevelDecoder:
    __slots__ = ("_pieces", "_rest")

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def decode(self, token_ids: Iterable[int]) -> str:
        pieces, size = self._pieces, len(self._pieces)
        data = self._rest + b"".join([pieces[token_id] for token_id in token_ids if token_id < size])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def finish(self) -> str:
        return self._rest.decode("utf-8", "replace")


class ByteFallbackFactory:
    """Decoders for SentencePiece vocabularies: an entry is text with ▁ for a space, or <0xNN> for a single byte."""

    def __init__(self, tokenizer: Tokenizer, *, strip_first_space: bool) -> None:
        self._all = [_fallback_piece(tokenizer.token(token_id)) for token_id in range(tokenizer.vocab_size)]
        self._plain = [None if i in tokenizer.special_ids else piece for i, piece in enumerate(self._all)]
        self._strip_first_space = strip_first_space

    def open(self, *, skip_special_tokens: bool) -> TextDecoder:
        return _ByteFallbackDecoder(self._plain if skip_special_tokens else self._all, self._strip_first_space)


class _ByteFallbackDecoder:
    """Decodes a run of byte tokens as a whole, as the tokenizer does: no text is final before the run ends."""

    __slots__ = ("_pieces", "_run", "_strip")

    def __init__(self, pieces: list[str | int | None], strip: bool) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._strip = strip

    def decode(self, token_ids: Iterable[int]) -> str:
        parts: list[str] = []
        for token_id in token_ids:
            piece = self._pieces[token_id] if token_id < len(self._pieces) else None
            if isinstance(piece, int):
                self._run.append(piece)
            elif piece is not None:
                if self._run:
                    parts.append(self._end_run())
                parts.append(piece)
        return self._strip_first("".join(parts))

    def finish(self) -> str:
        return self._strip_first(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _strip_first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class LibraryFactory:
    """Decoders for all other tokenizers, including those without a decoder, based on the tokenizers library."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def open(self, *, skip_special_tokens: bool) -> TextDecoder:
        return _LibraryDecoder(self._tokenizer, skip_special_tokens=skip_special_tokens)


class _LibraryDecoder:
    """Keeps the last emitted tokens, which determine how the next ones are joined, and the pending tokens."""

    __slots__ = ("_before", "_skip", "_step", "_tokenizer", "_waiting")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._before: list[int] = []
        self._waiting: list[int] = []
        self._step = tokenizer.open_stream(skip_special_tokens=skip_special_tokens)

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join([self._decode(token_id) for token_id in token_ids])

    def finish(self) -> str:
        return self._flush() if self._waiting else ""

    def _decode(self, token_id: int) -> str:
        # The library decodes as if such a token did not exist, so the token must not be added to `_waiting`.
        if (self._skip and token_id in self._tokenizer.special_ids) or self._tokenizer.token(token_id) is None:
            return ""
        self._waiting.append(token_id)
        try:
            text = self._step(token_id)
        except Exception:  # noqa: BLE001 (the library raises plain Exception when a token changes emitted text)
            return self._flush()
        if text:
            self._before, self._waiting = self._waiting, []
        elif len(self._waiting) >= _MAX_WAITING:
            return self._flush()
        return text or ""

    def _flush(self) -> str:
        """Return the text of the pending tokens, regardless of which tokens follow."""
        before = self._text(self._before)
        text = self._text(self._before + self._waiting)
        text = text[len(before) :] if text.startswith(before) else self._text(self._waiting)
        self._before, self._waiting = self._waiting, []
        self._step = self._tokenizer.open_stream(self._before, skip_special_tokens=self._skip)
        return text

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def _fallback_piece(token: str | None) -> str | int | None:
    if token is None:
        return None
    byte = fallback_byte(token)
    return token.replace("▁", " ") if byte is None else byte
