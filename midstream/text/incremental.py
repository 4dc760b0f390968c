"""Incremental decoding at a constant cost per token, without splitting characters.

A token represents bytes; the text is their concatenation decoded as UTF-8. A decoder therefore keeps only the bytes of
an incomplete character, and the concatenated chunks equal the tokenizer's decoding of all tokens at once.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterable, Set
from copy import copy, deepcopy
from typing import Any, Protocol

from midstream.model.token_bytes import byte_level_alphabet, byte_level_bytes, fallback_byte
from midstream.model.tokenizer import Tokenizer
from midstream.text.decoder_steps import Step, step_makers

logger = logging.getLogger(__name__)

_REPLACEMENT = "\ufffd"


class TextDecoder(Protocol):
    """Decoder state of one sequence."""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text that becomes final with these tokens."""

    def finish(self) -> str:
        """Return the remaining text, with U+FFFD for incomplete bytes; do not use the decoder afterwards."""

    def copy(self) -> TextDecoder:
        """Return an independent decoder in the same state."""


class DecoderFactory(Protocol):
    """Creates decoders, and holds the tables that they share."""

    def open(self, *, skip_special_tokens: bool) -> TextDecoder:
        """Return a new decoder for one sequence."""


def decoder_factory(tokenizer: Tokenizer) -> DecoderFactory:
    """Return a decoder factory for a tokenizer: tables for the usual decoders, otherwise the decoder's steps."""
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
    logger.info("decoding text step by step (decoder: %s)", " + ".join(kinds))
    return StepFactory(tokenizer)


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

    def copy(self) -> TextDecoder:
        return copy(self)


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

    def copy(self) -> TextDecoder:
        other = copy(self)
        other._run = self._run[:]
        return other

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


class StepFactory:
    """Decoders for all other tokenizers, including those without a decoder: the steps of their decoder in turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._makers = step_makers(tokenizer.decoder)

    def open(self, *, skip_special_tokens: bool) -> TextDecoder:
        hidden = self._tokenizer.special_ids if skip_special_tokens else frozenset()
        return _StepDecoder(self._tokenizer, [make() for make in self._makers], hidden)


class _StepDecoder:
    __slots__ = ("_hidden", "_steps", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, steps: list[Step], hidden: Set[int]) -> None:
        self._tokenizer, self._steps, self._hidden = tokenizer, steps, hidden

    def decode(self, token_ids: Iterable[int]) -> str:
        found = (self._tokenizer.token(token_id) for token_id in token_ids if token_id not in self._hidden)
        tokens = [token for token in found if token is not None]
        for step in self._steps:
            tokens = [piece for token in tokens for piece in step.push(token)]
        return "".join(tokens)

    def finish(self) -> str:
        tokens: list[str] = []
        for step in self._steps:
            tokens = [piece for token in tokens for piece in step.push(token)]
            tokens += step.finish()
        return "".join(tokens)

    def copy(self) -> TextDecoder:
        return _StepDecoder(self._tokenizer, deepcopy(self._steps), self._hidden)


def _fallback_piece(token: str | None) -> str | int | None:
    if token is None:
        return None
    byte = fallback_byte(token)
    return token.replace("▁", " ") if byte is None else byte
