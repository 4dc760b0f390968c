"""Reasoning between tags that precedes the answer; gpt-oss uses channels instead (harmony.py)."""

from __future__ import annotations

from dataclasses import dataclass

from router.parsers.machine import Machine, Script, Steps


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The tags around a model's reasoning.

    Attributes:
        opening: Opening tag, written by the model, or by the template at the end of the prompt.
        closing: Closing tag.
        is_always_open: Whether the model reasons first even without an opening tag (DeepSeek R1).
    """

    opening: str
    closing: str
    is_always_open: bool = False

    def is_open_after(self, prompt: str) -> bool:
        """Return whether the reasoning is open at the end of a prompt."""
        return self.is_always_open or prompt.rstrip().endswith(self.opening.rstrip())

    def is_open_in(self, message: str) -> bool:
        """Return whether the reasoning is open at the end of a message that the model continues."""
        return message.rfind(self.opening.strip()) > message.rfind(self.closing.strip())


def plain(machine: Machine) -> Steps[None]:
    """Treat all text as the answer."""
    return
    yield


def unwrapped(machine: Machine) -> Steps[None]:
    """Treat all text as the answer, except the markers around it."""
    yield from machine.text_until()


def after_thinking(tags: ThinkTags, answer: Script, call_marks: tuple[str, ...]) -> Script:
    """Parse reasoning, then the answer with `answer`. A marker in `call_marks` also ends the reasoning; a closing tag
    that follows later is left out.
    """

    def script(machine: Machine) -> Steps[None]:
        space = yield from machine.take_space()
        opening = yield from machine.accept(tags.opening)
        if opening or machine.offer.is_thinking:
            yield from machine.take_space()
            mark = yield from machine.copy_until(machine.reasoning, tags.closing, *call_marks)
            if mark == tags.closing:
                yield from machine.take_space()
            elif mark:
                machine.unread(mark)
                machine.leave_out(tags.closing)
        elif (yield from machine.accept(tags.closing)):  # as if the model had to close what the prompt has closed
            yield from machine.take_space()
        else:
            machine.unread(space)
        yield from answer(machine)

    return script
