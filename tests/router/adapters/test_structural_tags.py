"""Structural tags, in the shapes that vLLM, SGLang and XGrammar take."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from midstream.client import AsyncClient
from midstream.client import Guide as ClientGuide
from midstream.errors import InvalidArgumentError, MidstreamError, UnsupportedError
from midstream.grammar.compile import GuideTokenizer, compile_guide, load_tokenizer
from midstream.grammar.messages import Guide
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from router.protocols.openai.body import Body
from router.protocols.openai.jobs import Vocabulary, chat_job
from router.protocols.openai.structural_tags import structural_body, structural_grammar
from tests.midstream.test_json_schema import accepts
from tests.router.conftest import Cluster

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
DAYS = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
WEATHER = {"begin": "<function=weather>", "content": {"type": "json_schema", "json_schema": CITY}, "end": "</function>"}
PLAN = {"begin": "<function=plan>", "content": {"type": "json_schema", "json_schema": DAYS}, "end": "</function>"}
CALLS = {"type": "triggered_tags", "triggers": ["<function="], "tags": [WEATHER, PLAN]}
OSLO, THREE = '<function=weather>{"city": "Oslo"}</function>', '<function=plan>{"days": 3}</function>'
WRONG, CUT = '<function=weather>{"city": "Bonn"}</function>', '<function=plan>{"days": 3}'
THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
STRUCTURES = [
    {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
    {"begin": "<function=plan>", "schema": DAYS, "end": "</function>"},
]


def const(text: str) -> dict[str, object]:
    return {"type": "const_string", "value": text}


# A format, texts that it accepts, and texts that it does not.
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "const_string", "value": "a/b\n"}, ["a/b\n"], ["a/b", "a/b\nc", ""]),
    ({"type": "json_schema", "json_schema": CITY}, ['{"city": "Oslo"}'], ["{}", '{"city": "Bonn"}']),
    (
        {"type": "json_schema", "json_schema": CITY, "max_whitespace_cnt": 1},
        ['{"city": "Oslo"}'],
        ['{"city":  "Oslo"}'],
    ),
    ({"type": "regex", "pattern": "[0-9]+/[a-z]{2}"}, ["12/ab"], ["12/a", "/ab", "12/abc"]),
    ({"type": "any_text"}, ["", "a\n<b>"], []),
    ({"type": "any_text", "excludes": ["<b", "cc"]}, ["", "a b c"], ["a<b>", "acc"]),
    ({"type": "any_text", "max_chars": 3}, ["", "äöü"], ["abcd"]),
    (
        {
            "type": "sequence",
            "elements": [
                const("a"),
                {"type": "regex", "pattern": "[0-9]"},
                {"type": "any_text"},
            ],
        },
        ["a1", "a1 and more"],
        ["a", "aa"],
    ),
    (
        {"type": "or", "elements": [const("yes"), {"type": "regex", "pattern": "no+"}]},
        ["yes", "noo"],
        ["y", "yesno", ""],
    ),
    (
        THINK,
        ["<think></think>", "<think>a < b\n</think>"],
        ["<think>a", "<think>a</think>b", "</think>", "<think>a</think></think>"],
    ),
    (
        {**THINK, "end": ["</think>", "."]},
        ["<think>a.", "<think>a</think>"],
        ["<think>a.b</think>", "<think>a..", "<think>a"],
    ),
    (
        {**THINK, "content": {"type": "any_text", "excludes": ["<call"]}},
        ["<think>a</think>"],
        ["<think><call></think>"],
    ),
    (
        CALLS,
        ["", "text", OSLO, f"a {OSLO} b\n{THREE}c", f"{OSLO}{THREE}"],
        [WRONG, CUT, f"{OSLO}{WRONG}", "<function=other>"],
    ),
    ({**CALLS, "at_least_one": True}, [OSLO, f"{OSLO}a{THREE}"], ["", "text", f"a{OSLO}", f"{OSLO}{WRONG}"]),
    ({**CALLS, "stop_after_first": True}, ["", "text", f"a{OSLO}"], [f"{OSLO}b", f"{OSLO}{THREE}"]),
    ({**CALLS, "at_least_one": True, "stop_after_first": True}, [OSLO, THREE], ["", f"a{OSLO}", f"{OSLO}{THREE}"]),
    ({**CALLS, "excludes": ["secret"]}, ["a", f"a{OSLO}b"], ["secret", f"{OSLO}secret"]),
    (
        {**CALLS, "triggers": ["<function=w", "<function=p"]},
        [OSLO, f"a {THREE} {OSLO}", "<function=other>"],
        [WRONG, CUT],
    ),
    (
        {"type": "tags_with_separator", "tags": [WEATHER, PLAN], "separator": ", "},
        ["", OSLO, f"{OSLO}, {THREE}, {OSLO}"],
        [f"{OSLO}{THREE}", f"{OSLO}, ", "a", WRONG],
    ),
    (
        {"type": "tags_with_separator", "tags": [WEATHER, PLAN], "separator": "", "at_least_one": True},
        [OSLO, f"{OSLO}{THREE}"],
        ["", f"{OSLO} "],
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [WEATHER],
            "separator": ",",
            "at_least_one": True,
            "stop_after_first": True,
        },
        [OSLO],
        ["", f"{OSLO},{OSLO}"],
    ),
    # Reasoning, then text with calls; a section of calls; and calls within a tag.
    (
        {"type": "sequence", "elements": [THINK, CALLS]},
        ["<think>a</think>", f"<think><function=other></think>b{OSLO}c"],
        [OSLO, f"<think>a</think>{WRONG}"],
    ),
    (
        {
            "type": "triggered_tags",
            "triggers": ["[calls]"],
            "tags": [
                {
                    "begin": "[calls]",
                    "content": {
                        "type": "tags_with_separator",
                        "separator": "\n",
                        "tags": [WEATHER, PLAN],
                        "at_least_one": True,
                    },
                    "end": "[/calls]",
                }
            ],
            "stop_after_first": True,
        },
        ["a", f"a[calls]{OSLO}\n{THREE}[/calls]"],
        [f"[calls]{OSLO}{THREE}[/calls]", f"[calls]{OSLO}[/calls]a", "[calls][/calls]"],
    ),
    (
        {"type": "tag", "begin": "<a>", "content": CALLS, "end": "</a>"},
        ["<a></a>", f"<a>b{OSLO}c</a>"],
        [f"<a>{WRONG}</a>", f"<a>{OSLO}", "<a></a>b"],
    ),
    (
        {
            "type": "sequence",
            "elements": [{"type": "optional", "content": THINK}, const("x")],
        },
        ["x", "<think>a</think>x"],
        ["", "<think>a</think>"],
    ),
    (
        {"type": "dispatch", "rules": [["ab", const("X")], ["<c>", const("Y")]]},
        ["", "a b", "zabX<c>Yb"],
        ["ab", "abY", "<c>X", "aab"],
    ),
    ({"type": "dispatch", "rules": [["ab", const("X")]], "loop": False}, ["", "a", "zabX"], ["abXa", "ab", "abXabX"]),
    (
        {"type": "tag", "begin": "<a>", "content": {"type": "dispatch", "rules": [["ab", const("X")]]}, "end": "</a>"},
        ["<a></a>", "<a>xabXy</a>"],
        ["<a>ab</a>", "<a></a>z"],
    ),
    # An excluded text that ends with a trigger, or within it, wins.
    (
        {"type": "dispatch", "rules": [["<bar>", const("X")]], "excludes": ["x<bar>", "no"]},
        ["a<bar>X", "<ba"],
        ["x<bar>X", "a<bar>Xno"],
    ),
    ({"type": "dispatch", "rules": [["<bar>", const("X")]], "excludes": ["ar"]}, ["a<ba"], ["a<bar>X", "bar"]),
    ({**CALLS, "excludes": ["<function"]}, ["a", "<functio"], [OSLO]),
    (
        {
            "type": "sequence",
            "elements": [
                {"type": "dispatch", "rules": [["ab", const("X")]], "excludes": ["#"]},
                const("#"),
                const("!"),
            ],
        },
        ["#!", "xabXy#!"],
        ["x", "#", "##!"],
    ),
    ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "aba"]),
    ({"type": "star", "content": const("ab")}, ["", "abab"], ["aba"]),
    (
        {"type": "repeat", "min": 1, "max": 2, "content": const("ab")},
        ["ab", "abab"],
        ["", "ababab"],
    ),
    ({"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aa", "aaaa"], ["a"]),
]


def grammar(tag: dict[str, Any], tokens: dict[str, int] | None = None) -> str:
    return structural_grammar(Body(copy.deepcopy(tag)), tokens or {})


@pytest.fixture(scope="module")
def vocabulary() -> GuideTokenizer:
    folder = open_model_folder("smollm2")
    return load_tokenizer(folder.path / "tokenizer.json", folder.vocab_size, list(folder.end_ids))


@pytest.mark.parametrize(("format_", "good", "bad"), CASES)
def test_a_structural_tag_accepts_exactly_what_it_says(
    vocabulary: GuideTokenizer, format_: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    lark = grammar({"type": "structural_tag", "format": format_})
    matcher = compile_guide(Guide("grammar", lark), vocabulary)
    assert [text for text in good if not accepts(vocabulary, matcher, text)] == []
    assert [text for text in bad if accepts(vocabulary, matcher, text)] == []


@pytest.mark.parametrize(("format_", "good", "bad"), CASES)
def test_xgrammar_accepts_the_same(format_: dict[str, Any], good: list[str], bad: list[str]) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    testing = pytest.importorskip("xgrammar.testing")
    found = xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": format_}))
    assert [text for text in good if not testing._is_grammar_accept_string(found, text)] == []
    assert [text for text in bad if testing._is_grammar_accept_string(found, text)] == []


def token(name: str | int) -> dict[str, object]:
    return {"type": "token", "token": name}


CALL = {"type": "tag", "begin": token("<file_sep>"), "content": {"type": "regex", "pattern": "[a-c]+"}, "end": token(8)}


@pytest.mark.parametrize(
    ("format_", "good", "bad"),
    [
        (token(5), [[5]], [[7], ["a"], []]),
        (CALL, [[5, "ab", 8]], [[5, "ab"], [5, 8], ["ab", 8]]),
        ({**CALL, "content": {"type": "any_tokens"}}, [[5, 8], [5, "a\n", 7, 8]], [[5, 7], [5, 8, 8]]),
        ({"type": "any_tokens", "exclude_tokens": [7], "max_tokens": 2}, [[], [5, 5], ["a"]], [[7], [5, 5, 5]]),
        (
            {"type": "token_triggered_tags", "trigger_tokens": ["<file_sep>"], "tags": [CALL]},
            [[], ["any", 7], [7, 5, "ab", 8, "x", 5, "c", 8]],
            [[5, "d", 8], [5, "ab"], [5, 5]],
        ),
        (
            {
                "type": "token_triggered_tags",
                "trigger_tokens": [5],
                "tags": [CALL],
                "exclude_tokens": [7],
                "at_least_one": True,
                "stop_after_first": True,
            },
            [[5, "ab", 8]],
            [[], ["x"], [5, "ab", 8, 5]],
        ),
        (
            {"type": "token_dispatch", "rules": [[5, const("x")], ["<gh_stars>", CALL]], "exclude_tokens": [1]},
            [[], ["any", 6], ["a", 5, "x", 7, 5, "b", 8, "a"]],
            [[5], [5, "y"], [7, 6], [1]],
        ),
        ({"type": "token_dispatch", "rules": [[5, const("x")]], "loop": False}, [["a", 5, "x"]], [[5, "x", "a"]]),
    ],
)
def test_tokens_are_given_by_name_or_id(
    vocabulary: GuideTokenizer, format_: dict[str, Any], good: list[list[str | int]], bad: list[list[str | int]]
) -> None:
    matcher = compile_guide(Guide("grammar", grammar({"format": format_}, vocabulary.ids)), vocabulary)
    for parts, expected in [*((parts, True) for parts in good), *((parts, False) for parts in bad)]:
        ids = [[part] if isinstance(part, int) else vocabulary.library.tokenize_str(part) for part in parts]
        one = matcher.deep_copy()
        matches = all(not one.is_stopped() and one.consume_token(number) for part in ids for number in part)
        assert (matches and one.is_accepting()) == expected, parts


def test_a_grammar_can_be_the_whole_format(vocabulary: GuideTokenizer) -> None:
    found = grammar({"format": {"type": "grammar", "grammar": 'root ::= "a" [0-9]'}})
    matcher = compile_guide(Guide("grammar", found), vocabulary)
    assert accepts(vocabulary, matcher, "a1")
    assert not accepts(vocabulary, matcher, "a")


def test_the_older_shape_is_that_of_triggered_tags() -> None:
    older = {"type": "structural_tag", "structures": STRUCTURES, "triggers": ["<function="]}
    assert grammar(older) == grammar({"type": "structural_tag", "format": CALLS})


def test_markers_that_are_a_token_are_written_as_this_token() -> None:
    tag = {**WEATHER, "begin": "<tool_call>\n", "end": "\n</tool_call>"}
    found = grammar({"format": {**CALLS, "tags": [tag], "triggers": ["<tool"]}}, {"<tool_call>": 7, "</tool_call>": 8})
    assert "<[7]>" in found
    assert "<[8]>" in found
    assert "tool" not in found


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", "format": CALLS}},
        {"response_format": {"type": "structural_tag", "structures": STRUCTURES, "triggers": ["<function="]}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": CALLS})}},
        {"structured_outputs": {"structural_tag": {"structures": STRUCTURES, "triggers": ["<function="]}}},
    ],
)
def test_requests_take_structural_tags(fields: dict[str, object]) -> None:
    job = chat_job(Body({"messages": [{"role": "user", "content": "Hi"}], **fields}), Vocabulary(lambda _: b""))
    assert job.requests[0].guided_decoding.guide == grammar({"format": CALLS})


@pytest.mark.parametrize(
    ("tag", "field", "error"),
    [
        ({"format": {"type": "exclude_token"}}, "format.type", UnsupportedError),
        ({"format": {"type": "any_tokens", "exclude_tokens": [70]}}, "format.exclude_tokens", UnsupportedError),
        (
            {"format": {"type": "star", "content": {"type": "grammar", "grammar": 'root ::= "a"'}}},
            "format.content.type",
            UnsupportedError,
        ),
        (
            {"format": {"type": "grammar", "grammar": 'start: "a"', "syntax": "lark"}},
            "format.syntax",
            UnsupportedError,
        ),
        ({"format": {"type": "dispatch", "rules": [["a"]]}}, "format.rules", InvalidArgumentError),
        (
            {"format": {"type": "dispatch", "rules": [["a", const("b")], ["ab", const("c")]]}},
            "format.rules",
            InvalidArgumentError,
        ),
        ({"format": {"type": "any_text", "max_tokens": 3}}, "format.max_tokens", UnsupportedError),
        ({"format": {**THINK, "begin": {"type": "token", "token": 3}}}, "format.begin.token", UnsupportedError),
        (
            {"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}},
            "format.style",
            UnsupportedError,
        ),
        ({}, "format", InvalidArgumentError),
        ({"type": "text", "format": CALLS}, "type", InvalidArgumentError),
        ({"format": {"type": "any_text", "other": 1}}, "format.other", InvalidArgumentError),
        ({"format": {**CALLS, "triggers": ["<tool"]}}, "format.triggers", InvalidArgumentError),
        ({"format": {**CALLS, "triggers": ["<", "<function"]}}, "format.triggers", InvalidArgumentError),
        ({"format": {"type": "sequence", "elements": []}}, "format.elements", InvalidArgumentError),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}, THINK]}},
            "format.elements[0].type",
            InvalidArgumentError,
        ),
        ({"format": {"type": "star", "content": CALLS}}, "format.content.type", InvalidArgumentError),
    ],
)
def test_errors_name_the_part_of_a_structural_tag(tag: dict[str, Any], field: str, error: type[MidstreamError]) -> None:
    with pytest.raises(error) as raised:
        grammar(tag)
    assert raised.value.field == field


async def test_a_native_request_has_the_grammar_of_its_tag(
    cluster: Cluster, open_client: Callable[..., AsyncClient]
) -> None:
    client = open_client(await cluster.add_router(await cluster.add_detokenizer()))
    tag = {"type": "structural_tag", "format": CALLS}
    stream = client.generate("Hi", request_id="tag", guided=ClientGuide(structural_tag=tag))
    reading = asyncio.create_task(anext(stream))
    await cluster.scheduler.until(lambda: cluster.scheduler.requests)
    (script,) = cluster.scheduler.requests.values()
    assert script.request.guided_decoding == pb.GuidedDecodingConfig(
        guide_type=pb.GUIDE_TYPE_EBNF_GRAMMAR, guide=grammar(tag)
    )
    cluster.scheduler.end(script.request.request_id)
    await reading
    with pytest.raises(InvalidArgumentError) as raised:
        await anext(
            client.generate("Hi", guided=ClientGuide(structural_tag='{"format": {"type": "any_text", "other": 1}}'))
        )
    assert raised.value.field == "guided_decoding.guide.format.other"
    with pytest.raises(InvalidArgumentError, match="1048576"):
        await anext(client.generate("Hi", guided=ClientGuide(structural_tag="{" + " " * (1 << 20))))


@pytest.mark.parametrize("value", ["{", "[]", 3])
def test_a_structural_tag_must_be_an_object(value: object) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        structural_body(value, "tag")
    assert raised.value.field == "tag"
