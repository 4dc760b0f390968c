"""The parsing machine behind every format: it holds text back only until its interpretation is certain.

A format is a generator (its script) that reads the text with the machine's own generators:

    def script(machine):
        while (yield from machine.text_until("<tool_call>")):
            body, _ = yield from machine.take_until("</tool_call>")
            machine.settle(read_calls(body), raw)

Each of these waits (a bare `yield`) only while the text so far is ambiguous, and its decision does not depend on how
the text is split. A call is held until it is complete, because a malformed one must be emitted as text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from router.parsers.events import CallArguments, CallBegin, CallEnd, Event, ReasoningDelta, TextDelta, joined

_T = TypeVar("_T")
# A step of a script: it waits for text at each yield, and returns what it has read.
Steps = Generator[None, None, _T]
Schema = Mapping[str, object]
_IN_STRING = {quote: re.compile(rf"[\\{quote}]") for quote in ('"', "'")}
_SPACE = re.compile(r"\s*")
# An escape in a JSON string; the group is half of a surrogate pair without its other half.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as parsed by a format.

    Attributes:
        arguments: JSON text of an object.
        call_id: The id that the model gave the call, if any.
    """

    name: str
    arguments: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that a request offers the model, and its limits.

    Attributes:
        tools: JSON schema of the parameters of each tool, by name.
        max_calls: Maximum number of calls; further calls, and all text after them, are dropped. None means no limit.
        is_thinking: Whether the prompt has opened the reasoning.
    """

    tools: Mapping[str, Schema]
    max_calls: int | None = None
    is_thinking: bool = False


# A format.
Script = Callable[["Machine"], Steps[None]]


class Machine:
    """Runs one format's parser (a generator) over the text of one sequence."""

    def __init__(self, script: Script, offer: Offer, wrappers: tuple[str, ...] = ()) -> None:
        """`wrappers` are markers around the answer, which are left out of it with the white space around them."""
        self.offer = offer
        self._wrappers = wrappers
        self._held = ""
        self._num_fed = 0  # characters
        self._is_ended = False
        self._has_finished = False
        self._space = ""  # white space that was trimmed from the answer before the last marker
        self._gap = ""  # white space that belongs between the answer so far and any further text
        self._has_text = False
        self._has_put_back = False  # then a value ends at its first marker, so that no text is read more than twice
        self._late = ""  # a marker that is left out of the answer once
        self._num_calls = 0
        self._events: list[Event] = []
        self._script = script(self)
        self._resume()

    def feed(self, text: str) -> list[Event]:
        """Feed the next piece of text, and return the events that it makes final."""
        self._held += text
        self._num_fed += len(text)
        self._resume()
        return self._take()

    def finish(self) -> list[Event]:
        """End the text, and return the last events."""
        self._is_ended = True
        self._resume()
        return self._take()

    def _resume(self) -> None:
        if not self._has_finished:
            self._has_finished = next(self._script, self) is self
        if self._has_finished and self._held:
            self.text(self._consume(len(self._held)))

    def _take(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events

    # Methods with which scripts emit output.

    def text(self, text: str) -> None:
        """Emit text of the answer, which was consumed last."""
        if not text or self._is_full:
            return
        start = self._num_fed - len(self._held) - len(text)
        self._events += [TextDelta(self._gap, start - len(self._gap)), TextDelta(text, start)]
        self._gap, self._has_text = "", True

    def reasoning(self, text: str) -> None:
        if not self._is_full:
            self._events.append(ReasoningDelta(text))

    def open_call(self, name: str) -> None:
        """Begin a call whose arguments arrive in pieces."""
        self._events.append(CallBegin(self._num_calls, name))

    def arguments(self, text: str) -> None:
        """Emit a further piece of the open call's arguments."""
        self._events.append(CallArguments(self._num_calls, text))

    def close_call(self) -> None:
        self._events.append(CallEnd(self._num_calls))
        self._num_calls += 1

    def settle(self, calls: Sequence[Call] | None, raw: str) -> bool:
        """Emit `calls`; emit `raw` as text if there are none, or if one names a tool that is not offered.

        Return whether the calls were emitted.
        """
        space, self._space = self._space, ""
        if not calls or not all(call.name in self.offer.tools for call in calls):
            self.text(space + raw)
            return False
        self._keep_gap(space)
        for call in calls:
            if not self._is_full:
                index = self._num_calls
                self._events += [
                    CallBegin(index, call.name, call.call_id),
                    CallArguments(index, call.arguments),
                    CallEnd(index),
                ]
                self._num_calls += 1
        return True

    def _keep_gap(self, space: str) -> None:
        if self._has_text and not self._gap:
            self._gap = space

    @property
    def _is_full(self) -> bool:
        return self.offer.max_calls is not None and self._num_calls >= self.offer.max_calls

    # Generators with which scripts read input.

    def text_until(self, *markers: str) -> Steps[str | None]:
        """Emit text of the answer up to the first of `markers`; see `copy_until`."""
        while True:
            left_out = (*self._wrappers, self._late) if self._late else self._wrappers
            found = yield from self.copy_until(self.text, *markers, *left_out)
            if found not in left_out:
                return found
            if found == self._late:
                self._late = ""
            elif self._has_text and not found.startswith("<|"):
                # Such a marker may also be a part of the answer, unless it is at its end.
                space, after = self._space, (yield from self.take_space())
                mark = yield from self.accept(*markers, *left_out)
                is_inside = mark is None and bool((yield from self.peek()))
                self.unread(after + (mark or ""))
                if is_inside:
                    self._space = ""
                    self.text(space + found)
                    continue
            space, self._space = self._space, ""
            self._keep_gap(space + (yield from self.take_space()))

    def leave_out(self, marker: str) -> None:
        """Leave the next `marker` between calls out of the answer, with the white space around it."""
        self._late = marker

    def copy_until(self, emit: Callable[[str], None], *markers: str, keeps_space: bool = False) -> Steps[str | None]:
        """Emit text up to the first of `markers`, which is consumed and returned; None at the end.

        White space before a marker is omitted, unless `keeps_space`. No marker may be a prefix of another.
        """
        while True:
            position, marker = _first(self._held, markers)
            end = position if marker else len(self._held) - _overlap(self._held, markers)
            if not keeps_space:
                end = len(self._held[:end].rstrip())
            if not marker and self._is_ended:
                end = len(self._held)
            emit(self._consume(end))
            if marker:
                space = self._consume(position - end)
                # White space after reasoning is not part of the answer.
                self._space = space if emit == self.text else ""
                self._consume(len(marker))
                return marker
            if self._is_ended:
                return None
            yield

    def take_until(self, *markers: str) -> Steps[tuple[str, str]]:
        """Consume and return the text before the first of `markers`, and the marker; all text and "" if none occurs."""
        margin = max(map(len, markers)) - 1
        start = 0
        while True:
            position, marker = _first(self._held, markers, start)
            if marker or self._is_ended:
                text = self._held[:position]
                self._held = self._held[position + len(marker) :]
                return text, marker
            start = max(len(self._held) - margin, 0)
            yield

    def take_around(
        self, marker: str, *, value: tuple[str, str], restart: str = "", certain: Sequence[str] = ()
    ) -> Steps[tuple[str, str]]:
        """Consume and return the text before `marker`, and the marker, as `take_until` does; but a marker within a
        value is part of the value, unless the value never ends.

        Args:
            value: The tags around a value.
            restart: Text that cannot follow a marker within a value.
            certain: Markers that also end a value.
        """
        text, first, is_in_value = "", None, False
        while True:
            part, found = yield from self.take_until(*certain, marker)
            text += part
            if not found and first is not None:
                self._has_put_back = True
                self.unread(text[first + len(marker) :])
                return text[:first], marker
            opened, closed = part.rfind(value[0]), part.rfind(value[1])
            if opened != closed:
                is_in_value = opened > closed
            if found != marker or not is_in_value or self._has_put_back:
                return text, found
            space = yield from self.take_space()
            if restart and (yield from self.accept(restart)):
                self.unread(space + restart)
                return text, found
            first = len(text) if first is None else first
            text += marker + space

    def take_balanced(self, *stops: str, quotes: str = '"') -> Steps[tuple[str, bool]]:
        """Consume the text from an opening bracket to the matching one; return the text, and whether the match was
        found.

        If there is no match, consume the text up to, but not including, a stop outside of strings, or to the end.
        """
        outside = re.compile("|".join([f"[{quotes}(){{}}\\[\\]]", *map(re.escape, stops)]))
        position = depth = 0
        quote = ""
        while True:
            found = (_IN_STRING[quote] if quote else outside).search(self._held, position)
            if found is None:
                if self._is_ended:
                    return self._consume(len(self._held)), False
                margin = 0 if quote else _overlap(self._held, stops)
                position = max(len(self._held) - margin, position)
                yield
                continue
            mark, position = found[0], found.end()
            if mark == "\\":
                position += 1
            elif quote:
                quote = ""
            elif mark in quotes:
                quote = mark
            elif mark in stops:
                return self._consume(found.start()), False
            else:
                depth += 1 if mark in "([{" else -1
                if depth <= 0:
                    return self._consume(position), True
            while position > len(self._held) and not self._is_ended:
                yield

    def take_run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume and return all following characters that match `pattern`, a repeated character class."""
        while True:
            found = pattern.match(self._held)
            size = found.end() if found else 0
            if size < len(self._held) or self._is_ended:
                return self._consume(size)
            yield

    def accept(self, *literals: str) -> Steps[str | None]:
        """Consume and return the one of `literals` that comes next; None if none does."""
        while True:
            for literal in literals:
                if self._held.startswith(literal):
                    return self._consume(len(literal))
            if self._is_ended or not any(literal.startswith(self._held) for literal in literals):
                return None
            yield

    def take_space(self) -> Steps[str]:
        """Consume and return all white space at the current position."""
        return (yield from self.take_run(_SPACE))

    def after_call(self) -> Steps[None]:
        """Consume the white space after a call."""
        self._keep_gap((yield from self.take_space()))

    def peek(self) -> Steps[str]:
        """Return the next character without consuming it; empty at the end."""
        while not self._held and not self._is_ended:
            yield
        return self._held[:1]

    def unread(self, text: str) -> None:
        """Put consumed text back."""
        self._held = text + self._held

    def _consume(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        return text


def _first(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str]:
    """Return the position of the earliest of `markers`, and that marker; the end of the text and "" if none occurs."""
    position, found = len(text), ""
    for marker in markers:
        at = text.find(marker, start, position + len(marker))
        if at != -1 and at < position:
            position, found = at, marker
    return position, found


def _overlap(text: str, markers: Sequence[str]) -> int:
    """Return the number of characters at the end of `text` that may be the beginning of one of `markers`."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


def refuse_constant(name: str) -> object:
    """Reject NaN and infinities, which Python's json module would accept; for use as a `parse_constant` callback."""
    raise ValueError(f"{name} is not valid in JSON")


def finite_float(text: str) -> float:
    """Return the value of a JSON number. Raises ValueError if it is too large for a float, which Python's json module
    would make infinite; for use as a `parse_float` callback.
    """
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def parse_json(text: str) -> object:
    """Return the JSON value in `text`, with U+FFFD for each lone surrogate. Raises ValueError if `text` is not JSON."""
    try:
        return json.loads(_without_lone_surrogates(text), parse_constant=refuse_constant, parse_float=finite_float)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _without_lone_surrogates(text: str) -> str:
    """Replace the escapes of lone surrogates in a JSON text: they are valid JSON, but their value is not valid text."""
    if "\\u" not in text:
        return text
    return _ESCAPE.sub(lambda found: r"\ufffd" if found[1] else found[0], text)


def arguments_text(text: str) -> str | None:
    """Return `text` without surrounding white space, and with U+FFFD for each lone surrogate, if it is a JSON object;
    otherwise None.
    """
    text = _without_lone_surrogates(text.strip())
    try:
        return text if isinstance(parse_json(text), dict) else None
    except ValueError:
        return None
