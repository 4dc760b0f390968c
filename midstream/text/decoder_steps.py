"""The steps of a tokenizer's decoder, one token at a time.

The tokenizers library passes the list of all tokens through one step of the decoder after the other, and joins what
comes out. A step here takes the tokens in turn, and returns those that later ones cannot change:

    ▁a  <0xC3>  <0xA9>  b   --Replace-->   " a"  <0xC3>  <0xA9>  b   --ByteFallback-->   " a"  é  b

The library computes what becomes of each token. Fuse and ByteLevel join all tokens to one, whose pieces the next steps
get as they become final. A step that needs all of that token returns nothing before the end.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import tokenizers

from midstream.model.token_bytes import byte_level_alphabet, byte_level_bytes

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN_CHARACTERS = len("<0x00>")
# Longer patterns are not searched for in pieces, since that takes time for each token.
_MAX_PATTERN = 64
_Decode = Callable[[list[str]], str]
_NO_VOCABULARY: dict[str, object] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "model": {"type": "BPE", "vocab": {}, "merges": []},
}  # fmt: skip


class Step(Protocol):
    """The state of a step for one sequence."""

    def push(self, token: str) -> Iterable[str]:
        """Return the tokens, or the pieces of the joined token, that become final with a token or piece."""

    def finish(self) -> Iterable[str]:
        """Return the rest; do not use the step afterwards."""


def step_makers(decoder: dict[str, Any]) -> list[Callable[[], Step]]:
    """Return functions that create the steps of a decoder.

    Args:
        decoder: The section of this name of tokenizer.json; empty if it has none.
    """
    if not decoder:
        return [_Words]
    makers: list[Callable[[], Step]] = []
    is_joined = False
    for fields in _flat(decoder):
        makers.append((_joined_step if is_joined else _step)(fields))
        is_joined = is_joined or fields.get("type") in ("Fuse", "ByteLevel")
    return makers


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flat(part)]


def _step(fields: dict[str, Any]) -> Callable[[], Step]:
    """Return what creates a step whose tokens are not joined."""
    decode = _decode(fields)
    match fields.get("type"):
        case "Replace" | "Strip":
            return partial(_Each, decode)
        case "WordPiece" | "Metaspace":
            return partial(_EachAfterFirst, decode)
        case "BPEDecoder":
            return partial(_EachBeforeLast, decode)
        case "CTC":
            return partial(_Distinct, decode)
        case "ByteFallback":
            return partial(_ByteRuns, decode)
        case "ByteLevel":
            return _Bytes
        case "Fuse":
            return _Pass
        case _:
            return partial(_Whole, decode)


def _joined_step(fields: dict[str, Any]) -> Callable[[], Step]:
    """Return what creates a step that gets a single token in pieces."""
    decode = _decode(fields)
    match fields:
        case {"type": "Fuse"} | {"type": "WordPiece", "cleanup": False} | {"type": "BPEDecoder", "suffix": ""}:
            return _Pass
        case {"type": "Replace", "pattern": {"String": str(text)}, "content": str(content)} if (
            0 < len(text) <= _MAX_PATTERN
        ):
            return partial(_Replaced, text, content)
        case {"type": "BPEDecoder", "suffix": str(text)} if len(text) <= _MAX_PATTERN:
            return partial(_Replaced, text, "")
        case {"type": "Strip", "content": str(character), "start": int(number), "stop": 0}:
            return partial(_Stripped, character, number)
        case {"type": "Metaspace"}:
            return partial(_Each, decode)
        case {"type": "ByteFallback"}:
            return partial(_OneByte, decode)
        case _:
            return partial(_Whole, decode)


def _decode(fields: dict[str, Any]) -> _Decode:
    """Return the library's function of one step, from all tokens to the text."""
    decode: _Decode = tokenizers.Tokenizer.from_str(json.dumps({**_NO_VOCABULARY, "decoder": fields})).decoder.decode
    return decode


class _Pass:
    """Returns everything unchanged."""

    __slots__ = ()

    def push(self, token: str) -> Iterable[str]:
        return (token,)

    def finish(self) -> Iterable[str]:
        return ()


class _Each(_Pass):
    """Changes each token regardless of the others."""

    __slots__ = ("_decode",)

    def __init__(self, decode: _Decode) -> None:
        self._decode = decode

    def push(self, token: str) -> Iterable[str]:
        return (self._decode([token]),)


class _EachAfterFirst(_Pass):
    """Changes each token in the same way, but the first one in another."""

    __slots__ = ("_before", "_decode")

    def __init__(self, decode: _Decode) -> None:
        self._decode = decode
        self._before: tuple[str, ...] = ()

    def push(self, token: str) -> Iterable[str]:
        text = self._decode([*self._before, token])
        self._before = ("",)
        return (text,)


class _EachBeforeLast:
    """Changes each token in the same way, but the last one in another."""

    __slots__ = ("_decode", "_held")

    def __init__(self, decode: _Decode) -> None:
        self._decode = decode
        self._held: list[str] = []

    def push(self, token: str) -> Iterable[str]:
        held, self._held = self._held, [token]
        return (self._decode([*held, ""]),) if held else ()

    def finish(self) -> Iterable[str]:
        return (self._decode(self._held),) if self._held else ()


class _Distinct(_Pass):
    """Changes each token that differs from the one before, and drops those that become empty."""

    __slots__ = ("_before", "_decode")

    def __init__(self, decode: _Decode) -> None:
        self._decode = decode
        self._before: str | None = None

    def push(self, token: str) -> Iterable[str]:
        if token == self._before:
            return ()
        self._before = token
        text = self._decode([token])
        return (text,) if text else ()


class _ByteRuns:
    """Changes each run of byte tokens as a whole."""

    __slots__ = ("_decode", "_run")

    def __init__(self, decode: _Decode) -> None:
        self._decode = decode
        self._run: list[str] = []

    def push(self, token: str) -> Iterable[str]:
        if self._decode([token]) != token:
            self._run.append(token)
            return ()
        return (*self.finish(), token)

    def finish(self) -> Iterable[str]:
        run, self._run = self._run, []
        if not run:
            return ()
        text = self._decode(run)
        # Each byte of a run that is not UTF-8 becomes a token.
        return (text,) if text != _REPLACEMENT * len(run) else text


class _Bytes:
    """Joins the bytes that GPT-2's alphabet stands for, and returns the characters that are complete."""

    __slots__ = ("_rest",)

    _ALPHABET = byte_level_alphabet()

    def __init__(self) -> None:
        self._rest = b""

    def push(self, token: str) -> Iterable[str]:
        data = self._rest + byte_level_bytes(token, self._ALPHABET)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return (text,)

    def finish(self) -> Iterable[str]:
        return (self._rest.decode("utf-8", "replace"),)


class _Words(_Pass):
    """Separates the tokens by spaces, as the library does without a decoder."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before = ""

    def push(self, token: str) -> Iterable[str]:
        before, self._before = self._before, " "
        return (before + token,)


class _Replaced:
    """Replaces a text in the joined token."""

    __slots__ = ("_content", "_rest", "_text")

    def __init__(self, text: str, content: str) -> None:
        self._text, self._content = text, content
        self._rest = ""

    def push(self, token: str) -> Iterable[str]:
        *before, last = (self._rest + token).split(self._text)
        # The end may be the beginning of the text.
        longest = min(len(last), len(self._text) - 1)
        held = next((n for n in range(longest, 0, -1) if self._text.startswith(last[len(last) - n :])), 0)
        self._rest = last[len(last) - held :]
        return (self._content.join([*before, last[: len(last) - held]]),)

    def finish(self) -> Iterable[str]:
        return (self._rest,)


class _Stripped(_Pass):
    """Removes characters at the beginning of the joined token."""

    __slots__ = ("_character", "_left")

    def __init__(self, character: str, number: int) -> None:
        self._character, self._left = character, number

    def push(self, token: str) -> Iterable[str]:
        while self._left and token:
            if not token.startswith(self._character):
                self._left = 0
                break
            token = token[1:]
            self._left -= 1
        return (token,)


class _OneByte:
    """Changes the joined token if all of it is one byte token."""

    __slots__ = ("_decode", "_start")

    def __init__(self, decode: _Decode) -> None:
        self._decode = decode
        self._start: str | None = ""

    def push(self, token: str) -> Iterable[str]:
        if self._start is None:
            return (token,)
        self._start += token
        if len(self._start) <= _BYTE_TOKEN_CHARACTERS:
            return ()
        start, self._start = self._start, None
        return (start,)

    def finish(self) -> Iterable[str]:
        return (self._decode([self._start]),) if self._start else ()


class _Whole:
    """Changes all tokens together at the end."""

    __slots__ = ("_decode", "_tokens")

    def __init__(self, decode: _Decode) -> None:
        self._decode = decode
        self._tokens: list[str] = []

    def push(self, token: str) -> Iterable[str]:
        self._tokens.append(token)
        return ()

    def finish(self) -> Iterable[str]:
        return (self._decode(["".join(self._tokens)]),)
