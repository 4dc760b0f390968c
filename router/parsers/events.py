"""Events that a parser finds in a model's text."""

from __future__ import annotations

from dataclasses import field

from midstream.record import record


@record
class TextDelta:
    """A piece of the answer.

    Attributes:
        start: Position of its first character in the model's text.
    """

    text: str
    start: int = field(default=0, compare=False)


@record
class ReasoningDelta:
    """A piece of the model's reasoning, which precedes its answer."""

    text: str


@record
class CallBegin:
    """A tool call begins.

    Attributes:
        index: Index of the call in the sequence, from 0.
        name: Name of the tool, one of those offered to the model.
        call_id: The id that the model gave the call; None in formats without ids.
    """

    index: int
    name: str
    call_id: str | None = None


@record
class CallArguments:
    """A piece of a call's arguments; the pieces together are the text of a JSON object."""

    index: int
    text: str


@record
class CallEnd:
    """A call is complete."""

    index: int


Event = TextDelta | ReasoningDelta | CallBegin | CallArguments | CallEnd


def joined(events: list[Event]) -> list[Event]:
    """Merge adjacent deltas of the same kind, and drop empty ones."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, TextDelta | ReasoningDelta) and not event.text:
            continue
        if isinstance(event, TextDelta) and isinstance(last, TextDelta) and event.start == last.start + len(last.text):
            result[-1] = TextDelta(last.text + event.text, last.start)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            result[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            result[-1] = CallArguments(event.index, last.text + event.text)
        else:
            result.append(event)
    return result
