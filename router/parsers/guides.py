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
from router.parsers.tagged_values import alternatives, properties_of

# Formatting as in json.dumps. If any white space were allowed, a small model might generate nothing else.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = r"TEXT: /(.|\n)*/"
_SPACE = r"SPACE: /\s*/"
# White space between and after sections of calls.
_ROOT_ID = "urn:midstream:root"
_GAP = r"GAP: /\s{0,2}/"


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """How a format writes arguments one by one: strings as they are, and other values as JSON.

    Attributes:
        opening: Text before a value; KEY stands for the argument's name.
        closing: Text after a value, which ends it.
        excluded: Tags that a string cannot contain, since the parser would end the value or the call there.
    """

    opening: str
    closing: str
    excluded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How a format writes calls.

    Attributes:
        begin: Text at the beginning of a section of calls, which ends the unconstrained text.
        opening: Text before a call's arguments; NAME stands for the tool and NUMBER for digits.
        closing: Text after a call's arguments.
        separator: Text between calls of a section; None if a section has only one call.
        end: Text after the last call of a section.
        tagged: How the arguments are written; None for a JSON object.
    """

    begin: str
    opening: str
    closing: str
    separator: str | None
    end: str
    tagged: TaggedArguments | None = None


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
    spell = Speller(tokens)
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
    spell = Speller(tokens)
    call, calls = _calls(grammar, tools, strict, spell, max_calls)
    sections = "section GAP" if max_calls == 1 else "section (GAP section)* GAP"
    lines = [f"answer: {sections} | {json_term(schema)}", call, f"section: {spell(grammar.begin)} {calls}", _GAP]
    if thinking is None:
        return "\n".join(["start: answer", *lines, _TEXT])
    opening, closing = thinking
    start = "thinking SPACE answer" if is_thinking else f"({spell(opening)} thinking SPACE)? answer"
    return "\n".join([f"start: {start}", *lines, _thinking(closing, spell), _TEXT, _SPACE])


def channels_guide(
    tools: Mapping[str, Schema], strict: Iterable[str], schema: Schema | None, tokens: Mapping[str, int]
) -> str:
    """Return a Lark grammar for the messages of gpt-oss, which writes reasoning, calls and the answer in channels: any
    reasoning, then either a call or the answer. A call ends the output.

    Args:
        tools: JSON schema of each tool's parameters, by name; may be empty.
        strict: Tools whose arguments must match their schema; others accept any object.
        schema: JSON schema of the answer; None for any text, which may also precede calls.
        tokens: Markers that are a single token, with the token's id.
    """
    spell, strict = Speller(tokens), frozenset(strict)
    channel, message, constrain = "<|channel|>", "<|message|>", spell("<|constrain|>")
    kinds = ["reasoning"] if schema is not None else ["reasoning", "preamble"]
    answer = "TEXT" if schema is None else json_term(schema)
    lines = [
        f"start: ({' | '.join(kinds)})* (answer{' | call' if tools else ''})",
        f"reasoning: {spell(f'{channel}analysis{message}')} body",
        _until("body", "<|end|><|start|>assistant", spell),
        f"answer: {spell(f'{channel}final')} format? {spell(message)} {answer}",
        f'format: " "? {constrain} "json" | " json"',
        _TEXT,
    ]
    if schema is None:
        lines.append(f"preamble: {spell(f'{channel}commentary{message}')} body")
    calls = []
    for name, parameters in tools.items():
        # The recipient is before or after the channel.
        to = _literal(f" to=functions.{name}")
        commentary = spell(f"{channel}commentary")
        arguments = json_term({"type": "object", **(parameters if name in strict else {})})
        calls.append(f"({commentary} {to} | {to} {commentary}) format? {spell(message)} {arguments}")
    if calls:
        lines.append(f"call: {' | '.join(calls)}")
    return "\n".join(lines)


def required_calls(
    tools: Mapping[str, Schema], tokens: Mapping[str, int], *, max_calls: int | None, closing: str
) -> str:
    """Return a Lark grammar for a JSON array of calls, each with `name` and `parameters`.

    Args:
        tools: JSON schema of each tool's parameters, by name.
        tokens: Markers that are a single token, with the token's id.
        max_calls: 1 for one call; None for any number.
        closing: Text that ends the reasoning that the prompt has opened; empty if there is none.
    """
    calls = []
    for name, schema in tools.items():
        opening = '{"name": ' + json.dumps(name, ensure_ascii=False) + ', "parameters": '
        calls.append(f"{_literal(opening)} {json_term(schema)} {_literal('}')}")
    more = "" if max_calls == 1 else f" ({_literal(', ')} call)*"
    lines = [f"array: {_literal('[')} call{more} {_literal(']')}", f"call: {' | '.join(calls)}"]
    if not closing:
        return "\n".join(["start: array", *lines])
    return "\n".join(["start: thinking SPACE array", *lines, _thinking(closing, Speller(tokens)), _TEXT, _SPACE])


def after_thinking(schema: Schema, closing: str, tokens: Mapping[str, int]) -> str:
    """Return a Lark grammar for the rest of the reasoning, followed by JSON that matches a schema."""
    thinking = _thinking(closing, Speller(tokens))
    return "\n".join([f"start: thinking SPACE {json_term(schema)}", thinking, _TEXT, _SPACE])


def _calls(
    grammar: CallGrammar, tools: Mapping[str, Schema], strict: Iterable[str], spell: Speller, max_calls: int | None
) -> tuple[str, str]:
    """Return the rule `call`, and the terms of a section of calls after its beginning."""
    strict = frozenset(strict)
    tagged = None if grammar.tagged is None else _Tagged(grammar.tagged, spell)
    calls = []
    for name, schema in tools.items():
        # Split before inserting the name, which may itself contain NUMBER.
        parts = [spell(part.replace("NAME", name)) for part in grammar.opening.split("NUMBER")]
        opening = " /[0-9]+/ ".join(parts)
        accepted = schema if name in strict else {}
        parameters = json_term({"type": "object", **accepted}) if tagged is None else tagged.arguments(accepted)
        calls.append(f"{opening} {parameters} {spell(grammar.closing)}".strip())
    section = "call"
    if grammar.separator is not None and max_calls != 1:
        section = f"call ({spell(grammar.separator)} call)*"
    rules = [f"call: {' | '.join(calls)}", *(tagged.rules if tagged is not None else ())]
    return "\n".join(rules), f"{section} {spell(grammar.end)}".strip()


class _Tagged:
    """Writes the terms for arguments between tags.

    Attributes:
        rules: The rules that these terms need.
    """

    def __init__(self, style: TaggedArguments, spell: Speller) -> None:
        self._style, self._spell = style, spell
        self._closing = spell(style.closing)
        before, after = (spell(part) for part in style.opening.split("KEY"))
        tags = "|".join(re.escape(tag).replace("/", "\\/") for tag in style.excluded)
        self.rules = (
            _until("string", style.closing, spell, "STRING"),
            rf"STRING: /(.|\n)*/ & ~/(.|\n)*({tags})(.|\n)*/",
            f"argument: {before} /[^<>\\n]+/ {after} string",
        )

    def arguments(self, schema: Schema) -> str:
        """Return the terms for arguments that match a schema: its properties in their order, or any arguments if it has
        no properties and does not exclude others.
        """
        properties = properties_of(schema)
        found = next(iter(alternatives(schema, schema)), None)
        if not isinstance(found, Mapping) or not properties:
            is_closed = isinstance(found, Mapping) and found.get("additionalProperties") is False
            return "" if is_closed else "argument*"
        required = found.get("required")
        names = required if isinstance(required, list) else ()
        return " ".join(
            f"({self._argument(name, property_, schema)}){'' if name in names else '?'}"
            for name, property_ in properties.items()
        )

    def _argument(self, name: str, schema: object, root: Schema) -> str:
        values = self._values(schema, root)
        value = "string" if values is None else f"({' | '.join(values)}) {self._closing}"
        return f"{self._spell(self._style.opening.replace('KEY', name))} {value}"

    def _values(self, schema: object, root: Schema) -> list[str] | None:
        """Return the alternatives for a value; None if it may be any text."""
        terms = []
        for option in alternatives(schema, root):
            if not isinstance(option, Mapping):
                return None
            listed = [option["const"]] if "const" in option else option.get("enum")
            kinds = option.get("type")
            kinds = kinds if isinstance(kinds, list) else [kinds]
            if isinstance(listed, list) and listed:
                texts = [item if isinstance(item, str) else json.dumps(item) for item in listed]
                terms += [self._spell(text) or '""' for text in texts]
            elif "string" in kinds or None in kinds:
                return None
            else:
                terms.append(json_term(_with_root(option, root)))
        return terms or None


def _with_root(schema: Schema, root: Schema) -> Schema:
    """Return a part of the schema `root` as a schema of its own, in which references still lead into `root`."""
    if not _has_references(schema):
        return schema
    whole = {"$id": _ROOT_ID, **root, "$defs": {**_definitions(root), "part of a value": schema}}
    return {"$ref": f"{whole['$id']}#/$defs/part%20of%20a%20value", "$defs": {"root": whole}}


def _definitions(root: Schema) -> Mapping[str, object]:
    found = root.get("$defs")
    return found if isinstance(found, Mapping) else {}


def lenient(schema: Schema) -> Schema:
    """Return a schema of which keywords that cannot be enforced are left out instead of being refused."""
    own = schema.get("x-guidance", {})
    return {**schema, "x-guidance": {"lenient": True, **own}} if isinstance(own, dict) else schema


def resource(schema: Schema, name: str) -> Schema:
    """Return a schema that can be part of another one: if it has references, also an identifier with which these
    begin.
    """
    return {"$id": f"urn:midstream:{name}", **schema} if _has_references(schema) else schema


def _has_references(schema: Schema) -> bool:
    return '"$ref"' in json.dumps(schema)


def _thinking(closing: str, spell: Speller) -> str:
    """Return the rule `thinking`, for reasoning up to and including its closing marker."""
    return _until("thinking", closing, spell)


def _until(rule: str, closing: str, spell: Speller, text: str = "TEXT") -> str:
    """Return a rule for text, matched by the terminal `text`, up to and including `closing`."""
    return f"{rule}{'' if spell.first_token(closing) else '[lazy]'}: {text} {spell(closing)}"


def json_term(schema: Schema) -> str:
    """Return the Lark term of JSON that matches a schema."""
    own = schema.get("x-guidance", {})
    return "%json " + json.dumps({**schema, "x-guidance": {**_STYLE, **own} if isinstance(own, dict) else own})


class Speller:
    """Writes text as Lark terms, in which marker tokens are given by id."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        marks = sorted(map(re.escape, tokens), key=len, reverse=True)
        # Without marks, the pattern must match nothing.
        self._split = re.compile("|".join(marks) or r"(?!)")

    def first_mark(self, text: str) -> str:
        """Return the special token that `text` begins with; empty if it begins with none."""
        found = self._split.match(text)
        return found[0] if found else ""

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
    # The library does not accept the control character DEL in a literal.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
