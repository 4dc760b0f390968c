"""Solar Open: sections of calls, each with its id, the tool and the arguments; the answer is between markers, too."""

from __future__ import annotations

from router.parsers.machine import Call, Offer, arguments_text
from router.parsers.sections import Sections

BEGIN, END = "<|tool_calls|>", "<|calls|>"
CALL, NAME, ARGUMENTS, CALL_END = "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"
WRAPPERS = ("<|begin|>assistant", "<|content|>", "<|end|>")


def _read(body: str, offer: Offer) -> Call | None:
    call_id, _, rest = body.partition(NAME)
    name, _, arguments = rest.partition(ARGUMENTS)
    text = arguments_text(arguments)
    return Call(name.strip(), text, call_id.strip() or None) if text is not None else None


script = Sections(begin=BEGIN, end=END, call=CALL, call_end=CALL_END, read=_read).script
