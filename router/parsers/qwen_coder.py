"""Qwen3-Coder and Qwen 3.5: `<tool_call>`, `<function=NAME>`, and each argument between `<parameter=KEY>` tags.

Read as by the parser that Qwen publishes with the model: a value ends at its tag, at the next parameter, at the end of
the function or of the output, and what else is between parameters is ignored.
"""

from __future__ import annotations

import re

from router.parsers.machine import Call, Machine, Offer, Steps
from router.parsers.tagged_values import arguments_of

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_FUNCTION, _END = "<function=", "</function>"
BEGINS = f"{_OPENING}\n{_FUNCTION}", f"{_OPENING}{_FUNCTION}"
_PARAMETER_BEGIN, _PARAMETER_END = "<parameter=", "</parameter>"
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


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
        body, end = yield from machine.take_around(
            _CLOSING, value=(_PARAMETER_BEGIN, _PARAMETER_END), restart=_OPENING, certain=(_END,)
        )
        call = _read(body, machine.offer)
        if not machine.settle([call] if call else None, raw + body + end):
            continue
        yield from machine.take_space()
        # The closing tag may follow without an opening one, or after several functions.
        if (yield from machine.accept(_CLOSING)):
            yield from machine.take_space()


def _read(body: str, offer: Offer) -> Call | None:
    """Return the call parsed from `NAME>` and the parameters after it."""
    name, mark, rest = body.partition(">")
    name = _name(name)
    # The template writes each value on lines of its own.
    values = [(_name(key), value.removeprefix("\n").removesuffix("\n")) for key, value in _PARAMETER.findall(rest)]
    if not mark or name not in offer.tools or (not values and rest.strip()):
        return None
    return Call(name, arguments_of(values, offer.tools[name]))


def _name(text: str) -> str:
    """Return a name without the quotes in which models sometimes write it."""
    return text.strip().strip("\"'")
