"""How a chat template wants messages, found by rendering short conversations when the template is loaded.

Templates differ in what they read: the content of a message as a string or as a list of parts, null or an empty string
beside tool calls, and the arguments of a call as an object or as JSON text. Given another form, they fail, print
Python's notation, or leave the text or the call out without an error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from midstream.errors import InvalidArgumentError

Message = Mapping[str, object]
# Renders messages; raises InvalidArgumentError if the template rejects them.
Render = Callable[[Sequence[Message]], str]
# `one_part` is a list with a single text.
ContentForm = Literal["text", "parts", "one_part"]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# A template that exceeds its limits in every conversation must not delay the start for long.
_PROBE_S = 5.0
# Texts that no template contains.
_FIRST, _SECOND, _KEY, _VALUE = "zqkfirst", "zqksecond", "zqkkey", "zqkvalue"
_NAME, _CALL_ID = "zqkname", "zqk123456"  # Mistral's ids have nine letters and digits
_NOTATION = re.compile(rf"""text\\?['"]\s*:\s*\\?['"]{_FIRST}""")
_ARGUMENTS: tuple[object, str] = {_KEY: _VALUE}, f'{{"{_KEY}": "{_VALUE}"}}'
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
        beside_calls: Content of an assistant's message that has only tool calls.
        arguments_are_text: Whether the arguments of tool calls are JSON text instead of objects.
    """

    texts: Mapping[str, ContentForm] = field(default_factory=dict)
    lists: Mapping[str, ContentForm] = field(default_factory=dict)
    beside_calls: Literal[""] | None = ""
    arguments_are_text: bool = False

    def form_of(self, role: str, *, is_list: bool) -> ContentForm:
        """Return the form of a text content; roles that only this template knows are treated as the user's."""
        forms = self.lists if is_list else self.texts
        return forms.get(role if role in _ROLES else "user", "text")


def message_shape(render: Render) -> MessageShape:
    """Return the forms that a template reads, by rendering conversations with it."""
    probe = _Probe(render)
    beside_calls, arguments_are_text = _call_form(probe)
    texts: dict[str, ContentForm] = {}
    lists: dict[str, ContentForm] = {}
    for role in _ROLES:

        def shows(content: object, *marks: str, role: str = role) -> bool:
            turns = _conversation(role, content, beside_calls, arguments_are_text=arguments_are_text)
            text = probe.text(turns)
            return all(mark in text for mark in marks) and not _NOTATION.search(text)

        reads_part = shows([_part(_FIRST)], _FIRST)
        texts[role] = "one_part" if reads_part and not shows(_FIRST, _FIRST) else "text"
        reads_parts = reads_part and shows([_part(_FIRST), _part(_SECOND)], _FIRST, _SECOND)
        lists[role] = "parts" if reads_parts else texts[role]
    return MessageShape(texts, lists, beside_calls, arguments_are_text)


class _Probe:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._give_up_at = time.monotonic() + _PROBE_S

    def text(self, messages: Sequence[Message]) -> str:
        """Return the rendered conversation; empty if the template rejects it, or if probing has taken too long."""
        if time.monotonic() > self._give_up_at:
            return ""
        try:
            return self._render(messages)
        except InvalidArgumentError:
            return ""


def _call_form(probe: _Probe) -> tuple[Literal[""] | None, bool]:
    """Return the content beside calls, and whether arguments are text: the first pair with which the call is shown."""
    forms: tuple[Literal[""] | None, ...] = (None, "")
    for is_text, content in product((False, True), forms):
        before = [{"role": "user", "content": _FIRST}, _calling(content, arguments_are_text=is_text)]
        for turns in ([*before, _result("tool", _SECOND)], before):
            text = probe.text(turns).partition(_FIRST)[2]
            # Other marks than these: None printed by the template, Python's notation, and text encoded twice.
            if _VALUE in text and not re.search(rf"None|'{_KEY}'|\\\"{_KEY}", text):
                return content, is_text
    return "", False


def _conversation(
    role: str, content: object, beside_calls: str | None, *, arguments_are_text: bool
) -> list[dict[str, object]]:
    """Return a conversation in which a message of the role has the content."""
    turn: dict[str, object] = {"role": role, "content": content}
    # Others' content is a list if a role's is, since some templates read only lists.
    other = [_part("-")] if isinstance(content, list) else "-"
    user: dict[str, object] = {"role": "user", "content": other}
    if role in ("system", "developer"):
        return [turn, user]
    if role == "user":
        return [turn]
    if role == "assistant":
        return [user, turn, user]
    return [user, _calling(beside_calls, arguments_are_text=arguments_are_text), _result(role, content)]


def _calling(content: str | None, *, arguments_are_text: bool) -> dict[str, object]:
    function = {"name": _NAME, "arguments": _ARGUMENTS[arguments_are_text]}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": _CALL_ID, "type": "function", "function": function}],
    }


def _result(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content, "tool_call_id": _CALL_ID, "name": _NAME}


def _part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}
