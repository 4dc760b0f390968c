"""Llama 3 (JSON): the text consists of JSON objects, `{"name": ..., "parameters": {...}}`, optionally after
`<|python_tag|>`.

Several objects are written one after another, separated by a semicolon or comma, or as an array. If an array is cut
off, its complete elements still count as calls.
"""

from __future__ import annotations

import re

from router.parsers.json_calls import read_calls, split_calls
from router.parsers.machine import Machine, Steps

TAG = "<|python_tag|>"
_SPACE, _WORD = re.compile(r"\s*"), re.compile(r"\w*")
KEYS = ("name", "type", "function", "id", "arguments", "parameters")
_BETWEEN = (";", ",", TAG)


def script(machine: Machine) -> Steps[None]:
    """Parse calls at the beginning of the text and after each tag."""
    yield from bare_calls(machine, TAG)
    while tag := (yield from machine.text_until(TAG)):
        yield from bare_calls(machine, tag, is_tagged=True)


def bare_calls(machine: Machine, tag: str, *, is_tagged: bool = False) -> Steps[None]:
    """Parse calls in JSON at the current position; emit other JSON as text, and leave text that is not JSON unread."""
    raw = tag if is_tagged else ""
    raw += yield from machine.take_space()
    if not is_tagged and (yield from machine.accept(tag)):
        raw += tag + (yield from machine.take_space())
    has_calls = False
    while (yield from machine.peek()) in ("{", "["):
        start = yield from _start(machine)
        if start:
            machine.settle(None, raw + start)
            return
        body, is_complete = yield from machine.take_balanced()
        if not is_complete:
            calls, rest = split_calls(body)
            if machine.settle(calls, raw + body):
                machine.settle(None, rest)
            return
        has_calls = machine.settle(read_calls(body), raw + body)
        raw = yield from machine.take_space()
        while separator := (yield from machine.accept(*_BETWEEN)):
            raw += separator + (yield from machine.take_space())
    if raw.strip():
        machine.settle(None, raw)
    elif not has_calls:
        machine.unread(raw)


def _start(machine: Machine) -> Steps[str]:
    """Consume and return any leading text after which no call can follow; return empty text if calls may follow."""
    raw = ""
    if (yield from machine.accept("[")):
        raw += "[" + (yield from machine.take_space())
    for mark in ("{", '"'):
        if not (yield from machine.accept(mark)):
            return raw
        raw += mark + (yield from machine.take_run(_SPACE if mark == "{" else _WORD))
    if raw.rpartition('"')[2] not in KEYS:
        return raw
    machine.unread(raw)
    return ""
