"""Terminals of JSON strings."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.grammar.json_schema.formats import FORMATS
from midstream.grammar.json_schema.grammar import expression
from midstream.grammar.json_schema.patterns import CHARACTER, literal, string_pattern


def string_conditions(
    *,
    min_length: int = 0,
    max_length: int | None = None,
    patterns: Sequence[str] = (),
    formats: Sequence[str] = (),
    excluded: Sequence[str] = (),
    excluded_patterns: Sequence[str] = (),
) -> str:
    """Return a terminal, in Lark's syntax, of the strings that meet all conditions; in their only spelling.

    Raises:
        SchemaError: A pattern is invalid or not supported.
    """
    parts = [expression(f'"{string_pattern(pattern)}"') for pattern in patterns]
    parts += [expression(f'"{FORMATS[name]}"') for name in formats if name in FORMATS]
    if min_length or max_length is not None or not parts:
        most = "" if max_length is None else max_length
        count = "*" if (min_length, most) == (0, "") else f"{{{min_length},{most}}}"
        parts.append(expression(f'"{CHARACTER}{count}"'))
    parts += [f"~{expression(_string(string_pattern(pattern)))}" for pattern in excluded_patterns]
    if excluded:
        parts.append(f"~{expression(_string('(' + '|'.join(map(literal, excluded)) + ')'))}")
    return " & ".join(parts)


def _string(content: str) -> str:
    return f'"{content}"'
