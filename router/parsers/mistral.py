"""Mistral: `[TOOL_CALLS]`, followed by an array of JSON objects or, with newer tokenizers, by `name[ARGS]{...}` for
each call.

`[CALL_ID]` and an id may come before `[ARGS]`.
"""

from __future__ import annotations

from router.parsers.json_calls import read_calls
from router.parsers.llama import bare_calls
from router.parsers.machine import Call, Machine, Steps, arguments_text

MARK, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def script(machine: Machine) -> Steps[None]:
    """Parse text, and the calls after each marker."""
    space = yield from machine.take_space()
    mark = yield from machine.accept(MARK)
    machine.unread(space + (mark or ""))
    if not mark:
        yield from bare_calls(machine, "")
    while (yield from machine.text_until(MARK)):
        space = yield from machine.take_space()
        if (yield from machine.peek()) in ("[", "{"):
            body, is_complete = yield from machine.take_balanced(MARK)
            is_call = machine.settle(read_calls(body) if is_complete else None, MARK + space + body)
        else:
            is_call = yield from _named(machine, MARK + space)
        if is_call:
            yield from machine.after_call()


def _named(machine: Machine, raw: str) -> Steps[bool]:
    """Parse `name[ARGS]{...}` or `name{...}`."""
    call_id: str | None = None
    name, mark = yield from machine.take_until(CALL_ID, ARGS, "{", MARK)
    raw += name + mark
    if mark == CALL_ID:
        call_id, mark = yield from machine.take_until(ARGS, MARK)
        raw += call_id + mark
    if mark in ("", MARK):
        machine.unread(mark)
        machine.settle(None, raw.removesuffix(MARK) if mark else raw)
        return False
    if mark == "{":
        machine.unread("{")
        raw = raw[:-1]
    raw += yield from machine.take_space()
    body, is_complete = yield from machine.take_balanced(MARK)
    arguments = arguments_text(body) if is_complete else None
    call = Call(name.strip(), arguments, call_id and call_id.strip()) if arguments is not None else None
    return machine.settle([call] if call else None, raw + body)
