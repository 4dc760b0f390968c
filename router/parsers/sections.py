"""Calls that are grouped in sections, as in the formats of DeepSeek, Kimi and MiniMax."""

from __future__ import annotations

from collections.abc import Callable

from router.parsers.machine import Call, Machine, Offer, Script, Steps


def section(begin: str, end: str, call: str, call_end: str, read: Callable[[str, Offer], Call | None]) -> Script:
    """Return the parser of a format whose calls are in sections between `begin` and `end`, each between `call` and
    `call_end`.

    `read` returns the call in the text between `call` and `call_end`.
    """

    def script(machine: Machine) -> Steps[None]:
        while (yield from machine.text_until(begin)):
            if (yield from calls(machine)):
                yield from machine.take_space()

    def calls(machine: Machine) -> Steps[bool]:
        """Parse a section; return whether it contained only calls."""
        raw, is_call = begin, False
        while True:
            raw += yield from machine.take_space()
            mark = yield from machine.accept(call, end)
            if mark is None:
                # The text is neither a call nor the end: emit it up to the next call or the end.
                rest, mark = yield from machine.take_until(call, end)
                raw += rest
            if mark == call:
                body, closing = yield from machine.take_until(call_end)
                found = read(body, machine.offer)
                is_call = machine.settle([found] if found else None, raw + call + body + closing)
                raw = ""
            else:
                if raw.strip() or not is_call:
                    is_call = machine.settle(None, raw + mark)
                return is_call

    return script
