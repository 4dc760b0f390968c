"""Llama 3.2 and 4 (pythonic): the whole text is a list of Python calls, `[weather(city="Oslo"), time()]`.

Llama 4 may write it between `<|python_start|>` and `<|python_end|>`.
"""

from __future__ import annotations

import json
import re

from router.parsers.literals import LiteralError, Literals
from router.parsers.machine import Call, Machine, Steps

_NAME = re.compile(r"[\w.\-]*")
START, END = "<|python_start|>", "<|python_end|>"


def script(machine: Machine) -> Steps[None]:
    """Parse calls at the beginning of the text."""
    raw = yield from machine.take_space()
    opening = yield from machine.accept(START)
    if opening:
        raw += opening + (yield from machine.take_space())
    if (yield from machine.peek()) != "[":
        machine.text(raw)
        return
    text = yield from _start(machine)
    if text:
        machine.settle(None, raw + text)
        return
    text, is_complete = yield from machine.take_balanced(quotes="\"'")
    calls = _read(text) if is_complete else None
    raw += text
    if opening:
        raw += (yield from machine.take_space()) + ((yield from machine.accept(END)) or "")
    if machine.settle(calls, raw):
        yield from machine.take_space()


def _start(machine: Machine) -> Steps[str]:
    """If the text does not begin a list of calls, consume and return the part that shows this; otherwise consume
    nothing and return empty text.
    """
    raw = (yield from machine.accept("[")) or ""
    raw += yield from machine.take_space()
    name = yield from machine.take_run(_NAME)
    if not name or (yield from machine.peek()) != "(":
        return raw + name
    machine.unread(raw + name)
    return ""


def _read(text: str) -> list[Call] | None:
    reader, calls = Literals(text), list[Call]()
    try:
        reader.expect("[")
        while not reader.skip("]"):
            name = reader.word()
            reader.expect("(")
            calls.append(Call(name, json.dumps(reader.fields(")", "="), ensure_ascii=False)))
            if not reader.skip(","):
                reader.expect("]")
                break
    except LiteralError:
        return None
    return calls
