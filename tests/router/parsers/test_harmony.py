"""gpt-oss's messages, as openai-harmony 0.0.8 reads them.

The library needs the vocabulary o200k_base, which it downloads. With a folder that has `o200k_base.tiktoken`, the table
itself is checked: `TIKTOKEN_ENCODINGS_BASE=FOLDER pytest tests/router/parsers/test_harmony.py` in an environment with
openai-harmony.
"""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple

import pytest

from router.parsers.events import Event, ReasoningDelta, TextDelta
from router.parsers.harmony import script
from router.parsers.machine import Machine, Offer


class Message(NamedTuple):
    """A message as the library returns it; None where the header has no such part."""

    role: str
    channel: str | None
    recipient: str | None
    content: str


# The output that follows `<|start|>assistant`; the messages in it; the answer, and what is not for the user.
CASES: list[tuple[str, list[Message], str, str]] = [
    ("<|message|>Hi<|return|>", [Message("assistant", None, None, "Hi")], "Hi", ""),
    ("<|channel|>final<|message|>Hi \n\n<|return|>", [Message("assistant", "final", None, "Hi \n\n")], "Hi \n\n", ""),
    (
        "<|channel|>analysis<|message|>hm \n<|end|><|start|>assistant<|message|>no channel<|return|>",
        [Message("assistant", "analysis", None, "hm \n"), Message("assistant", None, None, "no channel")],
        "no channel",
        "hm \n",
    ),
    (
        '<|channel|>commentary to=browser.search<|message|>{"q":1}<|call|>',
        [Message("assistant", "commentary", "browser.search", '{"q":1}')],
        "",
        '{"q":1}',
    ),
    (
        "<|channel|>analysis to=python<|message|>1+1<|call|>",
        [Message("assistant", "analysis", "python", "1+1")],
        "",
        "1+1",
    ),
    (
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>"
            '{"r":2}<|end|><|start|>assistant<|channel|>final<|message|>ok<|return|>'
        ),
        [
            Message("assistant", "analysis", None, "hm"),
            Message("tool", "commentary", "assistant", '{"r":2}'),
            Message("assistant", "final", None, "ok"),
        ],
        "ok",
        'hm\n\n{"r":2}',
    ),
    (
        "<|channel|>commentary<|message|>pre \n<|end|><|start|>assistant<|channel|>final<|message|>\n x<|return|>",
        [Message("assistant", "commentary", None, "pre \n"), Message("assistant", "final", None, "\n x")],
        "pre \n\n\n\n x",
        "",
    ),
]


@pytest.mark.parametrize(("output", "messages", "answer", "hidden"), CASES)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_only_what_the_model_says_to_the_user_is_the_answer(
    output: str, messages: list[Message], answer: str, hidden: str, size: int
) -> None:
    machine, events = Machine(script, Offer({"f": {}})), list[Event]()
    output = output.removesuffix("<|return|>").removesuffix("<|call|>")  # end tokens are not part of the text
    for start in range(0, len(output), size):
        events += machine.feed(output[start : start + size])
    events += machine.finish()
    texts = "".join(event.text for event in events if isinstance(event, TextDelta))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    assert (texts, reasoning) == (answer, hidden)


@pytest.mark.skipif(
    not os.environ.get("TIKTOKEN_ENCODINGS_BASE") or importlib.util.find_spec("openai_harmony") is None,
    reason="TIKTOKEN_ENCODINGS_BASE is not set, or openai-harmony is not installed",
)
@pytest.mark.parametrize(("output", "messages", "answer", "hidden"), CASES)
def test_the_library_reads_these_messages(output: str, messages: list[Message], answer: str, hidden: str) -> None:
    from openai_harmony import HarmonyEncodingName, Role, StreamableParser, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    parser = StreamableParser(encoding, role=Role.ASSISTANT)
    for token in encoding.encode(output, allowed_special="all"):
        parser.process(token)
    found = [
        Message(item.author.role.value, item.channel, item.recipient, item.content[0].text) for item in parser.messages
    ]
    assert found == messages
