"""Kimi K3: elements between `<|open|>NAME<|sep|>` and `<|close|>NAME<|sep|>`: a section of calls, each with an element
for each argument, which says the type of its value. Texts are written as they are, other values as JSON.
"""

from __future__ import annotations

import json
import re

from router.parsers.machine import Call, Offer, parse_json
from router.parsers.sections import Sections

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
MARKS = (_OPEN, _CLOSE, _SEP)
BEGIN, END = f"{_OPEN}tools{_SEP}", f"{_CLOSE}tools{_SEP}"
WRAPPERS = (f"{_OPEN}response{_SEP}", f"{_CLOSE}response{_SEP}", f"{_CLOSE}message{_SEP}")
THINKING = (f"{_OPEN}think{_SEP}", f"{_CLOSE}think{_SEP}")
_CALL, _CALL_END = f"{_OPEN}call ", f"{_CLOSE}call{_SEP}"
_ARGUMENT, _ARGUMENT_END = f"{_OPEN}argument ", f"{_CLOSE}argument{_SEP}"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_ONE = re.compile(
    rf"\s*{re.escape(_ARGUMENT)}((?:(?!{re.escape(_SEP)}).)*?){re.escape(_SEP)}(.*?){re.escape(_ARGUMENT_END)}",
    re.DOTALL,
)


def _read(body: str, offer: Offer) -> Call | None:
    head, separator, rest = body.partition(_SEP)
    name, position, values = _attributes(head).get("tool", ""), 0, {}
    while found := _ONE.match(rest, position):
        attributes = _attributes(found[1])
        values[attributes.get("key", "")] = _value(found[2], attributes.get("type", "string"))
        position = found.end()
    if not separator or rest[position:].strip() or name not in offer.tools:
        return None
    return Call(name, json.dumps(values, ensure_ascii=False))


def _attributes(text: str) -> dict[str, str]:
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in _ATTRIBUTE.findall(text)}


def _value(text: str, kind: str) -> object:
    if kind == "string":
        return text
    try:
        return parse_json(text)
    except ValueError:
        return text


script = Sections(
    begin=BEGIN, end=END, call=_CALL, call_end=_CALL_END, read=_read, value=(_ARGUMENT, _ARGUMENT_END)
).script
