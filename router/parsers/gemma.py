"""FunctionGemma and Gemma 4: `call:NAME{key:value,...}` between tags, with strings between special quote tokens."""

from __future__ import annotations

import json

from router.parsers.literals import LiteralError, Literals
from router.parsers.machine import Call, Machine, Script, Steps


def between(opening: str, closing: str, quote: str) -> Script:
    """Return the parser for a model with these markers."""

    def script(machine: Machine) -> Steps[None]:
        while (yield from machine.text_until(opening)):
            body = ""
            # A closing tag inside a string does not end the call.
            while True:
                part, mark = yield from machine.take_until(quote, closing)
                body += part + mark
                if mark != quote:
                    break
                part, mark = yield from machine.take_until(quote)
                body += part + mark
            call = _read(body.removesuffix(closing), quote)
            if machine.settle([call] if call else None, opening + body):
                yield from machine.after_call()

    return script


def _read(body: str, quote: str) -> Call | None:
    reader = Literals(body, quote)
    try:
        reader.expect("call:")
        name = reader.word()
        reader.expect("{")
        arguments = reader.fields("}")
    except LiteralError:
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False)) if reader.at_end() else None


# What small models write after the answer.
EMPTY_THOUGHTS = ("<|channel>thought\n<channel|>", "<channel|>")
GEMMA4 = ("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")
gemma4 = between(*GEMMA4)
function_gemma = between(*FUNCTION_GEMMA)
