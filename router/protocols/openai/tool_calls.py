"""Reads tool calls out of a model's text, as it comes.

A reader is fed one sequence's text in order. What it gives depends on the text alone, not on how it was cut, so that a
stream is taken up by feeding the text once more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from router.protocols.openai.body import refuse_constant

_DECODER = json.JSONDecoder(parse_constant=refuse_constant)
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# Special tokens that some models write first; where special tokens are left out of text, nothing is there.
_MARKS = ("[TOOL_CALLS]", "<|python_tag|>")
_BETWEEN = " \t\r\n,;"


@dataclass(frozen=True, slots=True)
class CallPart:
    """News of one call.

    Attributes:
        index: Which call of the sequence.
        name: Of the function, with the first part.
        arguments: JSON text, or the next piece of it.
    """

    index: int
    name: str | None
    arguments: str


class Reader(Protocol):
    """Text in; content and calls out."""

    def read(self, text: str, *, is_final: bool) -> tuple[str, list[CallPart]]:
        """New content, and new calls in it. `text` goes on where the last ended; after `is_final` there is no more."""


# Of the names of the tools that are offered.
MakeReader = Callable[[Collection[str]], Reader]


class TaggedReader:
    """Hermes' and Qwen's way: each call is a JSON object between `<tool_call>` and `</tool_call>`, beside content."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._num_calls = 0
        self._follows_call = False

    def read(self, text: str, *, is_final: bool) -> tuple[str, list[CallPart]]:
        """See Reader."""
        self._held += text
        content, calls = "", list[CallPart]()
        while True:
            if self._follows_call:
                self._held = self._held.lstrip()
                self._follows_call = not self._held
            before, opening, rest = self._held.partition(_OPEN)
            if not opening:
                size = len(before) - (0 if is_final else _overlap(before, _OPEN))
                self._held = before[size:]
                return content + before[:size], calls
            inside, closing, after = rest.partition(_CLOSE)
            content += before
            if not closing and not is_final:
                self._held = opening + rest
                return content, calls
            call = _call(_parse(inside), self._names, self._num_calls)
            if call is None:
                content += opening + inside + closing
            else:
                calls.append(call)
                self._num_calls += 1
                self._follows_call = True
            self._held = after


class BareReader:
    """Llama's and Mistral's way: the text is JSON objects, one or an array of them, and nothing else.

    Text that does not begin so is content; so is all of it where the beginning turns out to be no call.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._position = 0
        self._num_calls = 0
        self._is_content = False

    def read(self, text: str, *, is_final: bool) -> tuple[str, list[CallPart]]:
        """See Reader."""
        if self._is_content:
            return text, []
        self._held += text
        calls = self._calls() if is_final or "}" in text else []
        if self._num_calls or not (is_final or self._cannot_begin()):
            return "", calls
        self._is_content = True
        return self._held, []

    def _cannot_begin(self) -> bool:
        begin = self._held.lstrip()
        if not begin or any(mark.startswith(begin) or begin.startswith(mark) for mark in _MARKS):
            return False
        return begin[0] not in "[{"

    def _calls(self) -> list[CallPart]:
        calls = list[CallPart]()
        if not self._position:
            begin = self._held.lstrip()
            for mark in _MARKS:
                begin = begin.removeprefix(mark)
            self._position = len(self._held) - len(begin.lstrip(f"[{_BETWEEN}"))
        while True:
            while self._held[self._position : self._position + 1] in tuple(_BETWEEN):
                self._position += 1
            try:
                value, end = _DECODER.raw_decode(self._held, self._position)
            except (ValueError, RecursionError):
                return calls
            call = _call(value, self._names, self._num_calls)
            if call is None:
                return calls
            calls.append(call)
            self._position = end
            self._num_calls += 1


class ArgumentsReader:
    """For a call that the request demands by name: all of the text is its arguments."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def read(self, text: str, *, is_final: bool) -> tuple[str, list[CallPart]]:
        """See Reader."""
        if not text and not (is_final and self._name):
            return "", []
        name, self._name = self._name, None
        return "", [CallPart(0, name, text)]


def format_of(template: str | None) -> MakeReader | None:
    """How a model whose chat template this is writes calls; None where that is not known."""
    if template is None:
        return None
    if _OPEN in template:
        return TaggedReader
    if any(mark in template for mark in _MARKS) or ("tools" in template and '"parameters"' in template):
        return BareReader
    return None


def _call(value: object, names: Collection[str], index: int) -> CallPart | None:
    """A call of a tool that was offered; None where the value is something else."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return CallPart(index, name, text)


def _parse(text: str) -> object:
    try:
        return _DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of `text` that may become `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
