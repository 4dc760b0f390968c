"""gpt-oss (Harmony): messages, each with a header (`<|channel|>` and optionally a recipient) and a body.

The channel `analysis` holds reasoning, `final` the answer, and `commentary` a preamble to it; a message without a
channel is the answer, too. A message to `functions.NAME` is a call. Messages to other recipients, such as tools built
into the model, and messages of other authors, such as an invented result of a tool, are not for the user: they are
returned as reasoning. The prompt ends with `<|start|>assistant`, so the text begins within a header.
"""

from __future__ import annotations

import re

from router.parsers.machine import Call, Machine, Steps, arguments_text

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
_TO = "to="
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS, _EVERYONE = "functions.", "all"
_OTHER_AUTHOR = re.compile(re.escape(START) + r"\s*(?!assistant\b)\w")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
# A header that is cut off at the end of the text.
_HEADER = re.compile(r"[\w.\s=]*(<\|(channel|constrain)\|>[\w.\s=]*)*")


def script(machine: Machine) -> Steps[None]:
    """Parse a sequence of messages."""
    last = ""
    while True:
        space = yield from machine.take_space()
        begin = yield from machine.accept(START, CHANNEL, MESSAGE, _TO)
        if begin == MESSAGE:
            last = yield from _body(machine, "", last)
            continue
        if begin is None:
            # The header is malformed: text up to the next message is the answer.
            machine.unread(space)
            mark = yield from machine.text_until(START, CHANNEL, MESSAGE, *ENDS)
            if mark is None:
                return
            machine.unread(mark if mark in (START, CHANNEL) else "")
            continue
        header, mark = yield from machine.take_until(MESSAGE, *ENDS)
        if mark == MESSAGE:
            last = yield from _body(machine, begin + header, last)
        elif mark or not _HEADER.fullmatch(header):
            machine.settle(None, begin + header + mark)


def _body(machine: Machine, header: str, last: str) -> Steps[str]:
    """Parse the body of a message, and return its kind of output; `last` is the kind of the previous output.

    A paragraph break separates messages of the same kind, which would otherwise be one text.
    """
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    name = recipient[1] if recipient else _EVERYONE
    function = name.removeprefix(_FUNCTIONS) if name.startswith(_FUNCTIONS) else ""
    is_hidden = name != _EVERYONE or _OTHER_AUTHOR.match(header) or (channel and channel[1] == "analysis")
    kind = "reasoning" if is_hidden and not function else "text"
    emit = machine.reasoning if kind == "reasoning" else machine.text
    gap = "\n\n" if kind == last else ""
    is_empty = True

    def add(text: str) -> None:
        nonlocal is_empty
        if text:
            emit(gap + text if is_empty else text)
            is_empty = False

    mark: str | None
    if function:
        body, mark = yield from machine.take_until(*ENDS, START)
        arguments = arguments_text(body or "{}")
        # Emit the body of a malformed call as text, but not its header, which is markup.
        if machine.settle(None if arguments is None else [Call(function, arguments)], ""):
            kind, is_empty = "call", False
        else:
            add(body)
    else:
        mark = yield from machine.copy_until(add, *ENDS, START, keeps_space=True)
    if mark == START:
        machine.unread(mark)
    return last if is_empty else kind
