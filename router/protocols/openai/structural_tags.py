"""Structural tags: formats of which only some parts are restricted, as XGrammar defines them and vLLM and SGLang take
them (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html).

They become grammars in llguidance's Lark dialect. There, a lazy rule ends where its text first matches, which is how
free text ends at a trigger or at the end of its tag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.parsers.guides import Speller, json_term
from router.pipeline.request_checks import MAX_GUIDE_CHARACTERS
from router.protocols.long_json import parse_long_json
from router.protocols.openai.body import Body

_ANY = r"(.|\n)"
_MAX_DEPTH, _MAX_COUNT = 32, 1 << 16


def structural_grammar(body: Body, tokens: Mapping[str, int]) -> str:
    """Return the grammar of a structural tag, with `format` or, as in older versions, with `structures` and `triggers`.

    Args:
        tokens: Markers that are a single token, with the token's id; they are written as this token.

    Raises:
        InvalidArgumentError: The tag is invalid.
        UnsupportedError: It contains a format that is not supported.
    """
    if body.text("type") not in (None, "structural_tag"):
        raise InvalidArgumentError("must be structural_tag", field=body.path("type"))
    writer = _Writer(Speller(tokens), tokens)
    if body.fields.get("structures") is not None:
        tags = [_Tag.of_structure(item) for item in body.objects("structures")]
        term = writer.triggered(body, tags, ())
    elif (only := _child(body, "format")).text("type") == "grammar":
        return _whole_grammar(only)
    else:
        term = writer.term(only, ())
    for path, _ in body.unread():
        raise InvalidArgumentError("is not known", field=path)
    return "\n".join([f"start: {term}", *writer.rules])


def replace_structural_tag(request: pb.GenerateRequest, tokens: Mapping[str, int], field: str) -> None:
    """Replace the structural tag of a native request, if it has one, by its grammar; `field` is its name for errors.

    Raises: As in structural_grammar.
    """
    guided = request.guided_decoding
    if guided.guide_type != pb.GUIDE_TYPE_STRUCTURAL_TAG:
        return
    if len(guided.guide) > MAX_GUIDE_CHARACTERS:
        raise InvalidArgumentError(f"must be at most {MAX_GUIDE_CHARACTERS}", field=field)
    guided.guide = structural_grammar(structural_body(guided.guide, field), tokens)
    guided.guide_type = pb.GUIDE_TYPE_EBNF_GRAMMAR


def structural_body(value: object, field: str) -> Body:
    """Read a structural tag, which vLLM takes as JSON text. Raises InvalidArgumentError if it is not an object."""
    if isinstance(value, str):
        try:
            value = parse_long_json(value.encode())
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"is not JSON: {error}", field=field) from None
    if not isinstance(value, dict):
        raise InvalidArgumentError("must be an object, or its JSON text", field=field)
    return Body(value, f"{field}.")


@dataclass(frozen=True, slots=True)
class _Tag:
    """What a tag begins with, its content, and the texts of which one ends it; none if nothing does."""

    begin: str
    content: Body
    ends: tuple[str, ...]
    is_schema: bool = False

    @staticmethod
    def of(body: Body, tokens: Mapping[str, int]) -> _Tag:
        if body.text("type") not in (None, "tag"):
            raise InvalidArgumentError("must be tag", field=body.path("type"))
        begin = _token_of(body, "begin", tokens) or _text(body, "begin")
        end = _token_of(body, "end", tokens)
        return _Tag(begin, _child(body, "content"), (end,) if end else tuple(filter(None, body.texts("end"))))

    @staticmethod
    def of_structure(body: Body) -> _Tag:
        """Read a tag of the older shape, of which the content is JSON that matches `schema`."""
        return _Tag(_text(body, "begin"), body, tuple(filter(None, [_text(body, "end")])), is_schema=True)


class _Writer:
    """Writes the terms of formats.

    Each is followed by one of the texts in `ends`, which the term includes; by the end of the output if there are none;
    or by another format if `ends` is None. In the last case, free text would have no end.

    Attributes:
        rules: The rules that the terms need.
    """

    def __init__(self, spell: Speller, tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._spell = spell
        self._tokens = tokens
        self._depth = 0

    def term(self, body: Body, ends: tuple[str, ...] | None) -> str:
        """Return the term of a format."""
        kind = _text(body, "type")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise InvalidArgumentError("is nested too deeply", field=body.path("type"))
        term = self._term(kind, body, ends)
        self._depth -= 1
        return term

    def _term(self, kind: str, body: Body, ends: tuple[str, ...] | None) -> str:
        match kind:
            case "any_text":
                return self._any_text(body, ends)
            case "any_tokens":
                return self._any_tokens(body, ends)
            case "sequence":
                return self._sequence(_elements(body), ends)
            case "dispatch" | "token_dispatch":
                return self._dispatch(kind, body, ends)
            case "token_triggered_tags":
                return self._token_triggered(body, ends)
            case "or":
                return _either([self.term(element, ends) for element in _elements(body)])
            case "tag":
                return self._tag(_Tag.of(body, self._tokens), ends)
            case "triggered_tags":
                return self.triggered(body, [_Tag.of(tag, self._tokens) for tag in body.objects("tags")], ends)
            case "optional":
                return _either([self.term(_child(body, "content"), ends), self._ending(ends) or '""'])
        return _joined(self._bounded(kind, body), self._ending(ends))

    def _bounded(self, kind: str, body: Body) -> str:
        """Return the term of a format that has an end of its own."""
        match kind:
            case "const_string":
                return self._literal(_text(body, "value"))
            case "token":
                return self._spell(_marker(body, "token", self._tokens))
            case "json_schema":
                return _json(body)
            case "regex":
                pattern = _text(body, "pattern")
                return f"/{_regex(pattern)}/" if pattern else '""'
            case "star" | "plus":
                return f"({self.term(_child(body, 'content'), None)}){'*' if kind == 'star' else '+'}"
            case "repeat":
                low, high = body.integer("min", 0, _MAX_COUNT) or 0, body.integer("max", -1, _MAX_COUNT)
                if high is None or -1 < high < low:
                    raise InvalidArgumentError("must be -1, or min or more", field=body.path("max"))
                return f"({self.term(_child(body, 'content'), None)}){{{low},{'' if high == -1 else high}}}"
            case "tags_with_separator":
                tags = _either([self._tag(_Tag.of(tag, self._tokens), None) for tag in _tags(body)])
                separator = self._spell(_text(body, "separator"))
                more = "" if body.flag("stop_after_first") else f" ({_joined(separator, tags)})*"
                return f"({tags}{more}){'' if body.flag('at_least_one') else '?'}"
            case "grammar":
                raise UnsupportedError("a grammar must be the whole format", field=body.path("type"))
        raise UnsupportedError(f"{kind[:40]!r} is not supported", field=body.path("type"))

    def _sequence(self, elements: list[Body], ends: tuple[str, ...] | None) -> str:
        terms = []
        while elements:
            element, *elements = elements
            # Free text ends at a text that it excludes, and that follows it.
            if elements and elements[0].fields.get("type") == "const_string" and element.has("excludes"):
                value = elements[0].fields.get("value")
                if value and isinstance(value, str) and value in element.texts("excludes"):
                    end = (_text(elements[0], "value"),) if _text(elements[0], "type") else ()
                    elements = elements[1:]
                    following = None if elements else ends
                    terms.append(_joined(self.term(element, end), self._ending(following)))
                    continue
            terms.append(self.term(element, None if elements else ends))
        return _joined(*terms)

    def _tag(self, tag: _Tag, ends: tuple[str, ...] | None) -> str:
        return _joined(self._spell(tag.begin), self._content(tag, ends))

    def _content(self, tag: _Tag, ends: tuple[str, ...] | None) -> str:
        """Return the term of what follows a tag's beginning."""
        if tag.is_schema:
            return _joined(_json(tag.content, "schema"), self._ending(tag.ends), self._ending(ends))
        if not tag.ends:
            return self.term(tag.content, ends)
        return _joined(self.term(tag.content, tag.ends), self._ending(ends))

    def triggered(self, body: Body, tags: Sequence[_Tag], ends: tuple[str, ...] | None) -> str:
        """Return the term of free text in which each trigger begins one of `tags`.

        Raises:
            InvalidArgumentError: There is no tag, or a tag does not begin with exactly one of the triggers.
        """
        triggers = body.texts("triggers")
        if not tags or not triggers:
            raise InvalidArgumentError("must have tags and triggers", field=body.path("triggers"))
        by_trigger: dict[str, list[_Tag]] = {}
        for tag in tags:
            found = [trigger for trigger in triggers if trigger and tag.begin.startswith(trigger)]
            if len(found) != 1:
                raise InvalidArgumentError(
                    f"must have exactly one trigger with which {tag.begin[:40]!r} begins", field=body.path("triggers")
                )
            # A marker that is a single token is not cut in two.
            mark = self._spell.first_mark(tag.begin)
            trigger = mark if mark.startswith(found[0]) else found[0]
            by_trigger.setdefault(trigger, []).append(tag)
        text, excluded = self._text(body), body.texts("excludes")
        starts, stops = bool(body.flag("at_least_one")), bool(body.flag("stop_after_first"))
        first = _either([self._tag(tag, None) for tag in tags])
        if starts and stops:
            return _joined(first, self._ending(ends))
        rest = [
            _joined(
                self._trigger(text, trigger, excluded),
                _either([_joined(self._spell(tag.begin[len(trigger) :]), self._content(tag, None)) for tag in its]),
            )
            for trigger, its in by_trigger.items()
            if not _contains(trigger, excluded)
        ]
        return self._dispatched(rest, first if starts else "", self._free(body, text, ends), ends, loops=not stops)

    def _dispatched(self, calls: list[str], first: str, free: str, ends: tuple[str, ...] | None, *, loops: bool) -> str:
        """Return the term of calls that free text may precede, after `first`, and of the free text at the end."""
        if loops:
            return _joined(first, f"{_either(calls)}*" if calls else "", free)
        return _either([*([_joined(_either(calls), self._ending(ends))] if calls else []), free])

    def _dispatch(self, kind: str, body: Body, ends: tuple[str, ...] | None) -> str:
        """Return the term of free text, or tokens, in which a format follows each of some texts or tokens."""
        rules = []
        for index, item in enumerate(body.array("rules")):
            if not isinstance(item, list) or len(item) != 2 or not isinstance(item[1], dict):
                raise InvalidArgumentError("must be a pair of a text or token and a format", field=body.path("rules"))
            rule = Body({"pattern": item[0], "format": item[1]}, f"{body.path('rules')}[{index}].")
            mark = _marker(rule, "pattern", self._tokens) if kind == "token_dispatch" else _text(rule, "pattern")
            if not mark:
                raise InvalidArgumentError("must not be empty", field=rule.path("pattern"))
            if kind == "token_dispatch" and not _has_end(_child(rule, "format")):
                raise UnsupportedError(
                    "must be a const_string, an object or array, or a tag with an end, since any token may follow it",
                    field=rule.path("format"),
                )
            rules.append((mark, self.term(_child(rule, "format"), None)))
            for path, _ in rule.unread():
                raise InvalidArgumentError("is not known", field=path)
        marks = [mark for mark, _ in rules]
        if any(one.startswith(other) for one, other in permutations(marks, 2)):
            raise InvalidArgumentError("must not begin with each other", field=body.path("rules"))
        loops = body.flag("loop") is not False
        if kind == "token_dispatch":
            free = self._free_tokens(body, marks, ends)
            calls = [_joined(self._tokens_but(body, marks, ends), self._spell(mark), term) for mark, term in rules]
        else:
            text, excluded = self._text(body), body.texts("excludes")
            free = self._free(body, text, ends)
            calls = [
                _joined(self._trigger(text, mark, excluded), term)
                for mark, term in rules
                if not _contains(mark, excluded)
            ]
        return self._dispatched(calls, "", free, ends, loops=loops)

    def _token_triggered(self, body: Body, ends: tuple[str, ...] | None) -> str:
        """Return the term of free tokens in which each trigger is the beginning of a tag."""
        tags = [_Tag.of(tag, self._tokens) for tag in _tags(body)]
        triggers = [self._named(body, "trigger_tokens", item) for item in body.array("trigger_tokens")]
        for tag in tags:
            if tag.begin not in triggers:
                raise InvalidArgumentError("must be the beginnings of the tags", field=body.path("trigger_tokens"))
            if not tag.ends:
                raise UnsupportedError("must have an end, since any token may follow it", field=body.path("tags"))
        starts, stops = bool(body.flag("at_least_one")), bool(body.flag("stop_after_first"))
        first = _either([self._tag(tag, None) for tag in tags])
        free = self._free_tokens(body, triggers, ends)
        if starts and stops:
            return _joined(first, self._ending(ends))
        before = self._tokens_but(body, triggers, ends)
        calls = [_joined(before, self._tag(tag, None)) for tag in tags]
        return self._dispatched(calls, first if starts else "", free, ends, loops=not stops)

    def _any_tokens(self, body: Body, ends: tuple[str, ...] | None) -> str:
        most = body.integer("max_tokens", 0, _MAX_COUNT)
        return self._free_tokens(body, (), ends, "*" if most is None else f"{{0,{most}}}")

    def _free_tokens(self, body: Body, marks: Sequence[str], ends: tuple[str, ...] | None, count: str = "*") -> str:
        """Return the term of free tokens, with the token that ends them."""
        if ends is None or not all(end in self._tokens for end in ends):
            raise InvalidArgumentError(
                "has free tokens, which must come last, or be the content of a tag that ends with a token",
                field=body.path("type"),
            )
        return _joined(self._tokens_but(body, marks, ends, count), self._ending(ends))

    def _tokens_but(self, body: Body, marks: Sequence[str], ends: tuple[str, ...] | None, count: str = "*") -> str:
        """Return the term of tokens other than some marks, the ends, and those in `exclude_tokens`."""
        excluded = [self._named(body, "exclude_tokens", item) for item in body.array("exclude_tokens")]
        ids = sorted({self._tokens[name] for name in (*marks, *(ends or ()), *excluded)})
        listed = "^" + ",".join(map(str, ids)) if ids else "*"
        return f"<[{listed}]>{count}"

    def _named(self, body: Body, field: str, value: object) -> str:
        return _marker(Body({field: value}, body.path(field).removesuffix(field)), field, self._tokens)

    def _trigger(self, text: str, trigger: str, excluded: list[str]) -> str:
        """Return the term of free text up to a trigger; in both together, there is no excluded text."""
        if not excluded or self._spell.first_mark(trigger):
            return self._until(text, [trigger])
        name = f"trigger{len(self.rules)}"
        but = f"~/{_ANY}*({'|'.join(map(_quoted, excluded))}){_ANY}*/"
        self.rules.append(f"{name}[lazy]: {name.upper()}")
        self.rules.append(f"{name.upper()}: /{_ANY}*{_quoted(trigger)}/ & {but}")
        return name

    def _any_text(self, body: Body, ends: tuple[str, ...] | None) -> str:
        if body.has("max_tokens"):
            raise UnsupportedError("is not supported; use max_chars", field=body.path("max_tokens"))
        return self._free(body, self._text(body, body.integer("max_chars", 0, _MAX_COUNT)), ends)

    def _text(self, body: Body, most: int | None = None) -> str:
        """Return a terminal of text without the strings in `excludes`."""
        excluded = body.texts("excludes")
        name = f"TEXT{len(self.rules)}"
        condition = f" & ~/{_ANY}*({'|'.join(map(_quoted, excluded))}){_ANY}*/" if excluded else ""
        self.rules.append(f"{name}: /{_ANY}{'*' if most is None else f'{{0,{most}}}'}/{condition}")
        return name

    def _free(self, body: Body, text: str, ends: tuple[str, ...] | None) -> str:
        """Return the term of free text, with the end that follows it."""
        if ends is None:
            raise InvalidArgumentError(
                "has free text, which must come last, or be the content of a tag with an end", field=body.path("type")
            )
        return self._until(text, ends) if ends else text

    def _until(self, text: str, ends: Sequence[str]) -> str:
        """Return the term of text up to and including the first of `ends`."""
        marked = [end for end in ends if self._spell.first_mark(end)]
        options = [f"{text} {self._spell(end)}" for end in marked]
        plain = [end for end in ends if end not in marked]
        if plain:
            name = f"until{len(self.rules)}"
            self.rules.append(f"{name}[lazy]: {text} /{'|'.join(map(_quoted, plain))}/")
            options.append(name)
        return _either(options)

    def _ending(self, ends: tuple[str, ...] | None) -> str:
        return _either([self._spell(end) for end in ends]) if ends else ""

    def _literal(self, text: str) -> str:
        return self._spell(text) or '""'


def _whole_grammar(body: Body) -> str:
    """Return the grammar that is all of a format."""
    if body.choice("syntax", ("ebnf", "lark")) == "lark":
        raise UnsupportedError("must be ebnf; a request takes Lark as a grammar", field=body.path("syntax"))
    return _text(body, "grammar")


def _token_of(body: Body, name: str, tokens: Mapping[str, int]) -> str:
    """Return the token with which a tag begins or ends; empty if that is a text."""
    if not isinstance(body.fields.get(name), dict):
        return ""
    token = _child(body, name)
    if token.text("type") not in (None, "token"):
        raise InvalidArgumentError("must be token", field=token.path("type"))
    return _marker(token, "token", tokens)


def _marker(body: Body, name: str, tokens: Mapping[str, int]) -> str:
    """Return the name of an added token that is given by its name or its id."""
    value = body.get(name)
    found = value if isinstance(value, str) else next((key for key, number in tokens.items() if number == value), "")
    if isinstance(value, bool) or found not in tokens:
        raise UnsupportedError("must be the name or the id of an added token", field=body.path(name))
    return found


def _has_end(body: Body) -> bool:
    """Return whether nothing that may follow a format could also be a part of it."""
    kind, schema = body.fields.get("type"), body.fields.get("json_schema")
    if kind == "json_schema":
        return isinstance(schema, dict) and schema.get("type") in ("object", "array")
    return kind == "const_string" or (kind == "tag" and bool(body.fields.get("end")))


def _contains(text: str, others: Sequence[str]) -> bool:
    return any(other in text for other in others)


def _json(body: Body, name: str = "json_schema") -> str:
    """Return the term of JSON that matches the schema in a field."""
    schema = body.get(name)
    if isinstance(schema, bool) and name == "json_schema":
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise InvalidArgumentError("must be an object", field=body.path(name))
    if name == "schema":
        return json_term(schema)
    if body.text("style") not in (None, "json"):
        raise UnsupportedError("must be json", field=body.path("style"))
    for unsupported in ("any_order", "excludes"):
        if body.get(unsupported):
            raise UnsupportedError("is not supported", field=body.path(unsupported))
    body.integer("max_whitespace_cnt", 1)  # JSON is written with single spaces
    return json_term(schema)


def _elements(body: Body) -> list[Body]:
    found = body.objects("elements")
    if not found:
        raise InvalidArgumentError("must not be empty", field=body.path("elements"))
    return found


def _tags(body: Body) -> list[Body]:
    found = body.objects("tags")
    if not found:
        raise InvalidArgumentError("must not be empty", field=body.path("tags"))
    return found


def _child(body: Body, name: str) -> Body:
    found = body.child(name)
    if found is None:
        raise InvalidArgumentError("must be set", field=body.path(name))
    return found


def _text(body: Body, name: str) -> str:
    found = body.text(name)
    if found is None:
        raise InvalidArgumentError("must be set", field=body.path(name))
    return found


def _regex(pattern: str) -> str:
    """Return a regular expression as part of a grammar, where a slash would end it and a line break is not allowed."""
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"(?s)\\.|/|\n", lambda found: escapes.get(found[0], found[0]), pattern)


def _quoted(text: str) -> str:
    """Return the expression of one text."""
    return "".join(char if char.isalnum() and char.isascii() else rf"\x{{{ord(char):X}}}" for char in text)


def _joined(*terms: str) -> str:
    return " ".join(filter(None, terms))


def _either(terms: Sequence[str]) -> str:
    return f"({' | '.join(terms)})"
