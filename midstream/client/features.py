"""Request options besides sampling: guided decoding, speculative decoding, and retention of KV blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from midstream.client.request import naming, set_fields
from midstream.errors import InvalidArgumentError
from protos import generation_pb2 as pb

_METHODS: dict[str, pb.SpeculativeConfig.Method.ValueType] = {
    "prompt_lookup": pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP,
    "draft_model": pb.SpeculativeConfig.METHOD_DRAFT_MODEL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """Constraint on the output's format; set exactly one field.

    Attributes:
        json: If True, any JSON object or array.
        json_schema: A JSON schema, as text or as a mapping.
        regex: A regular expression.
        ebnf: A grammar.
        structural_tag: A structural tag of XGrammar, as text or as a mapping.
    """

    json: bool = False
    json_schema: str | Mapping[str, object] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | Mapping[str, object] | None = None

    def to_proto(self) -> pb.GuidedDecodingConfig:
        """Return the message.

        Raises:
            InvalidArgumentError: Not exactly one is set, or a value has the wrong type.
        """
        with naming("guided"):
            found = one_guide(self.json, self.json_schema, self.regex, self.ebnf, self.structural_tag)
        if found is None:
            raise InvalidArgumentError(
                "set exactly one of json, json_schema, regex, ebnf and structural_tag", field="guided"
            )
        return found


def one_guide(
    is_json: bool,
    schema: str | Mapping[str, object] | None,
    regex: str | None,
    ebnf: str | None,
    tag: str | Mapping[str, object] | None = None,
) -> pb.GuidedDecodingConfig | None:
    """Return the message for the only guide that is set; None if not exactly one is set."""
    guides = [
        (pb.GUIDE_TYPE_JSON, "" if is_json else None),
        (pb.GUIDE_TYPE_JSON_SCHEMA, schema if isinstance(schema, str | None) else json.dumps(schema)),
        (pb.GUIDE_TYPE_REGEX, regex),
        (pb.GUIDE_TYPE_EBNF_GRAMMAR, ebnf),
        (pb.GUIDE_TYPE_STRUCTURAL_TAG, tag if isinstance(tag, str | None) else json.dumps(tag)),
    ]
    chosen = [pb.GuidedDecodingConfig(guide_type=kind, guide=guide) for kind, guide in guides if guide is not None]
    return chosen[0] if len(chosen) == 1 else None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Speculative decoding.

    Attributes:
        method: `prompt_lookup` proposes the tokens that followed an earlier occurrence of the last tokens;
            `draft_model` uses the workers' draft model.
        num_draft_tokens: Number of draft tokens that a step verifies, 1..16.
        max_ngram_size: Maximum number of last tokens that prompt lookup matches; None means 3.
    """

    method: Literal["prompt_lookup", "draft_model"] = "prompt_lookup"
    num_draft_tokens: int = 4
    max_ngram_size: int | None = None

    def to_proto(self) -> pb.SpeculativeConfig:
        """Return the message.

        Raises:
            InvalidArgumentError: A value is invalid for its field.
        """
        if self.method not in _METHODS:
            raise InvalidArgumentError(f"must be one of {', '.join(_METHODS)}", field="speculative")
        config = pb.SpeculativeConfig(method=_METHODS[self.method])
        set_fields(config, num_draft_tokens=self.num_draft_tokens, max_ngram_size=self.max_ngram_size)
        return config


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Retention of the blocks with prompt tokens [start, end).

    Attributes:
        start: First token.
        end: One past the last token; None means the end of the prompt.
        priority: 0..100; the lowest is evicted first; the default is 35.
        duration_ms: How long the priority applies; None means until the block is evicted.
    """

    start: int = 0
    end: int | None = None
    priority: int = 35
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class KvRetention:
    """Retention of cached blocks.

    Attributes:
        token_ranges: Ranges of the prompt.
        decode_priority, decode_duration_ms: Priority and its duration for blocks of generated tokens.
    """

    token_ranges: Sequence[TokenRange] = ()
    decode_priority: int | None = None
    decode_duration_ms: int | None = None

    def to_proto(self) -> pb.KvRetentionConfig:
        """Return the message.

        Raises:
            InvalidArgumentError: A value is invalid for its field.
        """
        config = pb.KvRetentionConfig()
        with naming("kv_retention"):
            for item in self.token_ranges:
                config.token_ranges.add(
                    start=item.start, end=item.end, priority=item.priority, duration_ms=item.duration_ms
                )
        set_fields(config, decode_priority=self.decode_priority, decode_duration_ms=self.decode_duration_ms)
        return config
