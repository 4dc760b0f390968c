"""Long JSON texts are parsed with the same results as by `json.loads`, and rendered, without stalling other threads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.parsers.machine import finite_float, refuse_constant
from router.protocols import long_json
from router.protocols.long_json import parse_long_json, render_long_json

NUMBERS = st.lists(st.integers(-99, 99) | st.floats(allow_nan=False, allow_infinity=False), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | NUMBERS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Generate JSON texts in which up to two characters have been replaced."""
    text = json.dumps(draw(VALUES), indent=draw(st.sampled_from((None, 1))))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from((",", "[", "]", " ", "-", "1", ""))) + text[at + 1 :]
    return text


def outcome(parse: Callable[[], object]) -> str:
    try:
        return repr(parse())  # unlike ==, repr distinguishes 1, 1.0 and True
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


@settings(max_examples=80, derandomize=True)
@given(text=texts())
def test_a_long_text_has_the_value_or_the_error_that_the_standard_parser_gives(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_json, "_MAX_SEPARATORS", -1)
        patch.setattr(long_json, "_MIN_PIECE", 2)
        patch.setattr(long_json, "_NUMBERS", re.compile(r"[-+.eE0-9, \t\n\r]{0,9}"))
        found = outcome(lambda: parse_long_json(text.encode()))
    assert found == outcome(lambda: json.loads(text, parse_constant=refuse_constant, parse_float=finite_float))


def test_a_number_that_is_too_large_is_refused() -> None:
    for numbers in ("1e999", f"{'1, ' * 30_000}-1e999", f"1e999{', 1' * 30_000}"):
        with pytest.raises(ValueError, match="a number is too large"):
            parse_long_json(f"[{numbers}]".encode())


@pytest.mark.parametrize("more", [0, 30_000])
@pytest.mark.parametrize(
    "text",
    [b'"\xed\xa0\xbd"', b'"\xff"', b'"\\ud83d"', b'"\\uD83D\\u0041"', '"\\udc00"'.encode("utf-16")],
)
def test_half_of_a_surrogate_pair_is_refused(text: bytes, more: int) -> None:
    """Python's JSON parser accepts it, whether it is encoded as bytes or escaped."""
    if more and text.startswith(b'"'):
        text = b"[" + b'"", ' * more + text + b"]"
    with pytest.raises(UnicodeError):
        parse_long_json(text)


def test_a_whole_surrogate_pair_and_other_encodings_are_accepted() -> None:
    for text in (b'"\\ud83d\\ude00"', '"😀"'.encode(), '"😀"'.encode("utf-8-sig"), '"😀"'.encode("utf-16")):
        assert parse_long_json(text) == "😀"


def test_the_lock_is_held_for_a_small_piece_of_the_text_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, loads = [], json.loads

    def recorded(text: Any, **settings: Any) -> Any:
        sizes.append(len(text))
        return loads(text, **settings)

    monkeypatch.setattr(json, "loads", recorded)
    ids = list(range(30_000))
    data = json.dumps({"prompt": [ids, ids], "user": "x" * 100_000}).encode()
    assert parse_long_json(data) == {"prompt": [ids, ids], "user": "x" * 100_000}
    assert len(sizes) > 4
    assert max(sizes) <= long_json._MAX_PIECE + 2
    # A text with few values is parsed in one piece, however long the values are.
    assert parse_long_json(b'["' + b"x" * 1_000_000 + b'"]') == ["x" * 1_000_000]
    assert sizes[-1] == 1_000_004


@pytest.mark.parametrize("value", ["[]", '"x"', '{"a": 1}'])
def test_the_number_of_values_is_limited(value: str) -> None:
    text = "[" + ",".join([value] * (long_json.MAX_VALUES + 1)) + "]"
    with pytest.raises(ValueError, match="has more than 100000 values"):
        parse_long_json(text.encode())


def test_an_object_with_too_many_members_is_not_parsed_to_its_end() -> None:
    text = "{" + '"a":1,' * (long_json.MAX_VALUES + 1) + "no JSON"
    with pytest.raises(ValueError, match="has more than 100000 values"):
        parse_long_json(text.encode())


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3))
def test_rendered_members_are_read_as_they_were(members: dict[str, object]) -> None:
    assert json.loads(render_long_json(members)) == members


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2500])
def test_long_arrays_are_rendered_whole(count: int) -> None:
    members = {"tokens": list(range(count)), "token_strs": ["\n]é,"] * count, "count": count}
    text = render_long_json(members).decode()
    assert json.loads(text) == members
    assert text == json.dumps(members, ensure_ascii=False, separators=(",", ":"))
