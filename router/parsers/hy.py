"""Hy3: a section of `<tool_call>NAME<tool_sep>`, each with pairs of `<arg_key>` and `<arg_value>`."""

from __future__ import annotations

import re

from router.parsers.machine import Call, Offer
from router.parsers.sections import Sections
from router.parsers.tagged_values import arguments_of

BEGIN, END = "<tool_calls>", "</tool_calls>"
CALL, SEPARATOR, CALL_END = "<tool_call>", "<tool_sep>", "</tool_call>"
_VALUE = ("<arg_value>", "</arg_value>")
MARKS = (BEGIN, END, CALL, SEPARATOR, CALL_END, "<arg_key>", "</arg_key>", *_VALUE)
_PAIR = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read(body: str, offer: Offer) -> Call | None:
    name, separator, rest = body.partition(SEPARATOR)
    name, position, values = name.strip(), 0, []
    while found := _PAIR.match(rest, position):
        values.append((found[1].strip(), found[2]))
        position = found.end()
    if not separator or rest[position:].strip() or name not in offer.tools:
        return None
    return Call(name, arguments_of(values, offer.tools[name]))


script = Sections(
    begin=BEGIN, end=END, call=CALL, call_end=CALL_END, read=_read, value=_VALUE, other_marks={CALL: ""}
).script
