"""Converts a JSON schema to rules in Lark's syntax."""

from __future__ import annotations

import llguidance

from midstream.grammar.json_schema.document import Document
from midstream.grammar.json_schema.errors import SchemaError
from midstream.grammar.json_schema.grammar import NOTHING, Terminal, Writer, without_dead_ends
from midstream.grammar.json_schema.plain import plain_schema
from midstream.grammar.json_schema.rules import RuleMaker
from midstream.grammar.json_schema.style import Style

JSON_TERM = "%json "


def schema_term(schema: object, prefix: str, tokenizer: llguidance.LLTokenizer) -> tuple[str, list[str]]:
    """Return the term of a schema's values, and the lines of the rules that it needs, whose names begin with `prefix`.
    The term is `%json` with a schema if the library compiles that to what our own rules match.

    Args:
        schema: The schema as `read_json` returns it.

    Raises:
        SchemaError: The schema is invalid, cannot be enforced, or no value matches it.
    """
    style = Style.read(schema.get("x-guidance", {}) if isinstance(schema, dict) else {})
    plain = plain_schema(schema, style)
    if plain is not None:
        return JSON_TERM + plain, []
    document = Document(schema)
    document.coerces_one_of, document.opens_objects = style.coerces_one_of, style.opens_objects
    document.is_lenient = style.is_lenient
    try:
        return _rules(document, style, prefix, tokenizer)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # A keyword has a value of another type than it must have.
        raise SchemaError(f"is not a valid JSON schema ({type(error).__name__}: {error})") from None


def _rules(document: Document, style: Style, prefix: str, tokenizer: llguidance.LLTokenizer) -> tuple[str, list[str]]:
    """Return the name of the rule of a document's values, and the lines of all rules."""
    maker = RuleMaker(document, style)
    root = maker.make(document.root)

    def is_empty(terminal: Terminal) -> bool:
        # Only several conditions can exclude each other, and numbers of the library's own.
        may_be_empty = " & " in terminal.lark or "%json" in terminal.lark
        return _matches_nothing(terminal, tokenizer) if may_be_empty else terminal == NOTHING

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
