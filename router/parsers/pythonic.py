"""Python calls. With Llama 3.2 and 4 (pythonic), the whole text is a list of them, `[weather(city="Oslo"), time()]`,
which Llama 4 may write between `<|python_start|>` and `<|python_end|>`. LFM2 and OLMo 3 write lists, or calls on lines
of their own, between tags.
"""

from __future__ import annotations

import json
import re

from router.parsers.literals import LiteralError, Literals
from router.parsers.machine import Call, Machine, Script, Steps

_NAME = re.compile(r"[\w.\-]*")
START, END = "<|python_start|>", "<|python_end|>"
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
OLMO3 = ("<function_calls>", "</function_calls>")


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
        yield from machine.after_call()


def between(opening: str, closing: str) -> Script:
    """Return the parser for calls between these tags, in a list or one after another."""

    def script(machine: Machine) -> Steps[None]:
        while (yield from machine.text_until(opening)):
            body, end = yield from machine.take_until(closing)
            if machine.settle(_read(body), opening + body + end):
                yield from machine.after_call()

    return script


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
    """Return the calls in a list, or those that follow each other without one."""
    for ends_late in (False, True):
        reader, calls = Literals(text, ends_late=ends_late), list[Call]()
        try:
            end = "]" if reader.skip("[") else ""
            while not (reader.skip(end) if end else reader.at_end()):
                name = reader.word()
                reader.expect("(")
                calls.append(Call(name, json.dumps(reader.fields(")", "="), ensure_ascii=False)))
                if not reader.skip(",") and end:
                    reader.expect(end)
                    break
        except LiteralError:
            continue
        if reader.at_end():
            return calls
    return None
