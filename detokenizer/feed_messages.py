"""Messages of the token feed as plain types."""

from __future__ import annotations

from dataclasses import dataclass

from detokenizer.sequence import TextRules
from midstream.chunk import FinishReason


@dataclass(frozen=True, slots=True)
class Opened:
    """The first message for a request, sent before its tokens."""

    num_sequences: int
    rules: TextRules
    is_streaming: bool
    return_all: bool
    return_perf_metrics: bool = False
    trace_parent: str = ""


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """How a sequence ended; `num_tokens` is the length of its output without the prompt.

    The cumulative log probability is set by the scheduler for beams; otherwise it is the sum over the tokens.
    """

    sequence_index: int
    reason: FinishReason
    num_tokens: int
    matched_stop: str | int | None = None
    cumulative_log_prob: float | None = None
