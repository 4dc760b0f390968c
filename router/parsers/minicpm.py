"""MiniCPM5: `<function name="NAME">`, and each argument between `<param name="KEY">` and `</param>`, as XML or, with
characters that XML does not allow, as it is.
"""

from __future__ import annotations

import re
from xml.sax.saxutils import unescape

from router.parsers.invoke import inner_arguments
from router.parsers.machine import Call, Machine, Offer, Steps
from router.parsers.tagged_values import arguments_of

END = "</function>"
BEGINS = ('<function name="', "<function name='", '<functionname="')
_NAME = re.compile(r"""([^"'<>]+)["'][^<>]*>""")
_PARAMETER = re.compile(r"""\s*<param\s*name=(["'])([^"'<>]+)\1>(<!\[CDATA\[(.*?)\]\]>|.*?)</param>""", re.DOTALL)
_NOT_XML = re.compile(r"<|&(?!(?:amp|lt|gt|quot|apos);)")
_ENTITIES = {"&quot;": '"', "&apos;": "'"}


def script(machine: Machine) -> Steps[None]:
    """Parse text and calls."""
    while mark := (yield from machine.text_until(*BEGINS)):
        body, end = yield from machine.take_around(END, value=("<param", "</param>"), restart="<function")
        call = _read(body, machine.offer)
        if machine.settle([call] if call else None, mark + body + end):
            yield from machine.after_call()


def _read(body: str, offer: Offer) -> Call | None:
    opening = _NAME.match(body)
    name = opening[1].strip() if opening else ""
    if opening is None or name not in offer.tools:
        return None
    found: dict[str, tuple[str, str | None]] = {}
    position = opening.end()
    while parameter := _PARAMETER.match(body, position):
        key = parameter[2].strip()
        if key in found:
            return None
        found[key] = (parameter[3], parameter[4])
        position = parameter.end()
    if body[position:].strip():
        return None
    is_xml = not any(_NOT_XML.search(text) for text, data in found.values() if data is None)
    values = [
        (key, data if data is not None else unescape(text, _ENTITIES) if is_xml else text.strip())
        for key, (text, data) in found.items()
    ]
    schema = offer.tools[name]
    return Call(name, inner_arguments(values, schema) or arguments_of(values, schema))
