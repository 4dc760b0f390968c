"""The parts of TensorRT-LLM's `Request`. Parts for features that the service lacks can be created, as in a program that
passes them on; a request that has one is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from json import dumps
from typing import ClassVar

from midstream.client.features import Drafts
from midstream.client.request import naming
from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.executor.enums import KvCacheTransferMode
from midstream.executor.tensors import AnyTensor
from protos import generation_pb2 as pb

_KEEP_PRIORITY = 100
_MAX_DRAFT_TOKENS = 16


@dataclass(slots=True)
class ExternalDraftTokensConfig:
    """Draft tokens of the client.

    Attributes:
        tokens: The drafts: the tokens that the output is expected to begin with. They change only the speed.
        logits: Logits of the drafts [tokens, vocab_size]; without effect, since drafts are verified by the model alone.
        acceptance_threshold: Above 0 and at most 1; without effect for the same reason.
        fast_logits: How logits are transferred; without effect.
    """

    tokens: Sequence[int]
    logits: AnyTensor | None = None
    acceptance_threshold: float | None = None
    fast_logits: bool | None = None

    def to_proto(self) -> pb.SpeculativeConfig:
        """Return the message."""
        drafts = Drafts("prompt_lookup", max(1, min(len(self.tokens), _MAX_DRAFT_TOKENS))).to_proto()
        with naming("external_draft_tokens_config"):
            drafts.prediction_token_ids.extend(self.tokens)
        return drafts


@dataclass(slots=True)
class LookaheadDecodingConfig:
    """Lookahead decoding, for which the service uses prompt lookup; both change only the speed.

    Attributes:
        max_window_size, max_verification_set_size: Without effect.
        max_ngram_size: Maximum number of last tokens to match.
    """

    max_window_size: int = 4
    max_ngram_size: int = 3
    max_verification_set_size: int = 4

    @staticmethod
    def get_default_lookahead_decoding_window() -> int:
        """Return the default of max_window_size."""
        return 4

    @staticmethod
    def get_default_lookahead_decoding_ngram() -> int:
        """Return the default of max_ngram_size."""
        return 3

    @staticmethod
    def get_default_lookahead_decoding_verification_set() -> int:
        """Return the default of max_verification_set_size."""
        return 4

    def calculate_speculative_resource(self) -> tuple[int, int, int, int]:
        """Return the maximum numbers of decoding tokens, tokens of a path, draft tokens, and drafts of a path."""
        return self.calculate_speculative_resource_tuple(
            self.max_window_size, self.max_ngram_size, self.max_verification_set_size
        )

    @staticmethod
    def calculate_speculative_resource_tuple(
        window_size: int, ngram_size: int, verification_set_size: int
    ) -> tuple[int, int, int, int]:
        """Return the same for three sizes."""
        verified = max(ngram_size - 2, 0)
        num_drafts = verified + (window_size + verification_set_size - 1) * (ngram_size - 1)
        return num_drafts + 1, ngram_size, num_drafts, ngram_size - 1

    def to_proto(self) -> pb.SpeculativeConfig:
        """Return the message."""
        return Drafts("prompt_lookup", max_ngram_size=self.max_ngram_size).to_proto()


@dataclass(frozen=True, slots=True)
class NGramDecodingConfig:
    """Prompt lookup: drafts are the tokens that followed an earlier occurrence of the last tokens.

    Attributes:
        max_draft_len: Number of draft tokens per step, 1..16.
        max_matching_ngram_size: Maximum number of last tokens to match.
    """

    max_draft_len: int = 4
    max_matching_ngram_size: int = 3

    def to_proto(self) -> pb.SpeculativeConfig:
        """Return the message."""
        return Drafts("prompt_lookup", self.max_draft_len, self.max_matching_ngram_size).to_proto()


@dataclass(frozen=True, slots=True)
class DraftTargetDecodingConfig:
    """Drafts proposed by the workers' draft model, 1 to 16 tokens per step."""

    max_draft_len: int = 4

    def to_proto(self) -> pb.SpeculativeConfig:
        """Return the message."""
        return Drafts("draft_model", self.max_draft_len).to_proto()


@dataclass(slots=True)
class EagleConfig:
    """EAGLE's heads, which the service lacks."""

    eagle_choices: Sequence[Sequence[int]] | None = None
    greedy_sampling: bool = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = None  # noqa: N815 (TensorRT-LLM's name)


@dataclass(slots=True, eq=False)
class PromptTuningConfig:
    """Virtual tokens.

    Attributes:
        embedding_table: Embeddings [count, hidden size]. Token id vocabulary size + i in the prompt stands for row i; a
            prompt without such ids begins with all rows.
        input_token_extra_ids: One number per prompt token, which distinguishes virtual tokens of different tables;
            without effect, since cached blocks are told apart by the table's contents.
    """

    embedding_table: AnyTensor
    input_token_extra_ids: Sequence[int] | None = None


@dataclass(slots=True)
class MultimodalInput:
    """Hashes of multimodal items, with their positions and lengths in the prompt; without effect, since cached blocks
    are told apart by the embeddings' contents.
    """

    multimodal_hashes: Sequence[Sequence[int]]
    multimodal_positions: Sequence[int]
    multimodal_lengths: Sequence[int]


@dataclass(slots=True, eq=False)
class MropeConfig:
    """Rotary embeddings of multimodal positions, which the service computes itself."""

    mrope_rotary_cos_sin: AnyTensor
    mrope_position_deltas: int | AnyTensor


@dataclass(slots=True, eq=False)
class LoraConfig:
    """A LoRA adapter.

    Attributes:
        task_id: Number of the adapter. Without weights, an earlier request has given them, or the adapter is loaded
            under this number as its name.
        weights: TensorRT-LLM's weights [modules, values]: for each module of a layer its A [rank, inputs] and
            B [outputs, rank], flattened.
        config: For each row of `weights`: number of the module, layer, rank.
    """

    task_id: int
    weights: AnyTensor | None = None
    config: AnyTensor | None = None

    def __post_init__(self) -> None:
        if (self.weights is None) != (self.config is None):
            raise InvalidArgumentError("must be given together with config", field="weights")


@dataclass(slots=True)
class ContextPhaseParams:
    """The state of a request whose prompt another executor has computed.

    Attributes:
        first_gen_tokens: The first token, which that executor has generated.
        req_id: Id of the request there.
        opaque_state: Must be None, since KV blocks are not transferred.
        draft_tokens: Without effect, since drafts never change the output.
    """

    first_gen_tokens: Sequence[int]
    req_id: int
    opaque_state: bytes | None = None
    draft_tokens: Sequence[int] | None = None


@dataclass(slots=True)
class _TokenRangeRetentionConfig:
    """Retention of the cached blocks of a range of the prompt.

    Attributes:
        token_start: First token.
        token_end: One past the last token; None means the end of the prompt.
        priority: 0..100; blocks of lower priority are evicted first.
        duration_ms: How long the priority applies; None means until the block is evicted.
    """

    token_start: int
    token_end: int | None = None
    priority: int = 35
    duration_ms: timedelta | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= _KEEP_PRIORITY:
            raise InvalidArgumentError(f"is {self.priority}; must be at least 0 and at most 100", field="priority")


@dataclass(slots=True, init=False)
class KvCacheRetentionConfig:
    """Cached blocks to keep for longer: those of ranges of the prompt, and of generated tokens."""

    TokenRangeRetentionConfig: ClassVar[type[_TokenRangeRetentionConfig]] = _TokenRangeRetentionConfig

    token_range_retention_configs: Sequence[_TokenRangeRetentionConfig]
    decode_retention_priority: int
    decode_duration_ms: timedelta | None
    transfer_mode: KvCacheTransferMode
    directory: str

    def __init__(
        self,
        token_range_retention_configs: Sequence[_TokenRangeRetentionConfig] = (),
        decode_retention_priority: int = 35,
        decode_duration_ms: timedelta | None = None,
        transfer_mode: KvCacheTransferMode = KvCacheTransferMode.DRAM,
        directory: str = "",
        *,
        max_tokens: int | None = None,
    ) -> None:
        """Store the settings.

        Args:
            token_range_retention_configs: Ranges, which must not overlap.
            decode_retention_priority: Priority of blocks of generated tokens.
            decode_duration_ms: How long that applies; None means until the block is evicted.
            transfer_mode, directory: Where blocks are offloaded to; only DRAM is supported.
            max_tokens: Keep the blocks of this number of first tokens, as the highest priority.

        Raises:
            InvalidArgumentError: Ranges overlap.
        """
        ranges = list(token_range_retention_configs)
        if max_tokens is not None:
            ranges.append(_TokenRangeRetentionConfig(0, max_tokens, _KEEP_PRIORITY))
        _check_disjoint(ranges)
        self.token_range_retention_configs = ranges
        self.decode_retention_priority = decode_retention_priority
        self.decode_duration_ms = decode_duration_ms
        self.transfer_mode = transfer_mode
        self.directory = directory

    def to_proto(self) -> pb.KvRetentionConfig:
        """Return the message.

        Raises:
            UnsupportedError: Blocks are to be offloaded to files.
        """
        if self.transfer_mode is not KvCacheTransferMode.DRAM:
            raise UnsupportedError("blocks are offloaded to host memory only; use DRAM", field="transfer_mode")
        config = pb.KvRetentionConfig(
            decode_priority=self.decode_retention_priority, decode_duration_ms=milliseconds(self.decode_duration_ms)
        )
        for item in self.token_range_retention_configs:
            config.token_ranges.add(
                start=item.token_start,
                end=item.token_end,
                priority=item.priority,
                duration_ms=milliseconds(item.duration_ms),
            )
        return config


def _check_disjoint(ranges: Sequence[_TokenRangeRetentionConfig]) -> None:
    ordered = sorted(ranges, key=lambda item: item.token_start)
    for first, second in itertools.pairwise(ordered):
        if first.token_end is None or first.token_end > second.token_start:
            raise InvalidArgumentError("ranges must not overlap", field="token_range_retention_configs")


def milliseconds(duration: timedelta | float | None) -> int | None:
    """Return a duration, or a number of milliseconds, as a number of milliseconds."""
    if isinstance(duration, timedelta):
        return duration // timedelta(milliseconds=1)
    return None if duration is None else int(duration)


class _GuideType(IntEnum):
    """What the guide is."""

    JSON = 0
    JSON_SCHEMA = 1
    REGEX = 2
    EBNF_GRAMMAR = 3
    STRUCTURAL_TAG = 4


_GUIDE_TYPES = {
    _GuideType.JSON: pb.GUIDE_TYPE_JSON,
    _GuideType.JSON_SCHEMA: pb.GUIDE_TYPE_JSON_SCHEMA,
    _GuideType.REGEX: pb.GUIDE_TYPE_REGEX,
    _GuideType.EBNF_GRAMMAR: pb.GUIDE_TYPE_EBNF_GRAMMAR,
    _GuideType.STRUCTURAL_TAG: pb.GUIDE_TYPE_STRUCTURAL_TAG,
}


@dataclass(slots=True, init=False)
class GuidedDecodingParams:
    """A constraint on the output."""

    GuideType: ClassVar[type[_GuideType]] = _GuideType

    guide_type: _GuideType
    guide: str | None

    def __init__(
        self,
        guide_type: _GuideType | None = None,
        guide: str | None = None,
        *,
        json: str | Mapping[str, object] | None = None,
        json_object: bool = False,
        regex: str | None = None,
        grammar: str | None = None,
        structural_tag: str | Mapping[str, object] | None = None,
    ) -> None:
        """Store the constraint, in the form of TensorRT-LLM's executor or, with named arguments, of its LLM API.

        Args:
            guide_type: Kind of constraint.
            guide: The JSON schema, regular expression, grammar or structural tag; None for any JSON.
            json: A JSON schema.
            json_object: Whether to accept any JSON object or array.
            regex: A regular expression.
            grammar: A grammar in EBNF.
            structural_tag: A structural tag.

        Raises:
            InvalidArgumentError: Not exactly one constraint is given, or its guide is missing.
        """
        given = [
            (guide_type, guide) if guide_type is not None else None,
            (_GuideType.JSON, None) if json_object else None,
            (_GuideType.JSON_SCHEMA, _as_json(json)) if json is not None else None,
            (_GuideType.REGEX, regex) if regex is not None else None,
            (_GuideType.EBNF_GRAMMAR, grammar) if grammar is not None else None,
            (_GuideType.STRUCTURAL_TAG, _as_json(structural_tag)) if structural_tag is not None else None,
        ]
        chosen = [item for item in given if item is not None]
        if len(chosen) != 1:
            raise InvalidArgumentError(
                "set exactly one of guide_type, json, json_object, regex, grammar and structural_tag",
                field="guided_decoding",
            )
        self.guide_type, self.guide = chosen[0]
        if self.guide is None and self.guide_type is not _GuideType.JSON:
            raise InvalidArgumentError(f"must be given for {self.guide_type.name}", field="guide")

    def to_proto(self) -> pb.GuidedDecodingConfig:
        """Return the message."""
        return pb.GuidedDecodingConfig(guide_type=_GUIDE_TYPES[self.guide_type], guide=self.guide or "")


def _as_json(schema: str | Mapping[str, object]) -> str:
    if isinstance(schema, str):
        return schema
    with naming("guided_decoding"):
        return dumps(schema)
