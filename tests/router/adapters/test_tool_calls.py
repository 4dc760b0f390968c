"""Tool calls in a model's text, however it is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocols.openai.tool_calls import (
    ArgumentsReader,
    BareReader,
    CallPart,
    MakeReader,
    TaggedReader,
    format_of,
)

NAMES = ("weather", "time")
WEATHER = '{"name": "weather", "arguments": {"city": "東京"}}'
TIME = '{"name": "time", "parameters": {}}'
IN_TOKYO, NOW = CallPart(0, "weather", json.dumps({"city": "東京"})), CallPart(1, "time", "{}")

# Text, the content in it, and its calls.
CASES: list[tuple[MakeReader, str, str, list[CallPart]]] = [
    (TaggedReader, "Just text.", "Just text.", []),
    (TaggedReader, f"<tool_call>\n{WEATHER}\n</tool_call>", "", [IN_TOKYO]),
    (TaggedReader, f"See:<tool_call>{WEATHER}</tool_call>\n <tool_call>{TIME}</tool_call>\n", "See:", [IN_TOKYO, NOW]),
    (TaggedReader, f"<tool_call>{WEATHER}</tool_call>\nDone.", "Done.", [IN_TOKYO]),
    (TaggedReader, f"<tool_call>{WEATHER}", "", [IN_TOKYO]),
    (TaggedReader, "a <tool_call>{</tool_call> b", "a <tool_call>{</tool_call> b", []),
    (TaggedReader, "1 < 2 <tool", "1 < 2 <tool", []),
    (TaggedReader, '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
    (TaggedReader, '<tool_call>{"name": []}</tool_call>', '<tool_call>{"name": []}</tool_call>', []),
    (TaggedReader, "<tool_call>" + "[" * 20_000, "<tool_call>" + "[" * 20_000, []),
    (BareReader, "Just text.", "Just text.", []),
    (BareReader, f"\n{WEATHER}", "", [IN_TOKYO]),
    (BareReader, f"<|python_tag|>{WEATHER}; {TIME}", "", [IN_TOKYO, NOW]),
    (BareReader, f"[TOOL_CALLS] [{WEATHER}, {TIME}]", "", [IN_TOKYO, NOW]),
    (BareReader, f"[{WEATHER}, {TIME}]", "", [IN_TOKYO, NOW]),
    (BareReader, f"[{WEATHER}, {{", "", [IN_TOKYO]),
    (BareReader, '{"answer": 42}', '{"answer": 42}', []),
    (BareReader, "[TOOL", "[TOOL", []),
    (BareReader, "", "", []),
]


@given(case=st.sampled_from(CASES), data=st.data())
def test_calls_do_not_depend_on_how_the_text_is_cut(
    case: tuple[MakeReader, str, str, list[CallPart]], data: st.DataObject
) -> None:
    make, text, content, calls = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader, found, parts = make(NAMES), "", list[CallPart]()
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        more, new = reader.read(text[begin:end], is_final=False)
        found, parts = found + more, parts + new
    more, new = reader.read("", is_final=True)
    assert (found + more, parts + new) == (content, calls)


def test_demanded_arguments_come_as_they_are_written() -> None:
    reader = ArgumentsReader("weather")
    pieces = [reader.read(text, is_final=not text)[1] for text in ('{"city"', ': "x"}', "")]
    assert pieces == [[CallPart(0, "weather", '{"city"')], [CallPart(0, None, ': "x"}')], []]
    assert ArgumentsReader("time").read("", is_final=True)[1] == [CallPart(0, "time", "")]


@pytest.mark.parametrize(
    ("template", "reader"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}… within <tool_call></tool_call> tags", TaggedReader),
        ("{% if tools %}[AVAILABLE_TOOLS]…[TOOL_CALLS]", BareReader),
        ('{% if tools %}{"name": function name, "parameters": dictionary}', BareReader),
    ],
)
def test_a_template_tells_how_its_model_writes_calls(template: str | None, reader: MakeReader | None) -> None:
    assert format_of(template) is reader
