"""Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5 and Seed-OSS: `<tool_call>`, `<function=NAME>`, and each argument between
`<parameter=KEY>` tags.

Read as by the parser that Qwen publishes with the model: a value ends at its tag, at the next parameter, at the end of
the function or of the output, and what else is between parameters is ignored.
"""

from __future__ import annotations

import re

from router.parsers.machine import Call, Machine, Offer, Script, Steps
from router.parsers.tagged_values import arguments_of

_FUNCTION, _END = "<function=", "</function>"
_PARAMETER_BEGIN, _PARAMETER_END = "<parameter=", "</parameter>"
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
QWEN = ("<tool_call>", "</tool_call>")
SEED_OSS = ("<seed:tool_call>", "</seed:tool_call>")


def begins(opening: str) -> tuple[str, ...]:
    """Return how calls between tags begin."""
    return f"{opening}\n{_FUNCTION}", f"{opening}{_FUNCTION}"


def between(opening: str, closing: str, *, has_lines: bool) -> Script:
    """Return the parser for text and calls between these tags, which models sometimes omit. If `has_lines`, each value
    is on lines of its own.
    """

    def script(machine: Machine) -> Steps[None]:
        while mark := (yield from machine.text_until(opening, _FUNCTION)):
            raw = mark
            if mark == opening:
                raw += yield from machine.take_space()
                if not (yield from machine.accept(_FUNCTION)):
                    # The tag was only mentioned if a call begins later.
                    body, end = yield from machine.take_until(closing, opening, _FUNCTION)
                    if end != closing:
                        machine.unread(end)
                        end = ""
                    machine.settle(None, raw + body + end)
                    continue
                raw += _FUNCTION
            body, end = yield from machine.take_around(
                closing, value=(_PARAMETER_BEGIN, _PARAMETER_END), restart=opening, certain=(_END,)
            )
            call = _read(body, machine.offer, has_lines=has_lines)
            if not machine.settle([call] if call else None, raw + body + end):
                continue
            yield from machine.after_call()
            # The closing tag may follow without an opening one, or after several functions.
            if (yield from machine.accept(closing)):
                yield from machine.after_call()

    return script


def _read(body: str, offer: Offer, *, has_lines: bool) -> Call | None:
    """Return the call parsed from `NAME>` and the parameters after it."""
    name, mark, rest = body.partition(">")
    name = _name(name)
    values = [
        (_name(key), value.removeprefix("\n").removesuffix("\n") if has_lines else value)
        for key, value in _PARAMETER.findall(rest)
    ]
    if not mark or name not in offer.tools or (not values and rest.strip()):
        return None
    return Call(name, arguments_of(values, offer.tools[name]))


def _name(text: str) -> str:
    """Return a name without the quotes in which models sometimes write it."""
    return text.strip().strip("\"'")
