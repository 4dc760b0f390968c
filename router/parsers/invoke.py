"""MiniMax M2 and DeepSeek V3.2: a section of `<invoke name="...">`, with a `<parameter name="...">` per argument."""

from __future__ import annotations

import re

from router.parsers.machine import Call, Offer, Script
from router.parsers.sections import Sections
from router.parsers.tagged_values import arguments_of


def invocations(prefix: str, begin: str, end: str) -> Script:
    """Return the parser for tags that begin with `prefix`, in sections between `begin` and `end`."""
    tag = re.escape(prefix)
    parameter = re.compile(
        rf'\s*<{tag}parameter name="([^">]+)"(?: string="(true|false)")?>(.*?)</{tag}parameter>', re.DOTALL
    )

    def read(body: str, offer: Offer) -> Call | None:
        name, opening, rest = body.partition('">')
        values, texts, position = [], set(), 0
        while found := parameter.match(rest, position):
            key = found[1].strip()
            values.append((key, found[3]))
            if found[2] == "true":
                texts.add(key)
            position = found.end()
        if not opening or rest[position:].strip() or name not in offer.tools:
            return None
        return Call(name, arguments_of(values, offer.tools[name], texts))

    value = (f"<{prefix}parameter name=", f"</{prefix}parameter>")
    call, call_end = f'<{prefix}invoke name="', f"</{prefix}invoke>"
    return Sections(begin=begin, end=end, call=call, call_end=call_end, read=read, value=value).script


MINIMAX_BEGIN, MINIMAX_END = "<minimax:tool_call>", "</minimax:tool_call>"
DSML = "｜DSML｜"
DSML_BEGIN, DSML_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
minimax = invocations("", MINIMAX_BEGIN, MINIMAX_END)
deepseek_v32 = invocations(DSML, DSML_BEGIN, DSML_END)
