"""Prepares a tokenizer for the grammar library, so that text is always spelled in ordinary tokens.

The library treats added tokens in angle brackets as special, others as text. Text that a grammar prescribes would then
be cut off where it spells the former, or be written with the latter, which end the output or have another meaning to
the model. So all added tokens get names that no text contains; grammars refer to them by id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

# The library treats a token with such a name as special.
_NAME = "<|\x10{}|>"
# Parts of a Lark grammar: comments, texts, expressions and names of tokens.
_PARTS = re.compile(r'//[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|<[^<>\s\[\]]+>')


def hide_added_tokens(tokenizer: str) -> tuple[str, dict[str, int]]:
    """Return a tokenizer.json with other names for its added tokens, and their ids by their own names."""
    fields = json.loads(tokenizer)
    added = [token for token in fields.get("added_tokens") or [] if isinstance(token, dict)]
    ids = {str(token["content"]): int(token["id"]) for token in added}
    names = {name: _NAME.format(number) for name, number in ids.items()}
    for token in added:
        token["content"] = names[str(token["content"])]
    model = fields.get("model") or {}
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(name, name): number for name, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # tokens with scores
        for item in vocabulary:
            if isinstance(item, list) and item and item[0] in names:
                item[0] = names[item[0]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(fields, ensure_ascii=False), ids


def name_by_id(lark: str, ids: Mapping[str, int]) -> str:
    """Return a Lark grammar in which added tokens are named by their ids."""

    def named(found: re.Match[str]) -> str:
        number = ids.get(found[0])
        return found[0] if number is None else f"<[{number}]>"

    return _PARTS.sub(named, lark)
