"""Kimi K2: a section of calls, each with an id `functions.NAME:INDEX` and JSON arguments between special tokens."""

from __future__ import annotations

import re

from router.parsers.machine import Call, Offer, arguments_text, parse_json
from router.parsers.sections import Sections

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENT, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def _read(body: str, offer: Offer) -> Call | None:
    call_id, separator, text = body.partition(ARGUMENT)
    found, arguments = _ID.fullmatch(call_id.strip()), arguments_text(text) or arguments_text(_unquoted(text))
    if not separator or found is None or arguments is None:
        return None
    # The template renders the ids of earlier calls unchanged, so the model must see the ids that it wrote.
    return Call(found[1], arguments, call_id.strip())


def _unquoted(text: str) -> str:
    """Return the contents of a JSON string, as which models sometimes write arguments; empty if the text is none."""
    try:
        value = parse_json(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


# Some models write the singular, or a call without a section.
_OTHERS = {"<|tool_call_section_begin|>": "<|tool_call_section_end|>", CALL: ""}
script = Sections(begin=BEGIN, end=END, call=CALL, call_end=CALL_END, read=_read, other_marks=_OTHERS).script
