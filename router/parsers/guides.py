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
from dataclasses import dataclass, field
from types import MappingProxyType

from router.parsers.machine import Schema
from router.parsers.tagged_values import alternatives, properties_of

# Formatting as in json.dumps. If any white space were allowed, a small model might generate nothing else.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = r"TEXT: /(.|\n)*/"
_SPACE = r"SPACE: /\s*/"
# White space between and after sections of calls.
_ROOT_ID = "urn:midstream:root"
_GAP = r"GAP: /\s{0,2}/"
_NO_TEXT = ("null", "boolean", "number", "array", "object")


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """How a format writes arguments one by one: strings as they are, and other values as JSON.

    Attributes:
        opening: Text before a value; KEY stands for the argument's name, and IS_STRING for whether it is a string.
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
        tagged: How the arguments are written, if one by one.
        bare: Expression of the text with which a section begins at the start of the answer, where `begin` is left out;
            None if each section has its beginning.
        bare_begin: The part of `begin` that is not left out there.
        tail: Text that may follow the end of a section with its beginning.
        notation: The notation of the arguments as `x-guidance` (see json_schema/style.py), if it is not JSON.
    """

    begin: str
    opening: str
    closing: str
    separator: str | None
    end: str
    tagged: TaggedArguments | None = None
    bare: str | None = None
    bare_begin: str = ""
    tail: str = ""
    notation: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether grammars enforce all of a schema. Strings that are written as they are match no patterns."""
        return self.tagged is None and "quote" not in self.notation


def auto_guide(
    grammar: CallGrammar,
    tools: Mapping[str, Schema],
    strict: Iterable[str],
    tokens: Mapping[str, int],
    *,
    max_calls: int | None,
    thinking: tuple[str, str] | None,
    is_thinking: bool = False,
) -> str:
    """Return a Lark grammar for free text that may contain tool calls.

    Args:
        tools: JSON schema of each tool's parameters, by name.
        strict: Tools whose arguments must match their schema; others accept any object.
        tokens: Markers that are a single token, with the token's id.
        max_calls: 1 for at most one call; None for any number.
        thinking: Markers of the model's reasoning, if the model may reason first.
        is_thinking: Whether the prompt has opened the reasoning.
    """
    spell = Speller(tokens)
    calls = _calls(grammar, tools, strict, spell, max_calls)
    if grammar.bare is not None:
        answers = _bare_answer(grammar, calls, spell, thinking)
        lines = [*calls.rules, *answers, *_after_thinking("answer", spell, thinking, is_thinking=is_thinking)]
        return "\n".join(lines)
    lines = [*calls.rules, *_until("begin", grammar.begin, spell), f"section: begin {calls.section}"]
    answer = f"section{'?' if max_calls == 1 else '*'} TEXT"
    if thinking is not None and spell.has_token(thinking[0]):
        # TEXT does not match these tokens, so they are added explicitly; otherwise the model could not reason.
        answer = f"(TEXT {spell(thinking[0])})? (TEXT {spell(thinking[1])})? {answer}"
    return "\n".join([f"start: {answer}", *lines, _TEXT])


def _bare_answer(grammar: CallGrammar, calls: _Calls, spell: Speller, thinking: tuple[str, str] | None) -> list[str]:
    """Return the rules of an answer that is either a section of calls, of which the beginning may be left out, or text
    that does not begin like one and may end with one.
    """
    marks = [_pattern(mark) for mark in (grammar.begin, *(thinking or ())) if not spell.has_token(mark)]
    # One expression for all that is excluded, since the library limits the size of combined ones.
    excluded = rf"{grammar.bare}(.|\n)*" + (rf"|(.|\n)*({'|'.join(marks)})(.|\n)*" if marks else "")
    # The longest match counts. If text could begin with white space, it would include that before a call.
    text = rf"/(\S(.|\n)*)?/ & ~/{excluded}/"
    return [
        f"answer: {calls.bare} SPACE | FREE | free {calls.section} SPACE",
        *_until("free", grammar.begin, spell, "FREE"),
        f"FREE: {text}",
    ]


def _after_thinking(answer: str, spell: Speller, thinking: tuple[str, str] | None, *, is_thinking: bool) -> list[str]:
    """Return the rules for the rule `answer`, after any reasoning."""
    if thinking is None:
        return [f"start: {answer}", _TEXT, _SPACE]
    opening, closing = thinking
    start = f"thinking SPACE {answer}" if is_thinking else f"({spell(opening)} thinking SPACE)? {answer}"
    return [f"start: {start}", *_until("thinking", closing, spell), _TEXT, _SPACE]


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
    calls = _calls(grammar, tools, strict, spell, max_calls)
    sections = "section GAP" if max_calls == 1 else "section (GAP section)* GAP"
    section = f"section: {spell(grammar.begin)} {calls.section}"
    lines = [f"answer: {sections} | {json_term(schema)}", *calls.rules, section, _GAP]
    return "\n".join([*lines, *_after_thinking("answer", spell, thinking, is_thinking=is_thinking)])


def channels_guide(
    tools: Mapping[str, Schema],
    strict: Iterable[str],
    schema: Schema | None,
    tokens: Mapping[str, int],
    *,
    requires_call: bool = False,
) -> str:
    """Return a Lark grammar for the messages of gpt-oss, which writes reasoning, calls and the answer in channels: any
    reasoning, then either a call or the answer; only a call with `requires_call`. A call ends the output.

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
    ends = ["call"] if requires_call else ["answer", "call"] if tools else ["answer"]
    lines = [
        f"start: ({' | '.join(kinds)})* ({' | '.join(ends)})",
        f"reasoning: {spell(f'{channel}analysis{message}')} body",
        *_until("body", "<|end|><|start|>assistant", spell),
        f'format: " "? {constrain} "json" | " json"',
        _TEXT,
    ]
    if not requires_call:
        lines.append(f"answer: {spell(f'{channel}final')} format? {spell(message)} {answer}")
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
    thinking = _until("thinking", closing, Speller(tokens))
    return "\n".join(["start: thinking SPACE array", *lines, *thinking, _TEXT, _SPACE])


def after_thinking(schema: Schema, closing: str, tokens: Mapping[str, int]) -> str:
    """Return a Lark grammar for the rest of the reasoning, followed by JSON that matches a schema."""
    thinking = _until("thinking", closing, Speller(tokens))
    return "\n".join([f"start: thinking SPACE {json_term(schema)}", *thinking, _TEXT, _SPACE])


@dataclass(frozen=True, slots=True)
class _Calls:
    """The grammar of a section of calls.

    Attributes:
        rules: The rules that the terms need.
        section: Terms of a section after its beginning.
        bare: Terms of a section that begins with `bare_begin`.
    """

    rules: list[str]
    section: str
    bare: str


def _calls(
    grammar: CallGrammar, tools: Mapping[str, Schema], strict: Iterable[str], spell: Speller, max_calls: int | None
) -> _Calls:
    strict = frozenset(strict)
    tagged = None if grammar.tagged is None else _Tagged(grammar.tagged, spell)
    notation = dict(grammar.notation)
    if "quote" in notation:
        notation["quote"] = spell.token(str(notation["quote"])) or notation["quote"]
    first, calls = list[str](), list[str]()
    for name, schema in tools.items():
        accepted = schema if name in strict else {}
        arguments = {"type": "object", **accepted}
        parameters = json_term(arguments, notation) if tagged is None else tagged.arguments(accepted)
        for options, begin in ((calls, ""), (first, grammar.bare_begin)):
            # Split before inserting the name, which may itself contain NUMBER.
            parts = [spell(part.replace("NAME", name)) for part in (begin + grammar.opening).split("NUMBER")]
            options.append(f"{' /[0-9]+/ '.join(parts)} {parameters} {spell(grammar.closing)}".strip())
    rules = [f"call: {' | '.join(calls)}", *(tagged.rules if tagged is not None else ())]
    if grammar.bare is not None:
        rules.append(f"first: {' | '.join(first)}")
    more = "" if grammar.separator is None or max_calls == 1 else f" ({spell(grammar.separator)} call)*"
    tail = f"({spell(grammar.tail)})?" if grammar.tail else ""
    end = f"{more} {spell(grammar.end)}"
    return _Calls(rules, f"call{end} {tail}".rstrip(), f"first{end}")


class _Tagged:
    """Writes the terms for arguments between tags.

    Attributes:
        rules: The rules that these terms need.
    """

    def __init__(self, style: TaggedArguments, spell: Speller) -> None:
        self._style, self._spell = style, spell
        # Text matches no token, so that tags with one need not be excluded.
        tags = "|".join(_pattern(tag) for tag in style.excluded if not spell.has_token(tag))
        without = rf" & ~/(.|\n)*({tags})(.|\n)*/" if tags else ""
        openings = [style.opening.replace("IS_STRING", kind) for kind in ("true", "false")]
        parts = ([spell(part) for part in opening.split("KEY")] for opening in dict.fromkeys(openings))
        names = [rf'{before} /[^<>"\n]+/ {after}' for before, after in parts]
        self.rules = (
            *_until("string", style.closing, spell, "STRING"),
            rf"STRING: /(.|\n)*/{without}",
            f"argument: ({' | '.join(names)}) string",
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
        texts, values = self._values(schema, root)
        if "IS_STRING" not in self._style.opening:
            # Text includes all other values.
            texts, values = (None, []) if texts is None else ([*texts, *values], [])
        options = []
        if texts is None:
            options.append(f"{self._opening(name, 'true')} string")
        for kind, terms in (("true", texts), ("false", values)):
            if terms:
                options.append(f"{self._opening(name, kind)} ({' | '.join(terms)}) {self._closing}")
        return " | ".join(options)

    @property
    def _closing(self) -> str:
        return self._spell(self._style.closing)

    def _opening(self, name: str, is_string: str) -> str:
        return self._spell(self._style.opening.replace("IS_STRING", is_string).replace("KEY", name))

    def _values(self, schema: object, root: Schema) -> tuple[list[str] | None, list[str]]:
        """Return the alternatives for a value that is a text, or None if it may be any text; and those for others."""
        texts: list[str] | None = []
        values: list[str] = []
        for option in alternatives(schema, root):
            if not isinstance(option, Mapping):
                return None, [json_term({"type": [*_NO_TEXT]})]
            listed = [option["const"]] if "const" in option else option.get("enum")
            kinds = option.get("type", [*_NO_TEXT, "string"])
            kinds = kinds if isinstance(kinds, list) else [kinds]
            if isinstance(listed, list) and listed:
                if texts is not None:
                    texts += [self._spell(item) or '""' for item in listed if isinstance(item, str)]
                values += [self._spell(json.dumps(item)) for item in listed if not isinstance(item, str)]
                continue
            if "string" in kinds:
                texts = None
            others = [kind for kind in kinds if kind != "string"]
            if others:
                values.append(json_term(_with_root({**option, "type": others}, root)))
        return texts, values


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


def _until(rule: str, closing: str, spell: Speller, text: str = "TEXT") -> list[str]:
    """Return the rules for text, matched by the terminal `text`, up to and including `closing`."""
    if not spell.has_token(closing):
        return [f"{rule}[lazy]: {text} {spell(closing)}"]
    before, rest = spell.split(closing)
    if not before:
        return [f"{rule}: {text} {spell(rest)}"]
    # Text ends where the token comes, so it must end with what precedes the token in the marker.
    name = f"{rule.upper()}HEAD"
    return [f"{rule}: {name} {spell(rest)}", rf"{name}: {text} & /(.|\n)*{_pattern(before)}/"]


def _pattern(text: str) -> str:
    """Return the expression of a text."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def json_term(schema: Schema, notation: Mapping[str, object] = MappingProxyType({})) -> str:
    """Return the Lark term of values that match a schema, as JSON or in a notation."""
    own = schema.get("x-guidance", {})
    style = {**_STYLE, **notation, **own} if isinstance(own, dict) else own
    return "%json " + json.dumps({**schema, "x-guidance": style})


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

    def token(self, text: str) -> int | None:
        """Return the id of the special token that `text` is."""
        return self._tokens.get(text)

    def has_token(self, text: str) -> bool:
        """Return whether a special token is in `text`."""
        return self._split.search(text) is not None

    def split(self, text: str) -> tuple[str, str]:
        """Return the part before the first special token, and the rest."""
        found = self._split.search(text)
        start = found.start() if found else len(text)
        return text[:start], text[start:]

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
