"""Parses and renders long JSON texts in a thread without stalling the event loop.

`json.loads` holds the interpreter lock until it has parsed the whole text, which takes up to 60 ns per byte. For texts
with many values this module uses the parser's version in Python, which other threads can interrupt at any value. That
takes twenty times as long, so arrays of numbers, such as token ids, are passed to `json.loads` in pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from json import decoder, scanner
from typing import Any

from router.parsers.machine import finite_float, refuse_constant

# With no more separators than this, `json.loads` takes a few milliseconds; long texts of escapes take up to 70 ms.
_MAX_SEPARATORS = 20_000
# Maximum number of values and members, not counting the numbers that are parsed in pieces.
MAX_VALUES = 100_000
_MIN_PIECE, _MAX_PIECE = 1 << 10, 1 << 15
# Number of values that are rendered at a time.
_MAX_RENDERED = 1000
_NUMBERS = re.compile(rf"[-+.eE0-9, \t\n\r]{{0,{_MAX_PIECE}}}")
_SPACES = re.compile(r"[ \t\n\r]*")
_Scan = Callable[[str, int], tuple[object, int]]


def parse_long_json(data: bytes) -> object:
    """Return the JSON value in `data`. Raises ValueError if `data` is not JSON or not valid text, or has too many
    values or a number that is too large for a float, or RecursionError if it is nested too deeply.
    """
    # Given bytes, `json.loads` would also decode half of a surrogate pair.
    text = data.decode(json.detect_encoding(data))
    if text.count(",") + text.count("[") + text.count("{") <= _MAX_SEPARATORS:
        value = json.loads(text, parse_constant=refuse_constant, parse_float=finite_float)
    else:
        value = _Decoder().decode(text)
    if "\\ud" in text.lower():
        _check_texts(value)
    return value


def _check_texts(value: object) -> None:
    """Raise UnicodeEncodeError if any text in a JSON value has half of a surrogate pair, which JSON can escape."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            item.encode()
        elif isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            left += item
            left += item.values()


def render_long_json(members: Mapping[str, object]) -> bytes:
    """Return a JSON object whose members may be long arrays."""
    return f"{{{','.join(f'{_render(name)}:{_render_value(value)}' for name, value in members.items())}}}".encode()


def _render_value(value: object) -> str:
    if not isinstance(value, list):
        return _render(value)
    pieces = (_render(value[start : start + _MAX_RENDERED])[1:-1] for start in range(0, len(value), _MAX_RENDERED))
    return f"[{','.join(pieces)}]"


def _render(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class _Decoder(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__(parse_constant=refuse_constant, parse_float=finite_float)
        self._num_values = 0
        self.parse_object = self._object
        self.parse_array = self._array
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]  # missing in typeshed

    def _array(self, text_and_start: tuple[str, int], scan: _Scan) -> tuple[list[Any], int]:
        """Parse the array whose first value is at a position in a text; return the array and the position after it."""
        text, start = text_and_start
        values: list[Any] = []
        while (piece := _numbers(text, start)) is not None:
            numbers, start = piece
            values += numbers

        rest, end = decoder.JSONArray((text, start), self._counted(scan))  # type: ignore[attr-defined]  # missing in typeshed
        return values + rest if values else rest, end

    def _object(
        self, text_and_start: tuple[str, int], strict: bool, scan: _Scan, *hooks_and_memo: Any
    ) -> tuple[dict[str, object], int]:
        return decoder.JSONObject(text_and_start, strict, self._counted(scan), *hooks_and_memo)  # type: ignore[attr-defined, no-any-return]

    def _counted(self, scan: _Scan) -> _Scan:
        def scan_and_count(text: str, start: int) -> tuple[object, int]:
            self._num_values += 1
            if self._num_values > MAX_VALUES:
                raise ValueError(f"it has more than {MAX_VALUES} values, not counting those in arrays of numbers")
            return scan(text, start)

        return scan_and_count


def _numbers(text: str, start: int) -> tuple[list[Any], int] | None:
    """Return the numbers at a position in an array, and the position of the value after them; None unless there are
    many valid numbers and a value after them.
    """
    match = _NUMBERS.match(text, start)
    assert match is not None
    end = text.rfind(",", start, match.end())
    if end - start < _MIN_PIECE or text.startswith("]", _SPACES.match(text, end + 1).end()):  # type: ignore[union-attr]
        return None
    try:
        numbers = json.loads(f"[{text[start:end]}]", parse_float=finite_float)
    except ValueError:
        return None
    return (numbers, end + 1) if numbers else None
