"""DeepSeek V3, R1 and V3.1: a section of calls, each with a name and JSON arguments between special tokens.

V3 and R1 write `function`, a separator, the name, and the arguments in a fenced block. V3.1 writes the name, a
separator, and the arguments.
"""

from __future__ import annotations

import re

from router.parsers.machine import Call, Offer, arguments_text
from router.parsers.sections import Sections

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"([^\n]+)\n```json\n(.*?)\n?```\s*", re.DOTALL)


def _read(body: str, offer: Offer) -> Call | None:
    kind, separator, rest = body.partition(SEPARATOR)
    fenced = _FENCED.fullmatch(rest) if kind.strip() == "function" else None
    name, body = (fenced[1], fenced[2]) if fenced else (kind, rest)
    arguments = arguments_text(body) if separator else None
    return None if arguments is None else Call(name.strip(), arguments)


script = Sections(begin=BEGIN, end=END, call=CALL, call_end=CALL_END, read=_read).script
