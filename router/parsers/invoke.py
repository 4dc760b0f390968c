"""MiniMax M2, DeepSeek V3.2 and V4, dots: a section of `<invoke name="...">`, with a `<parameter name="...">` for each
argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from router.parsers.machine import Call, Offer, Schema, Script, arguments_text
from router.parsers.sections import Sections
from router.parsers.tagged_values import arguments_of, properties_of

_WRAPPERS = ("arguments", "parameters", "input", "properties")


def invocations(prefix: str, begin: str, end: str, other_marks: Mapping[str, str] = MappingProxyType({})) -> Script:
    """Return the parser for tags that begin with `prefix`, in sections between `begin` and `end`, or `other_marks` as
    in `Sections`.
    """
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
        schema = offer.tools[name]
        return Call(name, inner_arguments(values, schema) or arguments_of(values, schema, texts))

    value = (f"<{prefix}parameter name=", f"</{prefix}parameter>")
    call, call_end = f'<{prefix}invoke name="', f"</{prefix}invoke>"
    return Sections(
        begin=begin, end=end, call=call, call_end=call_end, read=read, value=value, other_marks=other_marks
    ).script


def inner_arguments(values: list[tuple[str, str]], schema: Schema) -> str | None:
    """Return all arguments if they are the value of a single one that the tool does not have, as models sometimes
    write them.
    """
    if len(values) != 1 or values[0][0] not in _WRAPPERS:
        return None
    known = properties_of(schema)
    return arguments_text(values[0][1]) if known and values[0][0] not in known else None


MINIMAX_BEGIN, MINIMAX_END = "<minimax:tool_call>", "</minimax:tool_call>"
DSML = "｜DSML｜"
DSML_BEGIN, DSML_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
DSML4_BEGIN, DSML4_END = f"<{DSML}tool_calls>", f"</{DSML}tool_calls>"
DOTS_BEGIN, DOTS_END = "<dots_function_call>", "</dots_function_call>"
minimax = invocations("", MINIMAX_BEGIN, MINIMAX_END)
_CALL = f'<{DSML}invoke name="'  # models sometimes omit the tags around the calls
deepseek_v32 = invocations(DSML, DSML_BEGIN, DSML_END, {DSML4_BEGIN: DSML4_END, _CALL: ""})
deepseek_v4 = invocations(DSML, DSML4_BEGIN, DSML4_END, {DSML_BEGIN: DSML_END, _CALL: ""})
dots = invocations("", DOTS_BEGIN, DOTS_END)
