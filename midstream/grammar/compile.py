"""Compiles a guide to a matcher of allowed next tokens. This runs only in the grammar process."""

from __future__ import annotations

from pathlib import Path

import llguidance

from midstream.grammar.lexemes import to_lark
from midstream.grammar.messages import Guide
from midstream.model.tokenizer_file import read_tokenizer

# Formatting as in json.dumps; a schema can override it with `x-guidance`. If white space were flexible, a small model
# might generate nothing else.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_JSON = '{"anyOf": [{"type": "object"}, {"type": "array"}]}'


class GuideError(Exception):
    """The guide is invalid; the message says why."""


def load_tokenizer(file: Path, vocab_size: int, end_ids: list[int]) -> llguidance.LLTokenizer:
    """Return the tokenizer in a tokenizer.json, padded to the model's vocabulary. If the model has no end ids, the
    library chooses one.
    """
    return llguidance.LLTokenizer(read_tokenizer(file), n_vocab=vocab_size, eos_token=end_ids or None)


def compile_guide(guide: Guide, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """Return a matcher in its initial state. Raises GuideError if the guide is invalid or exceeds the limits."""
    try:
        matcher = llguidance.LLMatcher(tokenizer, _grammar(guide), log_level=0)
    except RecursionError:
        raise GuideError("is nested too deeply") from None
    except ValueError as error:
        raise GuideError(_short(str(error))) from None
    trial = matcher.deep_copy()
    if not trial.is_error():
        trial.compute_bitmask()
    if trial.is_error():
        raise GuideError(_short(trial.get_error()) or "no token can follow it")
    return matcher


def _grammar(guide: Guide) -> str:
    matcher = llguidance.LLMatcher
    if guide.kind == "json":
        return str(matcher.grammar_from_json_schema(_ANY_JSON, defaults=_JSON_STYLE))
    if guide.kind == "json_schema":
        return str(matcher.grammar_from_json_schema(guide.text, defaults=_JSON_STYLE))
    if guide.kind == "regex":
        return str(matcher.grammar_from_regex(guide.text))
    return str(matcher.grammar_from_lark(to_lark(guide.text)))


def _short(message: str) -> str:
    first = message.strip().partition("\n")[0]
    return first if len(first) <= 200 else first[:200] + "…"
