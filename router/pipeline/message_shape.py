"""How a chat template wants messages, found by rendering short conversations when the template is loaded.

Templates differ in what they read: the content of a message as a string or as a list of parts, null or an empty string
beside tool calls, and the arguments of a call as an object or as JSON text. Given another form, they fail, print
Python's notation, or leave the text or the call out without an error.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from midstream.errors import InvalidArgumentError
from router.parsers.machine import parse_json

Message = Mapping[str, object]
# Renders messages; raises InvalidArgumentError if the template rejects them.
Render = Callable[[Sequence[Message]], str]
# `one_part` is a list with a single text.
ContentForm = Literal["text", "parts", "one_part"]

# A template that exceeds its limits in every conversation must not delay the start for long.
_PROBE_S = 5.0
# Texts that no template contains.
_FIRST, _SECOND, _KEY, _VALUE = "zqkfirst", "zqksecond", "zqkkey", "zqkvalue"
_NAME, _CALL_ID = "zqkname", "zqk123456"  # Mistral's ids have nine letters and digits
_NOTATION = re.compile(rf"""text\\?['"]\s*:\s*\\?['"]{_FIRST}""")
_ARGUMENTS: tuple[object, str] = {_KEY: _VALUE}, f'{{"{_KEY}": "{_VALUE}"}}'
_CUT_ARGUMENTS = f'{{"{_KEY}": "{_VALUE}'
PROBE_TOOLS: list[object] = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "",
            "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
        },
    }
]


@dataclass(frozen=True, slots=True)
class MessageShape:
    """The forms in which a template reads messages.

    Attributes:
        texts: By role, the form of a content that is a string.
        lists: By role, the form of a content that is a list of texts.
        beside_calls: Content of an assistant's message that has only tool calls: None, or text.
        arguments_are_text: Whether the arguments of tool calls are JSON text instead of objects.
        shows_other_arguments: Whether the template also shows arguments that are a text instead of an object, such as
            those of a call that was cut off.
    """

    texts: Mapping[str, ContentForm] = field(default_factory=dict)
    lists: Mapping[str, ContentForm] = field(default_factory=dict)
    beside_calls: Literal[""] | None = ""
    arguments_are_text: bool = False
    shows_other_arguments: bool = False

    def arguments(self, value: object) -> object:
        """Return a call's arguments, given as an object or a text; None and an empty text mean none. A text that is not
        an object in JSON is kept; templates that read only objects get it as the only member of one.
        """
        if self.arguments_are_text:
            return value if isinstance(value, str) and value else json.dumps(value or {}, ensure_ascii=False)
        parsed = value or {}
        if isinstance(value, str) and value:
            try:
                parsed = parse_json(value)
            except ValueError:
                parsed = value
        if isinstance(parsed, dict):
            return parsed
        if parsed is None:
            return {}
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return text if self.shows_other_arguments else {"arguments": text}

    def content(self, role: str, texts: str | Sequence[str]) -> object:
        """Return a content that has a text, or a list of texts; roles without a form are treated as the user's."""
        if isinstance(texts, str):
            forms, text, several = self.texts, texts, [texts]
        else:
            forms, text, several = self.lists, "\n".join(texts), list(texts)
        form = forms.get(role, forms.get("user", "text"))
        if form == "text":
            return text
        return [text_part(part) for part in (several if form == "parts" else [text])]


def message_shape(render: Render) -> MessageShape:
    """Return the forms that a template reads, by rendering conversations with it."""
    probe = _Probe(render)
    # Each role's messages are tried in a conversation whose other messages are in forms that were found before.
    for role in ("user", "system", "developer", "assistant"):
        probe.find_forms(role)
    probe.find_call_form()
    probe.find_other_arguments()
    for role in ("tool", "function"):
        probe.find_forms(role)
    return probe.shape


class _Probe:
    """Finds one form after the other; `shape` has those found so far."""

    def __init__(self, render: Render) -> None:
        self.shape = MessageShape()
        self._render = render
        self._give_up_at = time.monotonic() + _PROBE_S

    def find_forms(self, role: str) -> None:
        """Find the forms of a role's contents."""
        reads_part = self._shows(role, [text_part(_FIRST)], _FIRST)
        text: ContentForm = "one_part" if reads_part and not self._shows(role, _FIRST, _FIRST) else "text"
        reads_parts = reads_part and self._shows(role, [text_part(_FIRST), text_part(_SECOND)], _FIRST, _SECOND)
        several: ContentForm = "parts" if reads_parts else text
        texts, lists = {**self.shape.texts, role: text}, {**self.shape.lists, role: several}
        self.shape = replace(self.shape, texts=texts, lists=lists)

    def find_call_form(self) -> None:
        """Find the first content and arguments with which the call is shown before its result, or else as the last
        message, which some templates read differently; if no form shows it, the first content with which the
        conversation is rendered.
        """
        contents: tuple[Literal[""] | None, ...] = (None, "")
        rendered: list[MessageShape] = []
        for has_result, is_text, content in product((True, False), (False, True), contents):
            shape = replace(self.shape, beside_calls=content, arguments_are_text=is_text)
            after = [_result("tool", shape.content("tool", _SECOND))] if has_result else []
            # Descriptions of tools usually come before the first message, which some templates read only as parts.
            text = self._text([self._user(_FIRST), self._calling(shape), *after]).rpartition(_FIRST)[2]
            # None that the template prints, Python's notation, and text that is encoded twice.
            if not text or re.search(rf"None|null|'{_KEY}'|\\\"{_KEY}", text):
                continue
            if _VALUE in text:
                self.shape = shape
                return
            rendered.append(shape)
        self.shape = rendered[0] if rendered else self.shape

    def find_other_arguments(self) -> None:
        """Find whether a call is shown whose arguments are a text."""
        turns = [self._user("-"), self._calling(self.shape, _CUT_ARGUMENTS), _result("tool", "")]
        shows = any(_VALUE in self._text(shown) for shown in (turns, turns[:2]))
        self.shape = replace(self.shape, shows_other_arguments=shows)

    def _shows(self, role: str, content: object, *marks: str) -> bool:
        turn = {"role": role, "content": content}
        match role:
            case "user":
                turns = [turn]
            case "system" | "developer":
                turns = [turn, self._user("-")]
            case "assistant":
                turns = [self._user("-"), turn, self._user("-")]
            case _:
                turns = [self._user("-"), self._calling(self.shape), _result(role, content)]
        text = self._text(turns)
        return all(mark in text for mark in marks) and not _NOTATION.search(text)

    def _text(self, messages: Sequence[Message]) -> str:
        """Return the rendered conversation; empty if the template rejects it, or if probing has taken too long."""
        if time.monotonic() > self._give_up_at:
            return ""
        try:
            return self._render(messages)
        except InvalidArgumentError:
            return ""

    def _user(self, text: str) -> dict[str, object]:
        return {"role": "user", "content": self.shape.content("user", text)}

    def _calling(self, shape: MessageShape, arguments: str = "") -> dict[str, object]:
        function = {"name": _NAME, "arguments": arguments or _ARGUMENTS[shape.arguments_are_text]}
        content = None if shape.beside_calls is None else shape.content("assistant", "")
        return {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"id": _CALL_ID, "type": "function", "function": function}],
        }


def _result(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content, "tool_call_id": _CALL_ID, "name": _NAME}


def text_part(text: str) -> dict[str, object]:
    """Return a part of a message's content."""
    return {"type": "text", "text": text}
