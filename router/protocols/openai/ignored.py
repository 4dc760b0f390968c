"""Fields of OpenAI's API that are accepted and ignored; other unknown fields are rejected."""

from __future__ import annotations

import re
from collections.abc import Sequence

from midstream.errors import InvalidArgumentError
from router.protocols.openai.body import Body

# Path without indexes, and why it is ignored.
IGNORED_FIELDS = {
    "metadata": "metadata for OpenAI's dashboard",
    "prompt_cache_key": "prefixes are matched by tokens; `cache_salt` separates them",
    "tool_choice": "irrelevant without tools",
    "tools": "`tool_choice` is none",
    "response_format.json_schema": "the format has no schema",
    "response_format.json_schema.name": "schemas need no name",
    "response_format.json_schema.description": "only the schema matters",
    "response_format.json_schema.strict": "schemas always hold",
    "stream_options": "the request does not stream",
    "stream_options.include_obfuscation": "events are not padded",
    "stream_options.continuous_usage_stats": "the usage comes at the end",
    "messages.refusal": "an earlier turn's",
    "messages.annotations": "an earlier turn's",
    "messages.audio": "an earlier turn's",
    "messages.function_call": "of earlier turns only `tool_calls` is used",
    "messages.reasoning": "an earlier turn's",
    "messages.tool_calls.index": "calls are in order",
    "messages.tool_calls.type": "calls are functions",
    "messages.content.annotations": "an earlier turn's",
    "length_penalty": "without `use_beam_search`",
    "spaces_between_special_tokens": "text always follows the tokenizer",
    "add_special_tokens": "text prompts have the tokenizer's own special tokens",
}
_INDEX = re.compile(r"\[\d+\]")


def ignored_fields(body: Body) -> list[str]:
    """Return the ignored fields of a body; to be called once it has been read.

    Raises:
        InvalidArgumentError: A field is unknown.
    """
    ignored: dict[str, None] = {}
    for path in body.unread():
        name = _INDEX.sub("", path)
        if name not in IGNORED_FIELDS:
            raise InvalidArgumentError("is not a field of this endpoint; leave it out", field=path[:128])
        ignored[name] = None
    return list(ignored)


def ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    """Return the response header that names ignored fields."""
    return {"x-midstream-ignored": ", ".join(ignored)} if ignored else {}
