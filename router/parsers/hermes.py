"""Hermes, Qwen 2.5 and Qwen 3: each call is a JSON object between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from router.parsers.json_calls import read_calls
from router.parsers.machine import Machine, Steps

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def script(machine: Machine) -> Steps[None]:
    """Parse text and calls."""
    while (yield from machine.text_until(OPENING)):
        # A closing tag inside a string of the arguments does not end the call.
        space = yield from machine.take_space()
        body, is_complete = "", False
        if (yield from machine.peek()) == "{":
            body, is_complete = yield from machine.take_balanced(CLOSING)
        rest, closing = yield from machine.take_until(CLOSING)
        calls = read_calls(body) if is_complete and not rest.strip() else None
        if machine.settle(calls, OPENING + space + body + rest + closing):
            yield from machine.take_space()
