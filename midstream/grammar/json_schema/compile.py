"""Converts a JSON schema to rules in Lark's syntax."""

from __future__ import annotations

import re

import llguidance

from midstream.grammar.json_schema.document import Document
from midstream.grammar.json_schema.errors import SchemaError
from midstream.grammar.json_schema.grammar import NOTHING, Terminal, Writer, without_dead_ends
from midstream.grammar.json_schema.rules import RuleMaker
from midstream.grammar.json_schema.style import Style

# Terminals that may match nothing: those with several conditions.
_MAY_BE_EMPTY = re.compile(r" & |%json")


def schema_rules(text: str, prefix: str, tokenizer: llguidance.LLTokenizer) -> tuple[str, list[str]]:
    """Return the name of the rule of a schema's values, and the lines of all its rules, whose names begin with
    `prefix`.

    Raises:
        SchemaError: The schema is invalid, cannot be enforced, or no value matches it.
    """
    document = Document(text)
    style = Style.read(document.style)
    document.coerces_one_of, document.opens_objects = style.coerces_one_of, style.opens_objects
    document.is_lenient = style.is_lenient
    maker = RuleMaker(document, style)
    root = maker.make(document.root)

    def is_empty(terminal: Terminal) -> bool:
        if not _MAY_BE_EMPTY.search(terminal.lark):
            return terminal == NOTHING
        return _matches_nothing(terminal, tokenizer)

    rules = without_dead_ends(maker.rules, root, is_empty)
    if not rules:
        raise SchemaError("no value can match the schema")
    return Writer(rules, prefix).lines(root)


def _matches_nothing(terminal: Terminal, tokenizer: llguidance.LLTokenizer) -> bool:
    lark = terminal.lark if terminal.lark.startswith("%json") else "T"
    rule = "" if lark != "T" else f"\nT: {terminal.lark}"
    matcher = llguidance.LLMatcher(
        tokenizer, llguidance.LLMatcher.grammar_from_lark(f"start: {lark}{rule}"), log_level=0
    )
    if matcher.is_error():
        raise SchemaError(matcher.get_error().strip().partition("\n")[0])
    return not any(matcher.compute_bitmask()) or matcher.is_error()
