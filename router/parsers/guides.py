"""Grammars that constrain tool calls to the tools' schemas, in the model's own format.

They are written in llguidance's Lark dialect. Text is unconstrained until a call begins. From there on the grammar
applies, so that with `auto` the model decides whether to call a tool, but its arguments match the schema. If the answer
must be JSON, the grammar applies from the first token: the model writes calls or this JSON. A marker that is a single
token is written as that token in the grammar, since text never matches it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from router.parsers.machine import Schema

# Formatting as in json.dumps. If any white space were allowed, a small model might generate nothing else.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = r"TEXT: /(.|\n)*/"
_SPACE = r"SPACE: /\s*/"
# White space between and after sections of calls.
_GAP = r"GAP: /\s{0,2}/"


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How a format writes calls whose arguments are JSON.

    Attributes:
        begin: Text at the beginning of a section of calls, which ends the unconstrained text.
        opening: Text before a call's arguments; NAME stands for the tool and NUMBER for digits.
        closing: Text after a call's arguments.
        separator: Text between calls of a section; None if a section has only one call.
        end: Text after the last call of a section.
    """

    begin: str
    opening: str
    closing: str
    separator: str | None
    end: str


def auto_guide(
    grammar: CallGrammar,
    tools: Mapping[str, Schema],
    strict: Iterable[str],
    tokens: Mapping[str, int],
    *,
    max_calls: int | None,
    thinking: tuple[str, str] | None,
) -> str:
    """Return a Lark grammar for free text that may contain tool calls.

    Args:
        tools: JSON schema of each tool's parameters, by name.
        strict: Tools whose arguments must match their schema; others accept any object.
        tokens: Markers that are a single token, with the token's id.
        max_calls: 1 for at most one call; None for any number.
        thinking: Markers of the model's reasoning, if the model may reason first.
    """
    spell = _Speller(tokens)
    call, calls = _calls(grammar, tools, strict, spell, max_calls)
    lines = [call]
    if spell.first_token(grammar.begin):
        lines.append(f"section: TEXT {spell(grammar.begin)} {calls}")
    else:
        lines.append(f"begin[lazy]: TEXT {spell(grammar.begin)}")
        lines.append(f"section: begin {calls}")
    answer = f"section{'?' if max_calls == 1 else '*'} TEXT"
    if thinking is not None and spell.first_token(thinking[0]):
        # TEXT does not match these tokens, so they are added explicitly; otherwise the model could not reason.
        answer = f"(TEXT {spell(thinking[0])})? (TEXT {spell(thinking[1])})? {answer}"
    return "\n".join([f"start: {answer}", *lines, _TEXT])


def calls_or_json(
    grammar: CallGrammar,
    tools: Mapping[str, Schema],
    strict: Iterable[str],
    schema: Schema,
    tokens: Mapping[str, int],
    *,
    max_calls: int | None,
    thinking: tuple[str, str] | None,
    is_thinking: bool,
) -> str:
    """Return a Lark grammar for either tool calls or JSON that matches `schema`, after any reasoning.

    Args:
        tools: JSON schema of each tool's parameters, by name.
        strict: Tools whose arguments must match their schema; others accept any object.
        schema: JSON schema of the answer.
        tokens: Markers that are a single token, with the token's id.
        max_calls: 1 for at most one call; None for any number.
        thinking: Markers of the model's reasoning, if the model may reason first.
        is_thinking: Whether the prompt has opened the reasoning.
    """
    spell = _Speller(tokens)
    call, calls = _calls(grammar, tools, strict, spell, max_calls)
    sections = "section GAP" if max_calls == 1 else "section (GAP section)* GAP"
    lines = [f"answer: {sections} | {_json(schema)}", call, f"section: {spell(grammar.begin)} {calls}", _GAP]
    if thinking is None:
        return "\n".join(["start: answer", *lines])
    opening, closing = thinking
    start = "thinking SPACE answer" if is_thinking else f"({spell(opening)} thinking SPACE)? answer"
    return "\n".join([f"start: {start}", *lines, _thinking(closing, spell), _TEXT, _SPACE])


def after_thinking(schema: Schema, closing: str, tokens: Mapping[str, int]) -> str:
    """Return a Lark grammar for the rest of the reasoning, followed by JSON that matches a schema."""
    thinking = _thinking(closing, _Speller(tokens))
    return "\n".join([f"start: thinking SPACE {_json(schema)}", thinking, _TEXT, _SPACE])


def _calls(
    grammar: CallGrammar, tools: Mapping[str, Schema], strict: Iterable[str], spell: _Speller, max_calls: int | None
) -> tuple[str, str]:
    """Return the rule `call`, and the terms of a section of calls after its beginning."""
    strict = frozenset(strict)
    calls = []
    for name, schema in tools.items():
        # Split before inserting the name, which may itself contain NUMBER.
        parts = [spell(part.replace("NAME", name)) for part in grammar.opening.split("NUMBER")]
        opening = " /[0-9]+/ ".join(parts)
        parameters = _json({"type": "object", **(schema if name in strict else {})})
        calls.append(f"{opening} {parameters} {spell(grammar.closing)}".strip())
    section = "call"
    if grammar.separator is not None and max_calls != 1:
        section = f"call ({spell(grammar.separator)} call)*"
    return f"call: {' | '.join(calls)}", f"{section} {spell(grammar.end)}".strip()


def _thinking(closing: str, spell: _Speller) -> str:
    """Return the rule `thinking`, for reasoning up to and including its closing marker."""
    return f"thinking{'' if spell.first_token(closing) else '[lazy]'}: TEXT {spell(closing)}"


def _json(schema: Schema) -> str:
    own = schema.get("x-guidance", {})
    return "%json " + json.dumps({**schema, "x-guidance": {**_STYLE, **own} if isinstance(own, dict) else own})


class _Speller:
    """Writes text as Lark terms, in which marker tokens are given by id."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        marks = sorted(map(re.escape, tokens), key=len, reverse=True)
        # Without marks, the pattern must match nothing.
        self._split = re.compile("|".join(marks) or r"(?!)")

    def first_token(self, text: str) -> int | None:
        """Return the id of the special token that `text` begins with."""
        found = self._split.match(text)
        return self._tokens.get(found[0]) if found else None

    def __call__(self, text: str) -> str:
        """Return the terms for `text`; empty if `text` is empty."""
        terms, position = [], 0
        for found in self._split.finditer(text):
            terms.append(_literal(text[position : found.start()]))
            terms.append(f"<[{self._tokens[found[0]]}]>")
            position = found.end()
        return " ".join(filter(None, [*terms, _literal(text[position:])]))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
