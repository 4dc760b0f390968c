"""What a scheduler says of a request on its feed, as plain types."""

from __future__ import annotations

from dataclasses import dataclass

from detokenizer.sequence import TextRules
from midstream.chunk import FinishReason


@dataclass(frozen=True, slots=True)
class Opened:
    """What a scheduler says of a request when its tokens begin to flow."""

    num_sequences: int
    rules: TextRules
    is_streaming: bool
    return_all: bool
    return_perf_metrics: bool = False
    trace_parent: str = ""


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """How a sequence ended; `num_tokens` is the length of its output without the prompt.

    A cumulative log probability is the scheduler's word, of beams; else it is the sum of the tokens'.
    """

    sequence_index: int
    reason: FinishReason
    num_tokens: int
    matched_stop: str | int | None = None
    cumulative_log_prob: float | None = None
