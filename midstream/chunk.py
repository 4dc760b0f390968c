"""A piece of one sequence's output, sent by detokenizers and relayed by routers to clients."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from midstream.errors import MidstreamError, from_proto
from midstream.extras import Extras, extras_from_proto
from midstream.record import record
from protos import generation_pb2 as pb
from protos import receipts_pb2, scheduler_pb2, weights_pb2


class FinishReason(enum.StrEnum):
    """Why a sequence or request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"

    @property
    def is_failure(self) -> bool:
        """Whether the output is incomplete, in which case an error follows."""
        return self in (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR)


_REASON_NUMBERS: dict[FinishReason, pb.FinishReason.ValueType] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_REASONS: dict[int, FinishReason] = {number: reason for reason, number in _REASON_NUMBERS.items()}


def finish_reason_from_proto(number: int) -> FinishReason | None:
    """Return the reason for a protobuf enum value; None if unset."""
    return _REASONS.get(number)


@record
class Usage:
    """Token counts of one request; the number of completion tokens is the sum over all sequences."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@record
class PerfMetrics:
    """Times of a request's events, in nanoseconds since the Unix epoch (0 if not yet), and counters."""

    arrival_unix_ns: int = 0
    first_scheduled_unix_ns: int = 0
    first_token_unix_ns: int = 0
    last_token_unix_ns: int = 0
    num_preemptions: int = 0
    num_recoveries: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0
    num_kind_changes: int = 0


_PERF_FIELDS = tuple(PerfMetrics.__dataclass_fields__)


@record
class Validation:
    """Whether an output matches a schema that was not fully enforced: it does if there are no errors."""

    errors: tuple[str, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether there are no errors."""
        return not self.errors

    @staticmethod
    def from_proto(message: pb.Validation) -> Validation:
        """Build this from the protobuf message."""
        return Validation(tuple(message.errors) or (() if message.is_valid else ("is not valid",)))


@record
class WeightsPart:
    """The version of the weights that computed a sequence's tokens from an index on, up to the next part.

    Attributes:
        weights_root: Root of the tree over the weights, hexadecimal; empty if they had not been hashed.
    """

    from_token: int
    version: str
    weights_root: str


def weights_from_proto(parts: Iterable[weights_pb2.WeightsPart]) -> tuple[WeightsPart, ...]:
    """Return the versions of a sequence's tokens."""
    return tuple([WeightsPart(part.from_token, part.version, part.weights_root) for part in parts])


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence, and the text that they complete.

    Attributes:
        sequence_index: Index of the sequence in the request.
        token_offset: Index of token_ids[0] in the sequence's output.
        token_ids: The tokens; may be empty in a final chunk. A list belongs to the chunk, and `append` extends it.
        text: New text. It depends only on the tokens, not on how they were divided into chunks.
        is_sequence_final: Whether this is the sequence's last chunk.
        is_final: Whether this is the request's last chunk.
        finish_reason: Set on a sequence's final chunk.
        matched_stop: The stop word, or the id of the stop token, that ended the sequence.
        usage: Set on the final chunk.
        extras: Log probabilities and tensors, if requested.
        cumulative_log_prob: Log probability of the whole sequence, on its final chunk, if requested.
        perf_metrics: Set on the final chunk, if requested.
        error: The error with which the request failed.
        kind_changed_at: Index of the first token that workers of another kind computed; None if there is none so far.
        validation: Set on a sequence's final chunk if its schema was not fully enforced.
        weights: Versions of the weights, on a sequence's final chunk, once they have been changed.
        receipt: The request's receipt, on the final chunk, if requested.
        receipt_lengths: Lengths of all sequences, on a detokenizer's final chunk, if a receipt is requested.
    """

    sequence_index: int = 0
    token_offset: int = 0
    token_ids: Sequence[int] = ()
    text: str = ""
    is_sequence_final: bool = False
    is_final: bool = False
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    usage: Usage | None = None
    extras: Extras | None = None
    cumulative_log_prob: float | None = None
    perf_metrics: PerfMetrics | None = None
    error: MidstreamError | None = field(default=None, compare=False)
    kind_changed_at: int | None = None
    validation: Validation | None = None
    weights: Sequence[WeightsPart] = ()
    receipt: receipts_pb2.Receipt | None = None
    receipt_lengths: Sequence[int] = ()

    @property
    def next_offset(self) -> int:
        """Token offset from which to resume this sequence."""
        return self.token_offset + len(self.token_ids)

    def adds_to(self, num_tokens: int) -> bool:
        """Return whether the chunk has anything new for a reader with `num_tokens` tokens of the sequence."""
        if self.is_sequence_final or self.next_offset > num_tokens or (self.extras is not None and self.extras.tensors):
            return True
        return not self.token_ids and self.token_offset == num_tokens

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory, in bytes."""
        return 256 + 4 * len(self.token_ids) + 2 * len(self.text) + (self.extras.num_bytes if self.extras else 0)

    @property
    def num_message_bytes(self) -> int:
        """Approximate size of its message, in bytes."""
        num_bytes = 64 + 4 * (len(self.token_ids) + len(self.text))
        if self.extras is not None:
            num_bytes += self.extras.num_bytes + self.extras.num_tensor_bytes
        return num_bytes

    def append(self, later: Chunk) -> None:
        """Append the next chunk; a chunk that starts at or before this one (and has all tokens so far) replaces it.

        Precondition: Both chunks are of the same sequence, and later.token_offset <= self.next_offset.
        """
        if later.token_ids and later.token_offset <= self.token_offset:
            self.token_offset, self.token_ids, self.text = later.token_offset, later.token_ids, later.text
        else:
            if not isinstance(self.token_ids, list):
                self.token_ids = list(self.token_ids)
            self.token_ids.extend(later.token_ids)
            self.text += later.text
        if later.extras is not None:
            self.extras = self.extras + later.extras if self.extras is not None else later.extras
        if later.kind_changed_at is not None:
            self.kind_changed_at = later.kind_changed_at
        if later.is_sequence_final or later.is_final:
            self.is_sequence_final, self.is_final = later.is_sequence_final, later.is_final
            self.finish_reason, self.matched_stop = later.finish_reason, later.matched_stop
            self.cumulative_log_prob, self.usage = later.cumulative_log_prob, later.usage
            self.perf_metrics, self.error = later.perf_metrics, later.error
            self.validation, self.weights = later.validation, later.weights
            self.receipt, self.receipt_lengths = later.receipt, later.receipt_lengths

    def cut(self, max_tensor_bytes: int) -> tuple[Chunk, Chunk | None]:
        """Split the chunk so that the first part has at most `max_tensor_bytes` of tensors; if there is a second part,
        only that can be final.
        """
        if self.extras is None or len(self.extras.tensors) < 2:
            return self, None
        extras, rest = self.extras.cut(max_tensor_bytes)
        if rest is None:
            return self, None
        first = Chunk(self.sequence_index, self.token_offset, self.token_ids, self.text, extras=extras)
        return first, replace(self, token_offset=self.next_offset, token_ids=(), text="", extras=rest)

    def pieces(self, max_tensor_bytes: int) -> Sequence[Chunk]:
        """Split the chunk into messages, each with at most `max_tensor_bytes` of tensors."""
        if self.extras is None:
            return (self,)
        piece, rest = self.cut(max_tensor_bytes)
        pieces = [piece]
        while rest is not None:
            piece, rest = rest.cut(max_tensor_bytes)
            pieces.append(piece)
        return pieces

    def to_proto(self, request_id: str) -> pb.GenerateResponse:
        """Return the message."""
        response = pb.GenerateResponse(request_id=request_id)
        self.fill(response)
        return response

    def fill(self, response: pb.GenerateResponse) -> bool:
        """Set the fields of an empty message in place, which is three times as fast as copying a message.

        Returns:
            Whether only the sequence's index and offset, tokens and text were set.
        """
        is_plain = True
        if self.sequence_index:
            response.sequence_index = self.sequence_index
        response.token_offset = self.token_offset
        response.token_ids.extend(self.token_ids)
        response.text = self.text
        if self.extras is not None:
            is_plain = False
            if self.extras.log_probs is not None:
                response.log_probs.CopyFrom(self.extras.log_probs.to_proto())
            if self.extras.prompt_log_probs is not None:
                response.prompt_log_probs.CopyFrom(self.extras.prompt_log_probs.to_proto())
            response.tensors.extend(tensor.to_proto() for tensor in self.extras.tensors)
        if self.kind_changed_at is not None:
            is_plain = False
            response.kind_changed_at = self.kind_changed_at
        if self.is_sequence_final or self.is_final:
            is_plain = False
            self._fill_end(response)
        return is_plain

    def _fill_end(self, response: pb.GenerateResponse) -> None:
        self._fill_proofs(response)
        response.is_sequence_final, response.is_final = self.is_sequence_final, self.is_final
        if self.finish_reason is not None:
            response.finish_reason = _REASON_NUMBERS[self.finish_reason]
        if isinstance(self.matched_stop, str):
            response.matched_stop_word = self.matched_stop
        elif self.matched_stop is not None:
            response.matched_stop_token_id = self.matched_stop
        if self.cumulative_log_prob is not None:
            response.cumulative_log_prob = self.cumulative_log_prob
        if self.usage is not None:
            response.usage.prompt_tokens = self.usage.prompt_tokens
            response.usage.completion_tokens = self.usage.completion_tokens
            response.usage.cached_tokens = self.usage.cached_tokens
        if self.perf_metrics is not None:
            metrics = {name: getattr(self.perf_metrics, name) for name in _PERF_FIELDS}
            response.perf_metrics.CopyFrom(pb.PerfMetrics(**metrics))
        if self.error is not None:
            response.error.CopyFrom(self.error.to_proto())

    def _fill_proofs(self, response: pb.GenerateResponse) -> None:
        for part in self.weights:
            response.weights.add(from_token=part.from_token, version=part.version, weights_root=part.weights_root)
        if self.validation is not None:
            response.validation.is_valid = self.validation.is_valid
            response.validation.errors.extend(self.validation.errors)
        if self.receipt is not None:
            response.receipt.CopyFrom(self.receipt)
        elif self.receipt_lengths:
            response.receipt_lengths.extend(self.receipt_lengths)

    @staticmethod
    def from_proto(response: pb.GenerateResponse, *, is_plain: bool = False) -> Chunk:
        """Build this from the protobuf message; with `is_plain`, only the fields that StreamChunk names are read."""
        chunk = Chunk(response.sequence_index, response.token_offset, response.token_ids[:], response.text)
        if is_plain:
            return chunk
        if response.tensors or response.HasField("log_probs") or response.HasField("prompt_log_probs"):
            chunk.extras = extras_from_proto(response)
        if response.HasField("kind_changed_at"):
            chunk.kind_changed_at = response.kind_changed_at
        if response.is_sequence_final or response.is_final:
            chunk._take_end(response)
        return chunk

    def _take_end(self, response: pb.GenerateResponse) -> None:
        self.is_sequence_final, self.is_final = response.is_sequence_final, response.is_final
        self.finish_reason = _REASONS.get(response.finish_reason)
        self.matched_stop = matched_stop_from_proto(response)
        self.weights = weights_from_proto(response.weights)
        if response.HasField("cumulative_log_prob"):
            self.cumulative_log_prob = response.cumulative_log_prob
        if response.HasField("usage"):
            self.usage = usage_from_proto(response.usage)
        if response.HasField("perf_metrics"):
            self.perf_metrics = perf_metrics_from_proto(response.perf_metrics)
        if response.HasField("error"):
            self.error = from_proto(response.error)
        if response.HasField("validation"):
            self.validation = Validation.from_proto(response.validation)
        if response.HasField("receipt"):
            self.receipt = response.receipt
        self.receipt_lengths = tuple(response.receipt_lengths)


class SequenceEnds:
    """Tracks for which sequences of a stream the end was already sent, because attaching or resuming beyond an end
    sends it again.
    """

    __slots__ = ("_shown",)

    def __init__(self) -> None:
        self._shown: set[int] = set()

    def repeats(self, chunk: Chunk) -> bool:
        """Return whether a chunk only repeats an end that was already sent. A chunk that also ends the request is not a
        repetition, but text that was already sent is removed from it.
        """
        if chunk.sequence_index in self._shown:
            if not chunk.token_ids:
                chunk.text = ""
            return not chunk.is_final
        if chunk.is_sequence_final:
            self._shown.add(chunk.sequence_index)
        return False


def usage_from_proto(usage: pb.Usage) -> Usage:
    """Build this from the protobuf message."""
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def perf_metrics_from_proto(metrics: pb.PerfMetrics) -> PerfMetrics:
    """Build this from the protobuf message."""
    return PerfMetrics(*(getattr(metrics, name) for name in _PERF_FIELDS))


def matched_stop_from_proto(message: pb.GenerateResponse | scheduler_pb2.FeedSequenceEnd) -> str | int | None:
    """Return the stop word or stop token that ended the sequence."""
    if message.matched_stop_word:
        return message.matched_stop_word
    return message.matched_stop_token_id if message.HasField("matched_stop_token_id") else None
