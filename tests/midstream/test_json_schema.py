"""JSON schemas as grammars: which texts they accept, and that every text they let through is valid and complete.

`python -m benchmarks.json_schema` runs the official test suite.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jsonschema
import jsonschema_rs
import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.grammar.compile import GuideError, GuideTokenizer, compile_guide, load_tokenizer
from midstream.grammar.json_schema import compile as compile_module
from midstream.grammar.json_schema import numbers
from midstream.grammar.json_schema.plain import plain_schema
from midstream.grammar.json_schema.style import Style
from midstream.grammar.messages import Guide
from midstream.model.folder import open_model_folder

OPEN = {"x-guidance": {"open_objects": True}}
LENIENT = {"x-guidance": {"lenient": True}}
TAGGED = [
    {"type": "object", "properties": {"kind": {"const": kind}, "size": {"type": "integer"}}, "required": ["kind"]}
    for kind in ("a", "b")
]
Compile = Callable[[object], llguidance.LLMatcher]


@pytest.fixture(scope="module")
def tokenizer() -> GuideTokenizer:
    folder = open_model_folder("smollm2")
    return load_tokenizer(folder.path / "tokenizer.json", folder.vocab_size, list(folder.end_ids))


@pytest.fixture(scope="module")
def compile_schema(tokenizer: GuideTokenizer) -> Compile:
    def compiled(schema: object) -> llguidance.LLMatcher:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return compile_guide(Guide("json_schema", text), tokenizer)

    return compiled


def accepts(tokenizer: GuideTokenizer, matcher: llguidance.LLMatcher, text: str) -> bool:
    matcher = matcher.deep_copy()
    tokens = tokenizer.library.tokenize_str(text)
    is_valid = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)
    return bool(is_valid and matcher.is_accepting())


# A schema, texts that it accepts, and texts that it does not.
CASES: list[tuple[object, list[str], list[str]]] = [
    # Numbers are exact, whatever their size.
    ({"enum": [1234567890123456789]}, ["1234567890123456789"], ["1234567890123456768"]),
    ({"const": {"id": 9007199254740993}}, ['{"id": 9007199254740993}'], ['{"id": 9007199254740992}']),
    (
        {"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740999},
        ["9007199254740993", "9007199254740999"],
        ["9007199254740992", "9007199254741000"],
    ),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [str(-(2**63))], [str(2**63)]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.05}, ["0.01", "0.05", "0.050"], ["0", "0.0", "0.051"]),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": 2}, ["-1.5", "0", "1.99"], ["-1.51", "2", "2.0"]),
    (
        '{"type": "number", "maximum": 0.1, "exclusiveMinimum": 0.09999999999999999999}',
        ["0.1"],
        ["0.09999999999999999999"],
    ),
    ({"type": "integer", "exclusiveMinimum": 3, "multipleOf": 3}, ["6"], ["3", "7"]),
    ({"type": "number", "multipleOf": 0.1, "exclusiveMinimum": 0}, ["0.1", "1"], ["0", "0.15"]),
    ({"enum": [True, 1.5, None, "1"]}, ["true", "1.5", "null", '"1"'], ["1", "false"]),
    # Strings have one spelling, so that a pattern holds for the value.
    ({"type": "string", "pattern": '^[^"]{1,6}$'}, ['"ab"', r'"\\"'], [r'"\""', r'"\u0022"', '""']),
    ({"type": "string", "pattern": r"^[^\n]+$"}, ['"a b"'], [r'"a\nb"', r'"\u000a"']),
    ({"type": "string", "pattern": "b"}, ['"b"', '"abc"', r'"\tb"'], ['"a"']),
    ({"type": "string", "pattern": "^a|b$"}, ['"ac"', '"cb"'], ['"ca"']),
    ({"type": "string", "pattern": "(^a|^b)c"}, ['"acd"', '"bc"'], ['"cac"']),
    ({"type": "string", "pattern": r"^\w{2}\d\.\S$"}, ['"a_1.é"'], ['"aé1.x"', '"a_1.\u00a0"']),
    ({"type": "string", "pattern": r"^[\p{Lu}\-]+$"}, ['"É-"'], ['"é"']),
    ({"type": "string", "pattern": r"^\u{1F600}[^a-z]$"}, ['"😀🫠"'], ['"😀a"']),
    ({"type": "string", "minLength": 2, "maxLength": 2}, ['"🫠é"', r'"\n\""'], ['"a"', '"abc"']),
    ({"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b"}, {"maxLength": 2}]}, ['"ab"', '"ba"'], ['"abc"']),
    ({"const": "<|im_end|>"}, ['"<|im_end|>"'], []),
    ({"enum": ["<file_sep>", "a\u007f"]}, ['"<file_sep>"', '"a\u007f"'], []),
    ({"const": 'say "hi"\n'}, [r'"say \"hi\"\n"'], [r'"say \u0022hi\u0022\n"']),
    # Formats.
    (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"2000-02-29"'],
        ['"2023-02-29"', '"1900-02-29"', '"2024-04-31"'],
    ),
    ({"type": "string", "format": "ipv6"}, ['"::1"', '"2001:db8::ff00:42:8329"'], ['"1::2::3"', '"12345::"']),
    ({"type": "string", "format": "duration"}, ['"P1Y2M3DT4H"', '"P2W"'], ['"P1D2H"', '"PT"']),
    ({"type": "string", "format": "time", "pattern": r"^\d\d:\d\d$"}, ['"12:34"'], ['"12:34:56Z"']),
    ({"type": "string", "format": "secret"}, ['"any"'], []),
    ({"type": "integer", "format": "int32"}, ["5"], []),
    # The smallest limits.
    ({"type": "string", "maxLength": 0}, ['""'], ['"a"']),
    # Bounds such as the largest safe integer of JavaScript.
    ({"type": "string", "pattern": "^a", "maxLength": 2**53 - 1}, ['"ab"'], ['"b"']),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 2**63}, ["[1, 2]"], ['["a"]']),
    ({"additionalProperties": {"type": "null"}, "maxProperties": 2**32}, ['{"a": null}'], ['{"a": 1}']),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ({"type": "array", "maxItems": 1}, ["[]", "[1]"], ["[1, 2]"]),
    ({"type": "array", "minItems": 1, "maxItems": 1}, ["[1]"], ["[]", "[1, 2]"]),
    ({"type": "array", "prefixItems": [{"const": 1}], "maxItems": 1}, ["[]", "[1]"], ["[2]", "[1, 2]"]),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 1}, ["[2]"], ["[1, 2]"]),
    ({"type": "object", "maxProperties": 0}, ["{}"], ['{"a": 1}']),
    ({"type": "object", "maxProperties": 1}, ["{}", '{"a": 1}'], ['{"a": 1, "b": 1}']),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 1}, ["{}", '{"a": 1}'], ['{"b": 1}']),
    (
        {**OPEN, "type": "object", "properties": {"a": {}}, "minProperties": 1, "maxProperties": 1},
        ['{"a": 1}', '{"b": 1}'],
        ["{}", '{"a": 1, "b": 1}'],
    ),
    # What cannot be enforced is left out of lenient schemas, and nothing else.
    ({**LENIENT, "type": "string", "pattern": "(?=a)b", "maxLength": 2}, ['"xy"'], ['"xyz"', "1"]),
    (
        {
            **LENIENT,
            "type": "object",
            "properties": {
                "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 2},
                "id": {"type": "string", "pattern": "^a"},
                "any": {"oneOf": [{"type": "integer"}, {"multipleOf": 0.5}], "not": {"uniqueItems": True}},
            },
            "required": ["tags", "id"],
        },
        ['{"tags": ["a", "a"], "id": "ab", "any": 1.5}'],
        ['{"tags": [1], "id": "a"}', '{"tags": ["a", "b", "c"]}', '{"tags": [], "id": "b"}', '{"tags": []}'],
    ),
    (
        {
            **LENIENT,
            "anyOf": [{"type": "integer"}, {"enum": ["a"]}],
            "if": {"uniqueItems": False},
            "then": {"const": "b"},
        },
        ["1", '"a"'],
        ['"b"', "1.5"],
    ),
    # Objects: keys have one spelling and one place.
    (
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"type": "string"}}, "required": ["a"]},
        ['{"a": 1}', '{"a": 1, "b": "x"}'],
        [r'{"a": 1, "\u0061": 2}', '{"a": 1, "c": 2}', '{"b": "x"}'],
    ),
    ({**OPEN, "type": "object", "properties": {"a": {"const": 1}}}, ['{"a": 1, "b": [2]}', '{"b": 2}'], ['{"a": 2}']),
    ({"type": "object"}, ['{"x": {"y": [1, null]}}', "{}"], ["[]"]),
    (
        {
            "type": "object",
            "properties": {"ab": {"type": "integer"}},
            "patternProperties": {"^ab$": {"minimum": 3}},
            "additionalProperties": False,
        },
        ["{}", '{"ab": 3}'],
        ['{"ab": 2}', '{"ab": 3, "abc": 3}'],
    ),
    (
        {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        ['{"x1": null, "y": 2}'],
        ['{"x1": 2}', '{"y": null}'],
    ),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, ['{"ab": 1}'], ['{"abc": 1}']),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, ['{"b": 1}', '{"a": 1, "b": 2}'], ['{"c": 1}']),
    (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2, "minProperties": 1},
        ['{"a": 1, "c": 2}'],
        ["{}", '{"a": 1, "b": 2, "c": 3}'],
    ),
    (
        {"type": "object", "minProperties": 2, "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
        ['{"a": 1, "b": null}'],
        ['{"a": 1}', '{"b": null, "b": null}'],
    ),
    (
        {"type": "object", "dependentRequired": {"a": ["b"]}, "properties": {"a": {"const": 1}, "b": {"const": 2}}},
        ['{"a": 1, "b": 2}', '{"b": 2}', "{}"],
        ['{"a": 1}'],
    ),
    (
        {
            "type": "object",
            "properties": {"k": {"enum": [1, 2]}, "x": {"type": "null"}, "y": {"type": "null"}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": 1}}},
            "then": {"required": ["x"]},
            "else": {"required": ["y"]},
        },
        ['{"k": 1, "x": null}', '{"k": 2, "y": null}'],
        ['{"k": 1, "y": null}', '{"k": 2}'],
    ),
    (
        {"type": "number", "not": {"enum": [0, 1.5, -20]}},
        ["1", "1.51", "-2", "20"],
        ["0", "-0.0", "1.50", "-20.0", "15e-1"],
    ),
    ({"allOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, ["2"], ["1", "3"]),
    ({"enum": [1, 2], "const": 1}, ["1"], ["2"]),
    # Values that match exactly one option.
    ({"oneOf": [{"minLength": 2}, {"type": "integer"}]}, ["1.5", '"ab"', "null"], ["1", '"a"']),
    ({"not": {"type": "integer"}}, ["1.5", '"a"', "[1]"], ["1", "1.0", "2e1"]),
    ({"not": {"pattern": "^a"}}, ['"b"'], ['"a"', "1", "null"]),
    ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, ["0.5", "-3", "5.1", "6"], ["1", "5", "3.5", "null"]),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, ["1", "2.5"], ["2", "3", "1.5"]),
    ({"oneOf": [{"type": "string"}, {"pattern": "^[a-f]+$", "type": "string"}]}, ['"abx"'], ['"abc"']),
    ({"oneOf": [{"type": "array", "maxItems": 0}, {"type": "array", "minItems": 1}]}, ["[]", "[1]"], []),
    ({"oneOf": [{"maxLength": 0}, {"minLength": 1}]}, ['""', '"a"'], ["1", "[]"]),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}'],
        ['{"a": 1, "b": 2}', "{}"],
    ),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a": 1}'], ['{"a": 1, "b": 2}', "{}", "[]", "1"]),
    (
        {
            "allOf": [
                {"properties": {"a": {}, "b": {}}},
                {
                    "oneOf": [
                        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                        {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]},
                    ]
                },
            ]
        },
        ['{"a": 1}', '{"b": 1}'],
        ['{"a": 1, "b": 2}', "{}"],
    ),
    (
        {
            "type": "object",
            "oneOf": [
                {"properties": {"kind": {"enum": ["a"]}, "n": {"type": "integer"}}, "required": ["kind"]},
                {"properties": {"kind": {"enum": ["b"]}, "n": {"type": "string"}}},
            ],
        },
        ['{"kind": "a", "n": 1}', '{"kind": "b", "n": "x"}'],
        ['{"kind": "a", "n": "x"}', '{"kind": "b", "n": 1}'],
    ),
    (
        {
            "type": "object",
            "oneOf": [
                {"properties": {"from": {"type": "array", "maxItems": 1}}, "required": ["from"]},
                {"properties": {"from": {"type": "array", "minItems": 2}, "by": {}}, "required": ["from", "by"]},
            ],
        },
        ['{"from": [1]}', '{"from": [1, 2], "by": 3}'],
        ['{"from": [1, 2]}', '{"from": [1], "by": 3}'],
    ),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {name: {"type": "null"}}, "additionalProperties": False}
                for name in ("a", "b")
            ]
        },
        ['{"a": null}', '{"b": null}'],
        ["{}", '{"a": null, "b": null}'],
    ),
    (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": {"type": "string", "minLength": 2}, "b": {"type": "string", "maxLength": 3}},
        },
        ['"a"', '"abcd"'],
        ['"ab"', '"abc"'],
    ),
    (
        {
            "allOf": [{"properties": {"a": {"type": "null"}}}, {"properties": {"b": {"type": "null"}}}],
            "type": "object",
            "unevaluatedProperties": False,
        },
        ['{"a": null, "b": null}'],
        ['{"c": null}'],
    ),
    # Choices.
    ({"oneOf": TAGGED}, ['{"kind": "a", "size": 1}', '{"kind": "b"}'], ['{"kind": "c"}']),
    (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {
                "a": {"type": "object", "properties": {"k": {"const": 1}}},
                "b": {"type": "object", "properties": {"k": {"const": 2}}},
            },
        },
        ['{"k": 1}', '{"k": 2}'],
        ["{}"],
    ),
    ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}]}, ["3", "5"], ["4"]),
    ({"type": ["string", "integer"], "not": {"enum": ["a", 2]}}, ['"b"', "3"], ['"a"', "2"]),
    ({"anyOf": [{"minimum": 3}, {"type": "string"}], "type": ["integer", "string"]}, ["3", '"x"'], ["2"]),
    # References are resolved as the standard says.
    ({"$ref": "#/$defs/a b", "$defs": {"a b": {"type": "integer"}}}, ["1"], ['"1"']),
    ({"$ref": "#/$defs/ü[x]", "$defs": {"ü[x]": {"type": "null"}}}, ["null"], ["1"]),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, ["null"], ["1"]),
    ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "const": "#/$defs/x"}}}, ['"#/$defs/x"'], ["1"]),
    (
        {"$id": "http://a/b", "$ref": "c#/$defs/d", "$defs": {"x": {"$id": "c", "$defs": {"d": {"const": 1}}}}},
        ["1"],
        ["2"],
    ),
    (
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}},
        ['{"next": {"next": {}}}'],
        ['{"next": 1}'],
    ),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"a": {"const": 1}},
            "$ref": "#/definitions/a",
            "type": "string",
        },
        ["1"],
        ['"1"'],
    ),
    # Arrays.
    (
        {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False, "minItems": 1},
        ["[1]", "[1, 2]"],
        ["[]", "[2]"],
    ),
    ({"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 3}}, ["[]", "[1, 3, 3]"], ["[3]"]),
    (
        {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2},
        ["[3, 1]", "[2, 1, 3]"],
        ["[1, 1]", "[1]"],
    ),
    (
        {"type": "array", "items": {"const": 0}, "minItems": 2, "maxItems": 3},
        ["[0, 0]", "[0, 0, 0]"],
        ["[0]", "[0, 0, 0, 0]"],
    ),
    # What restricts nothing is no problem.
    (
        {"type": "object", "propertyNames": {"type": "string"}, "unevaluatedProperties": True, "dependentRequired": {}},
        ["{}"],
        [],
    ),
    ({"type": "array", "uniqueItems": False, "contains": {}, "minContains": 0}, ["[]"], []),
    ({"if": {}, "$comment": "", "title": "T", "nullable": True}, ["[1]", '"x"', "-1.5e3", "{}"], []),
    (True, ["1", '{"a": []}'], []),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda value: json.dumps(value)[:60])
def test_a_schema_accepts_exactly_what_it_says(
    compile_schema: Compile, tokenizer: GuideTokenizer, schema: object, good: list[str], bad: list[str]
) -> None:
    matcher = compile_schema(schema)
    assert [text for text in good if not accepts(tokenizer, matcher, text)] == []
    assert [text for text in bad if accepts(tokenizer, matcher, text)] == []


REFUSED = [
    ({"type": "string", "pattern": "(?=a)b"}, "has a lookahead (?=…), which is not supported"),
    ({"type": "string", "pattern": r"\bword\b"}, "a word boundary"),
    ({"type": "string", "pattern": r"(a)\1"}, "a reference to a group"),
    ({"type": "string", "pattern": "(a"}, "unmatched ("),
    ({"type": "string", "pattern": "a$b"}, "$ in the middle"),
    ({"oneOf": [{"multipleOf": 2}, {"maximum": 5}]}, "oneOf: options 1 and 2 may match the same value"),
    ({"contains": {"const": 1}}, "contains cannot be enforced"),
    ({"type": "object", "minProperties": 2}, "minProperties cannot be enforced, unless"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems cannot be enforced, unless"),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
    ({"not": {"items": {"const": 1}}}, "not with items"),
    ({"$ref": "http://example.com/x"}, "is not in this document"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "leads back to itself"),
    ({"type": "strin"}, "Invalid type: strin"),
    ({"minimum": "3"}, "minimum must be a number"),
    ({"properties": [1]}, "properties must be an object"),
    ({"enum": []}, "no value can match"),
    ({"type": "object", "required": ["a"], "properties": {"a": False}}, "no value can match"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "no value can match"),
    ({"type": "string", "minLength": 2**32}, "minLength is larger than any output"),
    ({"type": "string", "pattern": "^a{0,1000000}$"}, "repetition {0,1000000}; up to 100000"),
    ({"type": "string", "allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]}, "no value can match"),
    ({"type": "integer", "multipleOf": 0.123456789}, "multipleOf"),
    ({"x-guidance": {"white": 1}}, "x-guidance has the unknown setting 'white'"),
    (3, "must be an object or a boolean"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_cannot_be_enforced_is_refused_by_name(compile_schema: Compile, schema: object, reason: str) -> None:
    with pytest.raises(GuideError) as raised:
        compile_schema(schema)
    assert reason in str(raised.value)


def test_white_space_is_none_but_that_of_json(compile_schema: Compile, tokenizer: GuideTokenizer) -> None:
    style = {"whitespace_pattern": r"\s?x?"}
    matcher = compile_schema({"type": "object", "properties": {"a": {"type": "array"}}, "x-guidance": style})
    for text in ('{"a":[1,2]}', '{ "a" : [ 1 , 2 ] }', '{\n"a":[]\t}'):
        assert accepts(tokenizer, matcher, text)
    for text in ('{x"a":[]}', '{\u00a0"a":[]}', '{  "a":[]}'):
        assert not accepts(tokenizer, matcher, text)


def test_the_style_can_be_set(compile_schema: Compile, tokenizer: GuideTokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"type": "array"}}}
    compact = compile_schema({**schema, "x-guidance": {"item_separator": ",", "key_separator": ":"}})
    assert accepts(tokenizer, compact, '{"a":1,"b":[1,{"c":2}]}')
    assert not accepts(tokenizer, compact, '{"a": 1}')
    flexible = compile_schema({**schema, "x-guidance": {"whitespace_flexible": True}})
    for text in ('{"a":1,"b":[]}', '{ "a" : 1 ,\n "b" : [ 1 , 2 ] }'):
        assert accepts(tokenizer, flexible, text)
    coerced = compile_schema({"oneOf": [{"minimum": 1}, {"maximum": 5}], "x-guidance": {"coerce_one_of": True}})
    assert accepts(tokenizer, coerced, "3")


@given(st.integers(-(10**20), 10**20) | st.none(), st.integers(0, 10**4), st.integers(-3, 3))
def test_ranges_of_integers_are_exact(low: int | None, size: int, step: int) -> None:
    high = None if low is None else low + size
    expressions = numbers.integers(low, high)
    for value in {step, (low or 0) + step, (high or 0) + step}:
        is_inside = (low is None or value >= low) and (high is None or value <= high)
        assert any(re.fullmatch(item, str(value)) for item in expressions) == is_inside


DECIMALS = st.decimals(-1000, 1000, places=3)


@given(DECIMALS, DECIMALS, st.booleans(), st.booleans(), DECIMALS)
def test_ranges_of_decimals_are_exact(one: Decimal, other: Decimal, opens: bool, closes: bool, value: Decimal) -> None:
    low, high = sorted((one, other))
    bounds = numbers.Range().raised(low, is_open=opens).lowered(high, is_open=closes)
    options = numbers.decimals(bounds)
    for number in {value, low, high, (low + high) / 2}:
        is_inside = (low < number if opens else low <= number) and (number < high if closes else number <= high)
        text = f"{number:f}" if number else "0"
        assert any(all(re.fullmatch(part, text) for part in option) for option in options) == is_inside


NAMES = st.sampled_from(["a", "b", "long name", 'q"', "é"])
LEAVES = st.one_of(
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-99, 99),
        st.integers(0, 9),
    ),
    st.builds(lambda low: {"type": "number", "exclusiveMinimum": low, "maximum": low + 1}, st.integers(-3, 3)),
    st.builds(
        lambda values: {"enum": values}, st.lists(st.sampled_from([1, "x", None, True, 2.5]), min_size=1, max_size=3)
    ),
    st.builds(lambda low: {"type": "string", "minLength": low, "maxLength": low + 2}, st.integers(0, 2)),
    st.sampled_from(
        [
            {"type": "string", "pattern": '^[^\\\\"a-y]{1,3}$'},
            {"type": "boolean"},
            {"type": "null"},
            {"const": {"k": [1]}},
        ]
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda properties, number, extra: {
                "type": "object",
                "properties": properties,
                "required": list(properties)[:number],
                **extra,
            },
            st.dictionaries(NAMES, inner, max_size=4),
            st.integers(0, 4),
            st.sampled_from(
                [
                    {},
                    {"additionalProperties": False},
                    {"minProperties": 1},
                    {"maxProperties": 2},
                    {"patternProperties": {"^a": {"type": "integer"}}},
                    {"dependentRequired": {"a": ["b"]}},
                ]
            ),
        ),
        st.builds(
            lambda item, low: {"type": "array", "items": item, "minItems": low, "maxItems": low + 2},
            inner,
            st.integers(0, 2),
        ),
        st.builds(
            lambda items: {"type": "array", "prefixItems": items, "items": False},
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda one, other: {"allOf": [one, other]}, inner, inner),
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_every_walk_ends_in_a_value_that_two_validators_accept(
    compile_schema: Compile, tokenizer: GuideTokenizer, schema: dict[str, Any], seed: int
) -> None:
    try:
        matcher = compile_schema(schema)
    except GuideError as error:
        assert "no value can match" in str(error)  # noqa: PT017 (only this reason is right)
        return
    for number in range(3):
        text = walk(tokenizer, matcher, random.Random(seed + number))
        if text is not None:
            value = json.loads(text)
            assert jsonschema.Draft202012Validator(schema).is_valid(value), (schema, text)
            assert jsonschema_rs.Draft202012Validator(schema).is_valid(value), (schema, text)


_TEXTS = [
    {"type": "string"}, {"type": "string", "minLength": 1, "maxLength": 3}, {"type": "string", "format": "date"},
    {"type": "string", "pattern": "^[a-z]{2}-\\d+$"}, {"type": "string", "pattern": "^é[^x]?$"},
    {"enum": ["a", "a b", ""]},
    {"type": "integer"}, {"type": "integer", "minimum": 3, "maximum": 1234}, {"type": "boolean"}, {"type": "null"},
    {"type": ["string", "null"]}, {"const": "<|im_end|>"},
]  # fmt: skip
_PLAIN = [
    *_TEXTS,
    *({"type": "array", "items": item, "minItems": 1, "maxItems": 3} for item in _TEXTS),
    {"anyOf": _TEXTS[:4], "title": "A text"},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/y"}}, "y": _TEXTS[1]}},
    {
        "type": "object",
        "properties": {f"p{number}": part for number, part in enumerate(_TEXTS)},
        "required": ["p1", "p5"],
        "additionalProperties": False,
    },
]


@pytest.mark.parametrize("schema", _PLAIN, ids=json.dumps)
def test_what_the_library_compiles_has_the_masks_of_our_own_rules(
    tokenizer: GuideTokenizer, compile_schema: Compile, monkeypatch: pytest.MonkeyPatch, schema: object
) -> None:
    found = compile_schema(schema)
    monkeypatch.setattr(compile_module, "plain_schema", lambda *_: None)
    own = compile_schema(schema)
    for seed in range(10):
        one, other, draw = found.deep_copy(), own.deep_copy(), random.Random(seed)
        for _ in range(40):
            bits, others = (
                np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
                for matcher in (one, other)
            )
            differing = np.flatnonzero(bits != others)
            assert all("\x7f" in tokenizer.library.decode_str([int(token)]) for token in differing)
            allowed = np.flatnonzero(bits & others)
            if not allowed.size or one.is_stopped():
                break
            token = int(draw.choice(allowed))
            assert one.consume_token(token)
            assert other.consume_token(token)


def test_schemas_that_the_library_compiles_otherwise_are_not_left_to_it() -> None:
    style = Style.read({})
    others: list[object] = [
        {"type": "number"}, {"const": 1}, {"type": "integer", "maximum": 2**53 + 1},
        {"type": "string", "pattern": "^[^x]$"},
        {"type": "object"}, {"type": "object", "properties": {"a": True}}, {"type": "array"}, True,
        {"type": "string", "not": {}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 1}, {"enum": ['"']}, {"enum": []},
        {"type": "array", "items": {"type": "null"}, "uniqueItems": True}, {"type": "string", "pattern": "(?=a)"},
    ]  # fmt: skip
    assert [schema for schema in others if plain_schema(schema, style) is not None] == []
    assert plain_schema({"type": "string", "readonly": True, "minimum": 3}, style) is not None


def walk(tokenizer: GuideTokenizer, matcher: llguidance.LLMatcher, draw: random.Random) -> str | None:
    """Return a random text that the grammar lets through; None if it does not end soon."""
    matcher, tokens, library = matcher.deep_copy(), list[int](), tokenizer.library
    for _ in range(60):
        is_end = matcher.is_accepting() and draw.random() < 0.5
        if matcher.is_stopped() or is_end:
            return str(library.decode_bytes(tokens), "utf-8")
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = [token for token in np.flatnonzero(mask).tolist() if token not in library.eos_tokens]
        if not allowed and matcher.is_accepting():
            return str(library.decode_bytes(tokens), "utf-8")
        assert allowed, f"a dead end after {library.decode_bytes(tokens)!r}: {matcher.get_error()}"
        short = [token for token in allowed if token < 300]
        tokens.append(draw.choice(short if short and draw.random() < 0.8 else allowed))
        assert matcher.consume_token(tokens[-1]), matcher.get_error()
    return None


def test_text_is_spelled_in_ordinary_tokens(compile_schema: Compile, tokenizer: GuideTokenizer) -> None:
    added = set(tokenizer.ids.values())
    for text in tokenizer.ids:
        matcher = compile_schema({"const": text}).deep_copy()
        found = b""
        while not matcher.is_stopped():
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            allowed = [token for token in np.flatnonzero(mask).tolist() if token not in tokenizer.library.eos_tokens]
            assert not added & set(allowed)
            if not allowed:
                break
            found += tokenizer.library.decode_bytes([allowed[-1]])
            matcher.consume_token(allowed[-1])
        assert json.loads(found) == text
