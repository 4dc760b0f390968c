"""Calls that are grouped in sections, as in the formats of DeepSeek, Kimi and MiniMax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.parsers.machine import Call, Machine, Offer, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """A format whose calls are in sections.

    Attributes:
        begin: Text at the beginning of a section.
        end: Text at its end.
        call: Text before a call.
        call_end: Text after a call.
        read: Returns the call in the text between `call` and `call_end`.
        value: The tags around a value, which may contain `call_end`.
        other_marks: Other beginnings of sections, with the ends of these; a section that begins with `call` has no
            beginning, and ends with its calls.
    """

    begin: str
    end: str
    call: str
    call_end: str
    read: Callable[[str, Offer], Call | None]
    value: tuple[str, str] | None = None
    other_marks: Mapping[str, str] = field(default_factory=dict)

    def script(self, machine: Machine) -> Steps[None]:
        """Parse text and sections."""
        ends = {self.begin: self.end, **self.other_marks}
        while mark := (yield from machine.text_until(*ends)):
            if mark == self.call:
                machine.unread(mark)
                mark = ""
            if (yield from self._section(machine, mark, ends[mark or self.call])):
                yield from machine.after_call()
                # The end of a section without a beginning.
                if not mark and (yield from machine.accept(*filter(None, ends.values()))):
                    yield from machine.after_call()

    def _section(self, machine: Machine, begin: str, end: str) -> Steps[bool]:
        """Parse a section; return whether it contained only calls."""
        raw, is_call = begin, False
        while True:
            raw += yield from machine.take_space()
            mark = yield from machine.accept(self.call, *filter(None, [end]))
            if mark is None and not end:
                machine.unread(raw)
                return is_call
            if mark is None:
                # The text is neither a call nor the end: emit it up to the next call or the end.
                rest, mark = yield from machine.take_until(self.call, end)
                raw += rest
                if is_call and mark == self.call:
                    machine.unread(mark)
                    machine.text(raw)
                    yield from machine.accept(self.call)
                    raw = ""
            if mark == self.call:
                is_call = yield from self._call(machine, raw, end)
                raw = ""
                continue
            if raw.strip() or not is_call:
                is_call = machine.settle(None, raw + mark)
            return is_call

    def _call(self, machine: Machine, before: str, end: str) -> Steps[bool]:
        """Parse a call after the text `before`, in a section that ends with `end`; return whether it is one."""
        if self.value is None:
            body, closing = yield from machine.take_until(*filter(None, (self.call_end, self.call, end)))
            if closing not in ("", self.call_end):
                # Models sometimes leave out the end of a call.
                if self.read(body, machine.offer):
                    machine.unread(closing)
                    closing = ""
                else:
                    more, last = yield from machine.take_until(self.call_end)
                    body, closing = body + closing + more, last
        else:
            body, closing = yield from machine.take_around(self.call_end, value=self.value, restart=self.call)
        found = self.read(body, machine.offer)
        return machine.settle([found] if found else None, before + self.call + body + closing)
