"""Qwen3-Coder and Qwen 3.5: `<tool_call>`, `<function=NAME>`, and each argument between `<parameter=KEY>` tags."""

from __future__ import annotations

import re

from router.parsers.machine import Call, Machine, Offer, Steps
from router.parsers.tagged_values import arguments_of

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_FUNCTION, _END = "<function=", "</function>"
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)


def script(machine: Machine) -> Steps[None]:
    """Parse text and calls; models sometimes omit the outer tags."""
    while mark := (yield from machine.text_until(_OPENING, _FUNCTION)):
        raw = mark
        if mark == _OPENING:
            raw += yield from machine.take_space()
            if not (yield from machine.accept(_FUNCTION)):
                body, closing = yield from machine.take_until(_CLOSING)
                machine.settle(None, raw + body + closing)
                continue
            raw += _FUNCTION
        body, end = yield from machine.take_until(_END)
        raw += body + end
        call = _read(body, machine.offer) if end else None
        if not machine.settle([call] if call else None, raw):
            continue
        yield from machine.take_space()
        # The closing tag may follow without an opening one, or after several functions.
        if (yield from machine.accept(_CLOSING)):
            yield from machine.take_space()


def _read(body: str, offer: Offer) -> Call | None:
    """Return the call parsed from `NAME>` and the parameters after it."""
    name, mark, rest = body.partition(">")
    name = name.strip()
    position, values = 0, []
    while found := _PARAMETER.match(rest, position):
        # The template writes each value on lines of its own.
        value = found[2].removeprefix("\n").removesuffix("\n")
        values.append((found[1].strip(), value))
        position = found.end()
    if not mark or rest[position:].strip() or name not in offer.tools:
        return None
    return Call(name, arguments_of(values, offer.tools[name]))
