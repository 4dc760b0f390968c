"""Fields of OpenAI's API that are accepted and ignored; other unknown fields are rejected."""

from __future__ import annotations

import re
from collections.abc import Sequence

from midstream.errors import InvalidArgumentError
from router.protocols.openai.body import Body

# Path without indexes, and why it is ignored.
IGNORED_FIELDS = {
    "metadata": "notes for OpenAI's dashboard",
    "prompt_cache_key": "prefixes are found by their tokens; `cache_salt` separates them",
    "tool_choice": "without tools there is nothing to choose",
    "tools": "`tool_choice` is none",
    "response_format.json_schema": "the format is text or any JSON",
    "response_format.json_schema.name": "schemas need no name",
    "response_format.json_schema.description": "the schema alone counts",
    "response_format.json_schema.strict": "schemas always hold",
    "stream_options": "the request does not stream",
    "stream_options.include_obfuscation": "events are not padded",
    "stream_options.continuous_usage_stats": "the usage comes at the end",
    "messages.refusal": "an earlier turn's",
    "messages.annotations": "an earlier turn's",
    "messages.audio": "an earlier turn's",
    "messages.function_call": "an earlier turn's, `tool_calls` counts",
    "messages.reasoning": "an earlier turn's",
    "messages.tool_calls.index": "calls are in order",
    "messages.tool_calls.type": "calls are functions",
    "messages.content.annotations": "an earlier turn's",
    "length_penalty": "without `use_beam_search`",
    "spaces_between_special_tokens": "text is the tokenizer's",
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
