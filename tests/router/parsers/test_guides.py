"""Strict-tool grammars as llguidance applies them, with a tokenizer that has each format's special tokens."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import llguidance
import numpy as np
import pytest

from midstream.grammar.compile import GuideTokenizer, compile_guide, load_tokenizer
from midstream.grammar.messages import Guide
from midstream.model.folder import ModelFolder
from router.parsers.events import joined
from router.parsers.formats import TOOL_FORMATS
from router.parsers.guides import after_thinking, auto_guide, calls_or_json, channels_guide
from router.parsers.machine import Offer, Schema
from tests.router.parsers.transcripts import model_format, summary

SCHEMA: Schema = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = {"weather": SCHEMA, "time": {"type": "object"}}
BEGIN, END = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
KIMI_END = "<|tool_call_end|><|tool_calls_section_end|>"
GUIDED = {
    "hermes": ("", '<tool_call>\n{"name": "weather", "arguments": @}\n</tool_call>'),
    "mistral": ("", '[TOOL_CALLS][{"name": "weather", "arguments": @}, {"name": "time", "arguments": {}}]'),
    "mistral v11": ("[ARGS]", "[TOOL_CALLS]weather[ARGS]@[TOOL_CALLS]time[ARGS]{}"),
    "deepseek_v3": (
        "```json",
        f"{BEGIN}function<｜tool▁sep｜>weather\n```json\n@\n```{END}",
    ),
    "deepseek_v3 v3.1": (
        "",
        f"{BEGIN}weather<｜tool▁sep｜>@{END}",
    ),
    "kimi_k2": (
        "",
        f"{KIMI}@{KIMI_END}",
    ),
    "qwen3_coder": ("", "<tool_call>\n<function=weather>\n@</function>\n</tool_call>"),
    "glm45": ("", "<tool_call>weather\n@</tool_call>"),
    "glm45 v4.7": ("</arg_key><arg_value>", "<tool_call>weather@</tool_call>"),
    "llama3_json": ("", '<|python_tag|>{"name": "weather", "parameters": @}; {"name": "time", "parameters": {}}'),
    "llama3_json bare": ("", '{"name": "weather", "parameters": @}; {"name": "time", "parameters": {}}'),
    "pythonic": ("", "<|python_start|>[weather(@), time()]<|python_end|>"),
    "pythonic bare": ("", "[weather(@), time()]"),
    "deepseek_v32": (
        "",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n@</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    "deepseek_v4": (
        "",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n@</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    ),
    "dots": ("", '<dots_function_call>\n<invoke name="weather">\n@</invoke>\n</dots_function_call>'),
    "ernie45": ("", '<tool_call>\n{"name": "weather", "arguments": @}\n</tool_call>'),
    "granite": ("", '<|tool_call|>[{"name": "weather", "arguments": @}, {"name": "time", "arguments": {}}]'),
    "granite 3.1": ("<tool_call>", '<tool_call>[{"name": "weather", "arguments": @}]</tool_call>'),
    "phi4_mini_json": ("", 'functools[{"name": "weather", "arguments": @}]'),
    "hunyuan_a13b": ("", '<tool_calls>[{"name": "weather", "arguments": @}]</tool_calls>'),
    "nemotron_json": ("", '<TOOLCALL>[{"name": "weather", "arguments": @}]</TOOLCALL>'),
    "cohere_command": ("", '<|START_ACTION|>[{"tool_name": "weather", "parameters": @}]<|END_ACTION|>'),
    "apertus": ("", '<|tools_prefix|>[{"weather": @}]<|tools_suffix|>'),
    "granite-20b-fc": ("", '<function_call>{"name": "weather", "arguments": @}'),
    "gigachat3": ("function call<|role_sep|>", 'function call<|role_sep|>{"name": "weather", "arguments": @}'),
    "gigachat3 3.1": ("", '<|function_call|>{"name": "weather", "arguments": @}'),
    "internlm": ("", '<|action_start|><|plugin|>{"name": "weather", "arguments": @}<|action_end|>'),
    "solar_open": (
        "",
        "<|tool_calls|><|tool_call:begin|>17<|tool_call:name|>weather<|tool_call:args|>@<|tool_call:end|><|calls|>",
    ),
    "lfm2": ("", "<|tool_call_start|>[weather(@), time()]<|tool_call_end|>"),
    "olmo3": ("", "<function_calls>weather(@)\ntime()</function_calls>"),
    "seed_oss": ("", "<seed:tool_call>\n<function=weather>\n@</function>\n</seed:tool_call>"),
    "minimax_m2": ("", '<minimax:tool_call>\n<invoke name="weather">\n@</invoke>\n</minimax:tool_call>'),
    "hy_v3": ("", "<tool_calls>\n<tool_call>weather<tool_sep>\n@</tool_call>\n</tool_calls>"),
    "functiongemma": ("", "<start_function_call>call:weather{@}<end_function_call>"),
    "gemma4": ("", "<|tool_call>call:weather{@}<tool_call|>"),
}
TAGGED = {
    "qwen3_coder": "<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n",
    "glm45": (
        "<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    ),
    "glm45 v4.7": "<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key><arg_value>3</arg_value>",
    "pythonic": 'city="Oslo", days=3',
    "pythonic bare": 'city="Oslo", days=3',
    "deepseek_v32": (
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    ),
    "deepseek_v4": (
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    ),
    "dots": '<parameter name="city">Oslo</parameter>\n<parameter name="days">3</parameter>\n',
    "lfm2": 'city="Oslo", days=3',
    "olmo3": 'city="Oslo", days=3',
    "seed_oss": "<parameter=city>Oslo</parameter>\n<parameter=days>3</parameter>\n",
    "minimax_m2": '<parameter name="city">Oslo</parameter>\n<parameter name="days">3</parameter>\n',
    "hy_v3": (
        "<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    ),
    "functiongemma": "city:<escape>Oslo<escape>,days:3",
    "gemma4": 'city:<|"|>Oslo<|"|>,days:3',
}
MARKS = sorted(
    {mark for name in (*GUIDED, "openai") for mark in TOOL_FORMATS[name.split()[0]].marks} | {"<think>", "</think>"}
)
ANSWER: Schema = {
    "type": "object",
    "properties": {"summary": {"type": "string"}},
    "required": ["summary"],
    "additionalProperties": False,
}
SUNNY = '{"summary": "Sunny, <b>3</b> days."}'
THINK = ("<think>", "</think>")
GOOD, BAD = '{"city": "Oslo", "days": 3}', '{"city": "Oslo", "days": "three"}'


def filled(name: str, arguments: str, text: str = "") -> str:
    """Return a format's call with the arguments GOOD or BAD."""
    if name in TAGGED:
        three = dict.fromkeys(("pythonic", "lfm2", "olmo3"), '"three"') | {
            "functiongemma": "<escape>three<escape>",
            "gemma4": '<|"|>three<|"|>',
        }
        wrong = TAGGED[name].replace("3", three.get(name.split()[0], "three"))
        arguments = TAGGED[name] if arguments == GOOD else wrong
    return (text or GUIDED[name][1]).replace("@", arguments)


@pytest.fixture(scope="module", params=(False, True), ids=("marks are text", "marks are tokens"))
def tokenizer(
    request: pytest.FixtureRequest, folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> tuple[llguidance.LLTokenizer, dict[str, int]]:
    """Return a tokenizer with or without the formats' special tokens, and the ids of these tokens."""
    source = json.loads((folder.path / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {}
    if request.param:
        for number, mark in enumerate(MARKS, folder.vocab_size):
            tokens[mark] = number
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            source["added_tokens"].append({"id": number, "content": mark, "special": True, **flags})
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_text(json.dumps(source), encoding="utf-8")
    return load_tokenizer(file, folder.vocab_size + len(tokens), list(folder.end_ids)), tokens


def accepts(tokenizer: llguidance.LLTokenizer, guide: str, text: str) -> bool:
    """Return whether the whole text matches the grammar and may end after its last character."""
    matcher = compile_guide(Guide("ebnf", guide), tokenizer)
    return all(matcher.consume_token(token) for token in tokenizer.tokenize_str(text)) and matcher.is_accepting()


@pytest.mark.parametrize("name", GUIDED)
def test_arguments_follow_the_schema_once_a_call_begins(
    tokenizer: tuple[llguidance.LLTokenizer, dict[str, int]], name: str
) -> None:
    library, tokens = tokenizer
    template, text = GUIDED[name]
    make = TOOL_FORMATS[name.split()[0]].grammar
    assert make is not None
    for strict, thinking in ((["weather"], None), (["weather"], ("<think>", "</think>")), ([], None)):
        guide = auto_guide(make(template), TOOLS, strict, tokens, max_calls=None, thinking=thinking)
        assert accepts(library, guide, "No call, just { text }.")
        for before in ("", "I look. ", *(["<think>Hm.</think>\n"] if thinking else [])):
            assert accepts(library, guide, before + filled(name, GOOD))
        assert accepts(library, guide, filled(name, BAD)) != bool(strict)
        assert not accepts(library, guide, text.replace("weather", "rm"))


# Beside JSON, calls have their beginning.
MARKED = [name for name in GUIDED if not name.endswith("bare")]


@pytest.mark.parametrize("name", MARKED)
def test_an_answer_is_either_calls_or_json(tokenizer: tuple[llguidance.LLTokenizer, dict[str, int]], name: str) -> None:
    library, tokens = tokenizer
    template, text = GUIDED[name]
    make = TOOL_FORMATS[name.split()[0]].grammar
    assert make is not None
    call, wrong = filled(name, GOOD), filled(name, BAD)
    for thinking, is_thinking, befores in (
        (None, False, [""]),
        (THINK, False, ["", "<think>Hm.</think>\n\n"]),
        (THINK, True, ["Hm.\n</think>\n\n"]),
    ):
        guide = calls_or_json(
            make(template),
            TOOLS,
            ["weather"],
            ANSWER,
            tokens,
            max_calls=None,
            thinking=thinking,
            is_thinking=is_thinking,
        )
        for before in befores:
            for good in (call, f"{call}\n{call}", call + "\n", SUNNY):
                assert accepts(library, guide, before + good)
            for bad in (
                *("It is sunny.", '{"summary": 3}', "", f"I look. {call}", f"{call} It is sunny.", call + SUNNY),
                *(SUNNY + call, wrong, text.replace("weather", "rm")),
            ):
                assert not accepts(library, guide, before + bad)
        if is_thinking:
            assert not accepts(library, guide, SUNNY)
            assert not accepts(library, guide, call)


def test_beside_json_there_may_be_a_limit_of_one_call(
    tokenizer: tuple[llguidance.LLTokenizer, dict[str, int]],
) -> None:
    library, tokens = tokenizer
    for name in MARKED:
        template, text = GUIDED[name]
        make = TOOL_FORMATS[name.split()[0]].grammar
        assert make is not None
        one = re.sub(r'[,;] \{"name": "time", "\w+": \{\}\}|\[TOOL_CALLS\]time\[ARGS\]\{\}|(, |\n)time\(\)', "", text)
        call = filled(name, GOOD, one)
        guide = calls_or_json(make(template), TOOLS, [], ANSWER, tokens, max_calls=1, thinking=None, is_thinking=False)
        assert accepts(library, guide, call)
        assert accepts(library, guide, SUNNY)
        assert not accepts(library, guide, call + call)
        assert accepts(library, guide, filled(name, BAD, one))  # is accepted, since the tool is not strict


@pytest.mark.parametrize("name", GUIDED)
def test_a_tool_may_be_named_like_a_placeholder(
    tokenizer: tuple[llguidance.LLTokenizer, dict[str, int]], name: str
) -> None:
    library, tokens = tokenizer
    template, _ = GUIDED[name]
    make = TOOL_FORMATS[name.split()[0]].grammar
    assert make is not None
    tool = "NUMBER_NAME"
    guide = auto_guide(make(template), {**TOOLS, tool: SCHEMA}, [tool], tokens, max_calls=None, thinking=None)
    call = filled(name, GOOD)
    assert accepts(library, guide, call.replace("weather", tool))
    for other in ("42_NAME", "NUMBER_weather"):
        assert not accepts(library, guide, call.replace("weather", other))


def test_json_comes_after_open_reasoning(tokenizer: tuple[llguidance.LLTokenizer, dict[str, int]]) -> None:
    library, tokens = tokenizer
    guide = after_thinking(SCHEMA, "</think>", tokens)
    assert accepts(library, guide, f"Perhaps {{3}}?\n</think>\n\n{GOOD}")
    for text in (GOOD, f"Hm.</think>{BAD}", "Hm."):
        assert not accepts(library, guide, text)


def test_a_schema_may_set_its_formatting(tokenizer: tuple[llguidance.LLTokenizer, dict[str, int]]) -> None:
    library, tokens = tokenizer
    guide = after_thinking({**SCHEMA, "x-guidance": {"key_separator": ":"}}, "</think>", tokens)
    assert accepts(library, guide, '</think>{"city":"Oslo", "days":3}')
    assert not accepts(library, guide, f"</think>{GOOD}")


def test_text_that_the_grammar_allows_parses_as_a_call() -> None:
    for name in GUIDED:
        parser = model_format(name.split()[0]).parser(Offer(TOOLS))
        _, _, calls = summary(joined(parser.feed(filled(name, GOOD)) + parser.finish()))
        assert calls[0] == ("weather", json.loads(GOOD))


PAIRS = {
    "qwen3_coder": "<parameter={}>\n{}\n</parameter>\n",
    "glm45": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
}
NAMED: Schema = {
    "$defs": {"Unit": {"enum": ["C", "F"]}, "Place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
    "type": "object",
    "properties": {
        "unit": {"$ref": "#/$defs/Unit"},
        "place": {"anyOf": [{"allOf": [{"$ref": "#/$defs/Place"}]}, {"type": "null"}]},
        "count": {"type": ["integer", "null"]},
        "note": {"type": ["string", "null"]},
        "blank": {"enum": ["", 1, True, "</arg_value>"]},
        "any": {},
        "more": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
        "fixed": {"const": "x"},
    },
    "required": ["unit"],
}


@pytest.mark.parametrize(
    ("name", "values", "is_right"),
    [
        ("unit", ["C", "F"], True),
        ("unit", ["", "K", '"C"', "C "], False),
        ("place", ['{"lat": 1.5}', "null"], True),
        ("place", ['{"lat": "x"}', "None", "Oslo", '"Oslo"'], False),
        ("count", ["3", "null"], True),
        ("count", ["three", "3.5", '"3"'], False),
        ("note", ["", "null", "two\nlines", '{"a": "<b>"}'], True),
        ("blank", ["", "1", "true"], True),
        ("blank", ["True", "2", "x"], False),
        ("any", ["", "3", "some <text>"], True),
        ("more", ["[]", '[{"lat": 1}]'], True),
        ("more", ['[{"lat": []}]', "Oslo"], False),
        ("fixed", ["x"], True),
        ("fixed", ["", "y"], False),
    ],
)
def test_arguments_between_tags_follow_their_schemas(
    tokenizer: tuple[llguidance.LLTokenizer, dict[str, int]], name: str, values: list[str], *, is_right: bool
) -> None:
    library, tokens = tokenizer
    for kind, pair in PAIRS.items():
        make = TOOL_FORMATS[kind].grammar
        assert make is not None
        guide = auto_guide(make(""), {"weather": NAMED}, ["weather"], tokens, max_calls=None, thinking=None)
        unit = "" if name == "unit" else pair.format("unit", "C")
        for value in values:
            call = GUIDED[kind][1].replace("@", unit + pair.format(name, value))
            assert accepts(library, guide, call) == is_right
        assert not accepts(library, guide, GUIDED[kind][1].replace("@", ""))  # `unit` is required
        assert not accepts(library, guide, GUIDED[kind][1].replace("@", pair.format("unit", "C") * 2))
        assert not accepts(library, guide, GUIDED[kind][1].replace("@", pair.format("unknown", "C")))


ROUND_TRIPS: list[tuple[object, str, object]] = [
    ({"$ref": "#/$defs/Digit"}, "1", "1"),
    ({"const": "1"}, "1", "1"),
    ({"enum": ["1", None]}, "1", "1"),
    ({"anyOf": [{"const": "true"}, {"const": "2"}]}, "true", "true"),
    ({"type": ["string", "null"]}, "true", "true"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": "string"}, "\n\na </para\n\n", "\n\na </para\n\n"),
    ({"$ref": "#/$defs/Loop"}, "null", None),
    ({"$ref": "#/properties/count"}, "3", 3),
    ({"type": "array", "items": {"$ref": "#"}}, '[{"value": []}]', [{"value": []}]),
    ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a": 1}', {"a": 1}),
    ({"anyOf": []}, "x", "x"),
    ({"const": "\x7f"}, "\x7f", "\x7f"),
]


@pytest.mark.parametrize("kind", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(("schema", "text", "value"), ROUND_TRIPS)
def test_values_between_tags_are_read_as_the_grammar_means_them(
    tokenizer: tuple[llguidance.LLTokenizer, dict[str, int]], kind: str, schema: object, text: str, value: object
) -> None:
    library, tokens = tokenizer
    root: Schema = {
        "$defs": {"Digit": {"enum": ["1", "2"]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "null"}]}},
        "type": "object",
        "properties": {"value": schema, "count": {"type": "integer"}},
        "required": ["value"],
    }
    make = TOOL_FORMATS[kind].grammar
    assert make is not None
    guide = auto_guide(make(""), {"weather": root}, ["weather"], tokens, max_calls=None, thinking=None)
    call = GUIDED[kind][1].replace("@", PAIRS[kind].format("value", text))
    assert accepts(library, guide, call)
    parser = model_format(kind).parser(Offer({"weather": root}))
    _, _, calls = summary(joined(parser.feed(call) + parser.finish()))
    assert calls == [("weather", {"value": value})]


@pytest.mark.parametrize(
    ("kind", "tags"), [("qwen3_coder", ("</parameter>", "</function>")), ("glm45", ("</arg_value>", "</tool_call>"))]
)
def test_strings_contain_no_tag_that_ends_them(
    tokenizer: tuple[llguidance.LLTokenizer, dict[str, int]], kind: str, tags: tuple[str, str]
) -> None:
    library, tokens = tokenizer
    make = TOOL_FORMATS[kind].grammar
    assert make is not None
    guide = auto_guide(make(""), {"weather": SCHEMA}, ["weather"], tokens, max_calls=1, thinking=None)
    for tag in tags:
        assert accepts(library, guide, filled(kind, GOOD).replace("Oslo", f"a{tag[:-1]} b"))
        assert not accepts(library, guide, filled(kind, GOOD).replace("Oslo", f"a{tag}b"))


@pytest.mark.parametrize("kind", ["qwen3_coder", "glm45"])
def test_a_closed_schema_without_properties_allows_no_arguments(
    tokenizer: tuple[llguidance.LLTokenizer, dict[str, int]], kind: str
) -> None:
    library, tokens = tokenizer
    make = TOOL_FORMATS[kind].grammar
    assert make is not None
    closed: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
    guide = auto_guide(make(""), {"weather": closed}, ["weather"], tokens, max_calls=None, thinking=None)
    assert accepts(library, guide, GUIDED[kind][1].replace("@", ""))
    assert not accepts(library, guide, filled(kind, GOOD))


MIXED: Schema = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "a b": {"enum": ["x", True, None, 1.5, ["y", {"k": False}], {}]},
        "flag": {"type": ["boolean", "null"]},
        "deep": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
        "more": {"type": "array", "items": {"type": ["string", "boolean"]}, "maxItems": 2},
    },
    "required": ["flag"],
    "additionalProperties": {"type": "integer"},
    "dependentRequired": {"text": ["deep"]},
}


@pytest.mark.parametrize("name", ["pythonic bare", "pythonic", "functiongemma", "gemma4", "llama3_json bare"])
def test_every_walk_through_a_notation_is_read_as_a_call_that_matches_its_schema(name: str) -> None:
    library = GuideTokenizer(llguidance.LLTokenizer("byte"), {})
    kind = name.split()[0]
    make = TOOL_FORMATS[kind].grammar
    assert make is not None
    guide = auto_guide(make(""), {"weather": MIXED}, ["weather"], {}, max_calls=1, thinking=None)
    before, _, _ = GUIDED[name][1].partition("@")
    begun = compile_guide(Guide("ebnf", guide), library)
    assert begun.consume_tokens(library.tokenize_str(before))
    num_read, draw = 0, random.Random(7)
    for _ in range(100):
        text = walk(library.library, begun, draw)
        if text is None:
            continue
        parser = model_format(kind).parser(Offer({"weather": MIXED}))
        content, _, calls = summary(joined(parser.feed(before + text) + parser.finish()))
        ((called, arguments),) = calls
        assert (content, called) == ("", "weather")
        assert jsonschema.Draft202012Validator(MIXED).is_valid(arguments), (before + text, arguments)
        num_read += 1
    assert num_read > 20


def walk(library: llguidance.LLTokenizer, begun: llguidance.LLMatcher, draw: random.Random) -> str | None:
    """Return the rest of a text that a grammar of bytes lets through; None if it does not end soon."""
    matcher, found = begun.deep_copy(), list[int]()
    for _ in range(300):
        if matcher.is_accepting():
            return bytes(found).decode()
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = [token for token in np.flatnonzero(mask).tolist() if token < 256]
        assert allowed, matcher.get_error()
        closing = [token for token in allowed if token in b'"})]>1']
        found.append(draw.choice(closing if closing and draw.random() < 0.5 else allowed))
        assert matcher.consume_token(found[-1])
    return None


@pytest.mark.parametrize("kind", ["deepseek_v32", "minimax_m2"])
def test_arguments_in_invocations_follow_their_schemas(
    tokenizer: tuple[GuideTokenizer, dict[str, int]], kind: str
) -> None:
    library, tokens = tokenizer
    make = TOOL_FORMATS[kind].grammar
    assert make is not None
    guide = auto_guide(make(""), {"weather": NAMED}, ["weather"], tokens, max_calls=None, thinking=None)
    parser_of = model_format(kind).parser
    tag = "｜DSML｜" if kind == "deepseek_v32" else ""

    def pair(name: str, value: object, text: str = "") -> str:
        is_text = isinstance(value, str)
        mark = f' string="{"true" if is_text else "false"}"' if tag else ""
        shown = text or (value if isinstance(value, str) else json.dumps(value))
        return f'<{tag}parameter name="{name}"{mark}>{shown}</{tag}parameter>\n'

    good: dict[str, object] = {"unit": "C", "place": {"lat": 1.5}, "count": None, "note": "two\n</lines"}
    good |= {"blank": 1, "any": "3 <b>", "fixed": "x"}
    call = GUIDED[kind][1].replace("@", "".join(pair(*item) for item in good.items()))
    assert accepts(library, guide, call)
    parser = parser_of(Offer({"weather": NAMED}))
    _, _, calls = summary(joined(parser.feed(call) + parser.finish()))
    assert calls == [("weather", good)]
    bad: list[tuple[str, object]] = [("unit", "K"), ("place", {"lat": "x"}), ("count", 3.5), ("fixed", "y")]
    for name, value in [*bad, ("unit", None), ("place", "Oslo"), ("blank", 2)]:
        wrong = "".join(pair(*item) for item in {"unit": "C", name: value}.items())
        assert not accepts(library, guide, GUIDED[kind][1].replace("@", wrong)), (name, value)
    assert not accepts(library, guide, GUIDED[kind][1].replace("@", ""))


ANALYSIS = "<|channel|>analysis<|message|>Is it {3}?<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TO_WEATHER = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.weather<|message|>",
    " to=functions.weather<|channel|>commentary json<|message|>",
)


def test_calls_in_channels_follow_the_schema(tokenizer: tuple[llguidance.LLTokenizer, dict[str, int]]) -> None:
    library, tokens = tokenizer
    guide = channels_guide(TOOLS, ["weather"], None, tokens)
    for before in ("", ANALYSIS, ANALYSIS + PREAMBLE, PREAMBLE + ANALYSIS + ANALYSIS):
        assert accepts(library, guide, f"{before}{FINAL}Any {{ text }}.")
        for header in TO_WEATHER:
            assert accepts(library, guide, before + header + GOOD)
            assert not accepts(library, guide, before + header + BAD)
            assert not accepts(library, guide, before + header.replace("weather", "rm") + GOOD)
        assert accepts(library, guide, before + TO_WEATHER[0].replace("weather", "time") + '{"any": [1]}')
    for text in ("No channel.", ANALYSIS, "<|channel|>analysis<|message|>Only this."):
        assert not accepts(library, guide, text)


@pytest.mark.parametrize("has_tools", [False, True])
def test_json_in_the_final_channel_comes_after_any_reasoning(
    tokenizer: tuple[llguidance.LLTokenizer, dict[str, int]], *, has_tools: bool
) -> None:
    library, tokens = tokenizer
    guide = channels_guide(TOOLS if has_tools else {}, ["weather"], ANSWER, tokens)
    for before in ("", ANALYSIS):
        assert accepts(library, guide, before + FINAL + SUNNY)
        assert accepts(library, guide, f"{before}<|channel|>final <|constrain|>json<|message|>{SUNNY}")
        assert accepts(library, guide, before + TO_WEATHER[0] + GOOD) == has_tools
        for text in (f"{FINAL}It is sunny.", FINAL, SUNNY, PREAMBLE + FINAL + SUNNY, TO_WEATHER[0] + BAD):
            assert not accepts(library, guide, before + text)
