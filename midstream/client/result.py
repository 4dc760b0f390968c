"""The complete output of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from midstream.chunk import Chunk, FinishReason, PerfMetrics, Usage, Validation, WeightsPart
from midstream.extras import Extras, Tensor, join_tensors
from protos.receipts_pb2 import Receipt


@dataclass(slots=True)
class SequenceResult:
    """One sequence; `matched_stop` is the stop word, or the id of the stop token, that ended it.

    Attributes:
        extras: Log probabilities and pieces of tensors, if requested.
        kind_changed_at: Index of the first token that another kind of workers computed; None if there is none.
        validation: Whether the text matches its schema, if this was not fully enforced.
        weights: Versions of the weights that computed it, oldest first, once they have been changed.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    extras: Extras | None = None
    cumulative_log_prob: float | None = None
    kind_changed_at: int | None = None
    validation: Validation | None = None
    weights: Sequence[WeightsPart] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The complete tensors by name."""
        return join_tensors(self.extras.tensors) if self.extras is not None else {}


@dataclass(slots=True)
class Result:
    """All sequences of a request; the properties are those of the first sequence.

    Attributes:
        receipt: The request's receipt, if requested.
    """

    request_id: str
    sequences: list[SequenceResult] = field(default_factory=lambda: [SequenceResult()])
    usage: Usage | None = None
    perf_metrics: PerfMetrics | None = None
    receipt: Receipt | None = None

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.sequences[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first sequence."""
        return self.sequences[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason of the first sequence."""
        return self.sequences[0].finish_reason

    def add(self, chunk: Chunk) -> None:
        """Append the next chunk; a chunk that contains all output so far replaces the previous output."""
        while len(self.sequences) <= chunk.sequence_index:
            self.sequences.append(SequenceResult())
        sequence = self.sequences[chunk.sequence_index]
        if chunk.token_offset < len(sequence.token_ids):
            sequence.token_ids, sequence.text = [], ""
        sequence.token_ids.extend(chunk.token_ids)
        sequence.text += chunk.text
        if chunk.extras is not None:
            sequence.extras = sequence.extras + chunk.extras if sequence.extras is not None else chunk.extras
        if chunk.is_sequence_final:
            sequence.finish_reason, sequence.matched_stop = chunk.finish_reason, chunk.matched_stop
            sequence.cumulative_log_prob, sequence.validation = chunk.cumulative_log_prob, chunk.validation
            sequence.weights = chunk.weights
        if chunk.kind_changed_at is not None:
            sequence.kind_changed_at = chunk.kind_changed_at
        if chunk.is_final:
            self.usage, self.perf_metrics, self.receipt = chunk.usage, chunk.perf_metrics, chunk.receipt


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of some inputs, in order, and their total usage."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage
