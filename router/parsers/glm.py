"""GLM 4.5 and later: `<tool_call>NAME`, then pairs of `<arg_key>` and `<arg_value>`, then `</tool_call>`."""

from __future__ import annotations

import re

from router.parsers.machine import Call, Machine, Offer, Steps
from router.parsers.tagged_values import arguments_of

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
MARKS = (_OPENING, _CLOSING, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_PAIR = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def script(machine: Machine) -> Steps[None]:
    """Parse text and calls."""
    while (yield from machine.text_until(_OPENING)):
        body, closing = yield from machine.take_around(
            _CLOSING, value=("<arg_value>", "</arg_value>"), restart=_OPENING
        )
        call = _read(body, machine.offer)
        if machine.settle([call] if call else None, _OPENING + body + closing):
            yield from machine.after_call()


def _read(body: str, offer: Offer) -> Call | None:
    end = body.find("<arg_key>")
    name = (body if end == -1 else body[:end]).strip()
    position, values = (len(body) if end == -1 else end), []
    while found := _PAIR.match(body, position):
        values.append((found[1].strip(), found[2]))
        position = found.end()
    if body[position:].strip() or name not in offer.tools:
        return None
    return Call(name, arguments_of(values, offer.tools[name]))
