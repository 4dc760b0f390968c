"""Compiles a guide to a matcher of allowed next tokens. This runs only in the grammar process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import llguidance

from midstream.grammar.json_schema.errors import SchemaError
from midstream.grammar.lexemes import to_lark
from midstream.grammar.messages import Guide
from midstream.grammar.tokens import hide_added_tokens, name_by_id
from midstream.model.tokenizer_file import read_tokenizer

_ANY_JSON = '{"anyOf": [{"type": "object"}, {"type": "array"}]}'
_JSON_TERM = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(%json)\s+')
_Matcher = llguidance.LLMatcher


class GuideError(Exception):
    """The guide is invalid; the message says why."""


@dataclass(frozen=True, slots=True)
class GuideTokenizer:
    """A tokenizer for the library.

    Attributes:
        library: The library's tokenizer.
        ids: Ids of the added tokens, by name.
    """

    library: llguidance.LLTokenizer
    ids: dict[str, int]

    def tokenize_str(self, text: str) -> list[int]:
        """Return the tokens of a text; names of added tokens stand for these tokens."""
        names = sorted(map(re.escape, self.ids), key=len, reverse=True)
        parts = re.split(f"({'|'.join(names)})" if names else r"((?!))", text)
        return [
            token
            for part in parts
            for token in ([self.ids[part]] if part in self.ids else self.library.tokenize_str(part))
        ]


def load_tokenizer(file: Path, vocab_size: int, end_ids: list[int]) -> GuideTokenizer:
    """Return the tokenizer in a tokenizer.json, padded to the model's vocabulary. If the model has no end ids, the
    library chooses one.
    """
    text, ids = hide_added_tokens(read_tokenizer(file))
    return GuideTokenizer(llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=end_ids or None), ids)


def compile_guide(guide: Guide, tokenizer: GuideTokenizer) -> llguidance.LLMatcher:
    """Return a matcher in its initial state. Raises GuideError if the guide is invalid or exceeds the limits."""
    try:
        matcher = _Matcher(tokenizer.library, _grammar(guide, tokenizer), log_level=0)
    except RecursionError:
        raise GuideError("is nested too deeply") from None
    except (SchemaError, ValueError) as error:
        raise GuideError(_short(str(error))) from None
    trial = matcher.deep_copy()
    if not trial.is_error():
        trial.compute_bitmask()
    if trial.is_error():
        raise GuideError(_short(trial.get_error()) or "no token can follow it")
    return matcher


def _grammar(guide: Guide, tokenizer: GuideTokenizer) -> str:
    if guide.kind == "regex":
        return str(_Matcher.grammar_from_regex(guide.text))
    if guide.kind in ("json", "json_schema"):
        from midstream.grammar.json_schema.compile import JSON_TERM, schema_term  # loaded only when it is needed
        from midstream.grammar.json_schema.document import read_whole

        schema = read_whole(_ANY_JSON if guide.kind == "json" else guide.text)
        term, rules = schema_term(schema, "json", tokenizer.library)
        if term.startswith(JSON_TERM):
            # The library takes 0.5 ms of processor time for the shortest grammar in Lark.
            return str(_Matcher.grammar_from_json_schema(term.removeprefix(JSON_TERM)))
        lark = "\n".join([f"start: {term}", *rules])
    else:
        lark = _with_schemas(name_by_id(to_lark(guide.text, tokenizer.ids), tokenizer.ids), tokenizer.library)
    return str(_Matcher.grammar_from_lark(lark))


def _with_schemas(lark: str, library: llguidance.LLTokenizer) -> str:
    """Return a Lark grammar in which rules replace its JSON schemas. Raises SchemaError if one cannot be enforced."""
    if "%json" not in lark:
        return lark
    from midstream.grammar.json_schema.compile import schema_term
    from midstream.grammar.json_schema.document import read_json

    parts, rules, position = [], list[str](), 0
    known: dict[str, str] = {}
    while (found := _JSON_TERM.search(lark, position)) is not None:
        parts.append(lark[position : found.start()])
        position = found.end()
        if found[1] is None:
            parts.append(found[0])
            continue
        value, position = read_json(lark, found.end())
        schema = lark[found.end() : position]
        if schema not in known:
            known[schema], lines = schema_term(value, f"json{len(known)}x", library)
            rules += lines
        parts.append(known[schema])
    return "\n".join(["".join(parts) + lark[position:], *rules])


def _short(message: str) -> str:
    first = message.strip().partition("\n")[0]
    return first if len(first) <= 200 else first[:200] + "…"
