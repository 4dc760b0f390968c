"""Parsers find tool calls and reasoning in each format, however the text is split.

PARSER_CUTS=100000 tests each format with that many ways to split its transcripts.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from router.parsers.events import CallBegin, Event, TextDelta, joined
from router.parsers.formats import TOOL_FORMATS
from router.parsers.machine import Machine
from tests.router.parsers.transcripts import GOOD, MALFORMED, NOW, OFFER, Named, Transcript, model_format, summary

NUM_CUTS = int(os.environ.get("PARSER_CUTS", "10000"))
FORMATS = tuple(TOOL_FORMATS)


def whole(parser: Machine, text: str) -> list[Event]:
    return joined(parser.feed(text) + parser.finish())


@pytest.mark.parametrize("transcript", GOOD, ids=lambda transcript: transcript.text[:40])
def test_a_transcript_is_read(transcript: Transcript) -> None:
    events = whole(transcript.parser(), transcript.text)
    assert summary(events) == (transcript.content, transcript.reasoning, transcript.calls)
    if transcript.ids:
        assert [event.call_id for event in events if isinstance(event, CallBegin)] == list(transcript.ids)


@pytest.mark.parametrize(("tools", "text"), MALFORMED, ids=lambda value: value[:40])
def test_text_without_a_valid_call_stays_text(tools: str, text: str) -> None:
    for before in ("", "Before it. "):
        assert whole(model_format(tools).parser(OFFER), before + text) == [TextDelta(before + text)]


def cuttings(rng: random.Random, size: int, num_cuts: int) -> Iterator[list[int]]:
    """Yield ways to split a text of `size` characters: at all positions, and at few or many random ones."""
    yield list(range(1, size))
    made = size - 1
    while made < num_cuts:
        places = sorted(rng.sample(range(1, size), min(rng.choice((1, 2, 3, 5, 8, size // 3)), size - 1)))
        made += len(places)
        yield places


@pytest.mark.parametrize("tools", FORMATS)
def test_events_depend_on_the_text_so_far_alone(tools: str) -> None:
    """After each piece, the events equal those that a new parser returns for the whole text so far, so feeding it that
    text resumes the stream.
    """
    rng = random.Random(tools)
    texts = [(item.text, item) for item in GOOD if item.tools == tools]
    texts += [(text, Transcript(tools, text)) for name, text in MALFORMED if name == tools and len(text) < 1000]
    for text, transcript in texts:
        known = [joined(transcript.parser().feed(text[:size])) for size in range(len(text) + 1)]
        end = whole(transcript.parser(), text)
        for places in cuttings(rng, len(text), NUM_CUTS // len(texts) + 1):
            parser, events = transcript.parser(), list[Event]()
            for begin, place in zip([0, *places], [*places, len(text)], strict=True):
                events = joined(events + parser.feed(text[begin:place]))
                assert events == known[place]
            assert joined(events + parser.finish()) == end


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("qwen3_coder", "<function=weather><parameter=city></tool_call>" * 3000),
        ("qwen3_coder", "<tool_call><function=weather>" + "<parameter=" * 5000),
        ("glm45", "<tool_call>weather<arg_value></tool_call>x" * 3000),
        ("glm45", "<tool_call>weather<arg_key>" + "</arg_key><arg_value>" * 5000),
        ("lfm2", '<|tool_call_start|>[weather(city="' + '\\t"x' * 5000 + '")'),
        ("minimax_m2", '<minimax:tool_call><invoke name="weather"><parameter name="city"></invoke>' * 3000),
    ],
    ids=lambda value: value[:40],
)
def test_the_time_for_a_malformed_text_grows_with_its_length(tools: str, text: str) -> None:
    begin = time.process_time()
    whole(model_format(tools).parser(OFFER), text)
    assert time.process_time() - begin < 2


def test_many_malformed_calls_are_read_fast() -> None:
    """An escaped quote does not end a string, so each call appears to continue to the end of the text."""
    for end in ("", '"</tool_call>'):
        text = '<tool_call>{\\"</tool_call>' * 20_000 + end
        begin = time.process_time()
        assert whole(model_format("hermes").parser(OFFER), text) == [TextDelta(text)]
        assert time.process_time() - begin < 5


@pytest.mark.parametrize("tools", FORMATS)
def test_no_text_breaks_a_parser_or_is_lost(tools: str) -> None:
    """The texts are pieces of markup, concatenated in random order."""
    marks = [
        *model_format(tools).marks,
        "[",
        "]",
        "{",
        "}",
        '"',
        "\\",
        " ",
        "\n",
        "name",
        "weather",
        "time",
        ":",
        "(",
        ")",
    ]
    rng = random.Random(tools)
    for _ in range(300):
        pieces = rng.choices(marks, k=rng.randint(1, 30))
        parser, events = model_format(tools, "think").parser(OFFER), list[Event]()
        for piece in pieces:
            events += parser.feed(piece)
        events = joined(events + parser.finish())
        assert events == whole(model_format(tools, "think").parser(OFFER), "".join(pieces))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            '[{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {"ci',
            '{"name": "weather", "parameters": {"ci',
            [NOW],
        ),
        ('[{"name": "time", "parameters": {}}, {"name": "time", "parameters": {}}', "", [NOW, NOW]),
        ('[ {"name": "time", "parameters": {}} , ', "", [NOW]),
        ('[{"name": "weather", "parameters": {"ci', '[{"name": "weather", "parameters": {"ci', []),
        ('[{"name": "rm", "parameters": {}}, {"na', '[{"name": "rm", "parameters": {}}, {"na', []),
        (
            '[{"name": "time", "parameters": {}}, {"answer": 1}, ',
            '[{"name": "time", "parameters": {}}, {"answer": 1}, ',
            [],
        ),
        ('[{"name": "time"}, ' + "[" * 20_000, "[" * 20_000, [NOW]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_complete_calls_of_an_array_that_is_cut_off_are_read(text: str, content: str, calls: list[Named]) -> None:
    for places in ([], list(range(1, min(len(text), 200)))):
        parser, events = model_format("llama3_json").parser(OFFER), list[Event]()
        for begin, place in zip([0, *places], [*places, len(text)], strict=True):
            events += parser.feed(text[begin:place])
        assert summary(joined(events + parser.finish())) == (content, "", calls)


def test_without_tools_markup_is_text() -> None:
    for transcript in GOOD:
        if transcript.tools != "openai":
            empty = type(OFFER)({}, None, transcript.is_thinking)
            content, reasoning, calls = summary(
                whole(model_format(transcript.tools, transcript.reasons_by).parser(empty), transcript.text)
            )
            assert not calls
            if transcript.reasons_by == "none":
                assert (content, reasoning) == (transcript.text, "")


@pytest.mark.parametrize("tools", FORMATS)
def test_calls_after_the_maximum_are_dropped(tools: str) -> None:
    for transcript in GOOD:
        if transcript.tools == tools and transcript.calls:
            _, _, calls = summary(whole(transcript.parser(max_calls=1), transcript.text))
            assert calls == transcript.calls[:1]
