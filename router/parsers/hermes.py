"""Hermes, Qwen 2.5 and Qwen 3: each call is a JSON object between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from router.parsers.json_calls import read_calls
from router.parsers.machine import Machine, Steps

OPENING, CLOSING = "<tool_call>", "</tool_call>"
BEGINS = f"{OPENING}\n{{", f"{OPENING}{{"


def script(machine: Machine) -> Steps[None]:
    """Parse text and calls."""
    has_put_back = False
    while (yield from machine.text_until(OPENING)):
        # A closing tag inside a string of the arguments does not end the call.
        space = yield from machine.take_space()
        is_object = (yield from machine.peek()) == "{"
        body = ""
        if is_object and not has_put_back:
            body, _ = yield from machine.take_balanced(CLOSING)
        rest, closing = yield from machine.take_until(CLOSING)
        body += rest
        calls = read_calls(body) if is_object else None
        if calls is None:
            # A call that lacks a quote seems to continue into later calls, which may be valid. Put those back, and end
            # every later call at its first closing tag, so that no text is read more than twice.
            body, closing, later = (body + closing).partition(CLOSING)
            machine.unread(later)
            has_put_back = has_put_back or bool(later)
        if machine.settle(calls, OPENING + space + body + closing):
            yield from machine.after_call()
