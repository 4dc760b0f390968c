"""TensorRT-LLM's `Response` and `Result`, which an executor returns from `await_responses`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, overload

from midstream.chunk import PerfMetrics, Usage, Validation
from midstream.errors import InvalidArgumentError
from midstream.executor.enums import FinishReason
from midstream.executor.output_config import AdditionalOutput
from midstream.executor.request_parts import ContextPhaseParams
from midstream.executor.tensors import AnyTensor, to_user
from midstream.extras import Tensor


@dataclass(slots=True)
class TimingMetrics:
    """Times since the Unix epoch; zero if the event did not happen. KV blocks are never transferred."""

    arrival_time: timedelta = timedelta()
    first_scheduled_time: timedelta = timedelta()
    first_token_time: timedelta = timedelta()
    last_token_time: timedelta = timedelta()
    kv_cache_transfer_start: timedelta = timedelta()
    kv_cache_transfer_end: timedelta = timedelta()
    kv_cache_size: int = 0


@dataclass(slots=True)
class KvCacheMetrics:
    """Numbers of KV blocks of a request: newly allocated, reused from the cache, and not found there."""

    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0
    kv_cache_hit_rate: float = 0.0


@dataclass(slots=True)
class SpeculativeDecodingMetrics:
    """Drafts of a request."""

    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass(slots=True)
class RequestPerfMetrics:
    """Performance of a request. `iter` counts the request's own steps, from 0."""

    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    speculative_decoding: SpeculativeDecodingMetrics = field(default_factory=SpeculativeDecodingMetrics)
    first_iter: int | None = None
    last_iter: int | None = None
    iter: int | None = None

    @staticmethod
    def from_service(found: PerfMetrics, usage: Usage | None, tokens_per_block: int) -> RequestPerfMetrics:
        """Build this from the service's metrics of an ended request."""
        drafts, accepted = found.num_draft_tokens, found.num_accepted_tokens
        return RequestPerfMetrics(
            TimingMetrics(
                arrival_time=_time(found.arrival_unix_ns),
                first_scheduled_time=_time(found.first_scheduled_unix_ns),
                first_token_time=_time(found.first_token_unix_ns),
                last_token_time=_time(found.last_token_unix_ns),
            ),
            _kv_metrics(usage, tokens_per_block),
            SpeculativeDecodingMetrics(accepted / drafts if drafts else 0.0, accepted, drafts),
            first_iter=0,
            last_iter=max(found.num_steps - 1, 0),
            iter=max(found.num_steps - 1, 0),
        )


def _time(unix_ns: int) -> timedelta:
    return timedelta(microseconds=unix_ns / 1000)


def _kv_metrics(usage: Usage | None, tokens_per_block: int) -> KvCacheMetrics:
    if usage is None:
        return KvCacheMetrics()
    blocks = -(-(usage.prompt_tokens + usage.completion_tokens) // tokens_per_block)
    reused = usage.cached_tokens // tokens_per_block
    missed = -(-usage.prompt_tokens // tokens_per_block) - reused
    return KvCacheMetrics(blocks - reused, blocks - reused, reused, missed, reused / max(reused + missed, 1))


@dataclass(slots=True)
class SpeculativeDecodingFastLogitsInfo:
    """Which process sends a draft model's logits; never set."""

    draft_request_id: int = 0
    draft_participant_id: int = 0

    def to_tensor(self) -> AnyTensor:
        """Return the memory of the C++ structure as float32 [1, 4]."""
        data = struct.pack("<Qixxxx", self.draft_request_id, self.draft_participant_id)
        return to_user(Tensor("", "float32", (1, 4), data))


@dataclass(slots=True, eq=False)
class Result:
    """Output of one sequence or, in a beam search, of all beams. Lists have one entry per beam; a sampled sequence is
    one beam. Tensors are of torch or, if that is not installed, of numpy.

    Attributes:
        is_final: Whether this is the request's last result.
        output_token_ids: Tokens of each beam: the new ones if the request streams, otherwise all, with the prompt
            unless it is excluded. The end token is not among them; stop words are.
        cum_log_probs: Log probability of each beam so far, if requested.
        log_probs: Log probability of each generated token so far, if requested.
        context_logits: Logits at each prompt token [prompt tokens, vocabulary], if requested.
        generation_logits: Logits at each output token [beams, tokens, vocabulary] or, if the request streams,
            [tokens, beams, vocabulary], if requested.
        finish_reasons: Finish reason of each beam.
        decoding_iter: Number of tokens generated so far, as if each step had generated one.
        sequence_index: Index of the sequence; 0 in beam search.
        is_sequence_final: Whether this is the sequence's last result.
        additional_outputs: Additional outputs, for the new tokens.
        kind_changed_at: Index of the first token that another kind of workers computed; None if there is none.
        validations: For each beam that has ended, whether its text matches its schema; None if that was enforced, or
            if there is no schema.
    """

    is_final: bool = False
    output_token_ids: list[list[int]] = field(default_factory=list)
    cum_log_probs: list[float] | None = None
    log_probs: list[list[float]] | None = None
    context_logits: AnyTensor | None = None
    generation_logits: AnyTensor | None = None
    spec_dec_fast_logits_info: SpeculativeDecodingFastLogitsInfo | None = None
    encoder_output: AnyTensor | None = None
    finish_reasons: list[FinishReason] = field(default_factory=list)
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    avg_decoded_tokens_per_iter: float = 1.0
    context_phase_params: ContextPhaseParams | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    additional_outputs: Sequence[AdditionalOutput] = ()
    kind_changed_at: int | None = None
    validations: Sequence[Validation | None] = ()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason of the first beam."""
        return self.finish_reasons[0] if self.finish_reasons else None


class Response:
    """One response of a request: a result or an error."""

    __slots__ = ("_error_msg", "_result", "client_id", "request_id")

    @overload
    def __init__(self, request_id: int, error_msg: str, client_id: int | None = None) -> None: ...

    @overload
    def __init__(self, request_id: int, *, error_msg: str, client_id: int | None = None) -> None: ...

    @overload
    def __init__(self, request_id: int, result: Result, client_id: int | None = None) -> None: ...

    def __init__(self, request_id: int, *arguments: Any, **named: Any) -> None:
        """Store an error, if the second argument is a text or `error_msg`, or else a result."""
        values = dict(zip(("content", "client_id"), arguments, strict=False)) | named
        content = values.get("content", values.get("result", values.get("error_msg")))
        self.request_id = request_id
        self.client_id: int | None = values.get("client_id")
        self._error_msg = content if isinstance(content, str) else None
        self._result = content if isinstance(content, Result) else None
        if self._error_msg is None and self._result is None:
            raise InvalidArgumentError("must be a Result, or give error_msg", field="result")

    def has_error(self) -> bool:
        """Return whether the request failed. An error response is the last one of its request."""
        return self._error_msg is not None

    @property
    def error_msg(self) -> str:
        """Description of the error.

        Raises:
            InvalidArgumentError: There is none.
        """
        if self._error_msg is None:
            raise InvalidArgumentError("the response has a result", field="error_msg")
        return self._error_msg

    @property
    def result(self) -> Result:
        """The result.

        Raises:
            InvalidArgumentError: The request failed.
        """
        if self._result is None:
            raise InvalidArgumentError(f"the request failed: {self._error_msg}", field="result")
        return self._result

    def clear_context_logits(self) -> None:
        """Drop the logits of the prompt, to free their memory."""
        if self._result is not None:
            self._result.context_logits = None

    def clear_generation_logits(self) -> None:
        """Drop the logits of the output, to free their memory."""
        if self._result is not None:
            self._result.generation_logits = None
