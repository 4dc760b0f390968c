"""Messages of the token feed as plain Python types, and their conversion from protobuf."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.chunk import (
    FinishReason,
    WeightsPart,
    finish_reason_from_proto,
    matched_stop_from_proto,
    weights_from_proto,
)
from midstream.record import record
from midstream.text.sequence import TextRules
from protos import scheduler_pb2 as pb


@record
class Opened:
    """The first message for a request, sent before its tokens."""

    num_sequences: int
    rules: TextRules
    is_streaming: bool
    return_all: bool
    return_perf_metrics: bool = False
    trace_parent: str = ""
    return_receipt: bool = False


@record
class SequenceEnd:
    """The end of a sequence; `num_tokens` is the length of its output, without the prompt.

    The cumulative log probability is set by the scheduler for beams; otherwise it is the sum over the tokens.
    """

    sequence_index: int
    reason: FinishReason
    num_tokens: int
    matched_stop: str | int | None = None
    cumulative_log_prob: float | None = None
    weights: Sequence[WeightsPart] = ()


def sequence_end_from_proto(end: pb.FeedSequenceEnd) -> SequenceEnd:
    """Return the end of a sequence; raise an error if it has no finish reason."""
    return SequenceEnd(
        end.sequence_index,
        finish_reason_from_proto(end.finish_reason) or FinishReason.ERROR,
        end.num_tokens,
        matched_stop_from_proto(end),
        end.cumulative_log_prob if end.HasField("cumulative_log_prob") else None,
        weights_from_proto(end.weights),
    )


def opened_from_proto(opened: pb.FeedOpened, end_ids: tuple[int, ...]) -> Opened:
    """Return a request's text options; `end_ids` are the model's end tokens, used if the request names none."""
    stopping, output = opened.stopping, opened.output
    ends = (stopping.end_id,) if stopping.HasField("end_id") else end_ids
    rules = TextRules(
        stop_words=TextRules.words(stopping.stop_words),
        stop_ids=frozenset(stopping.stop_token_ids).union(() if stopping.ignore_eos else ends),
        min_tokens=opened.min_tokens,
        include_stop=stopping.include_stop_in_output,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        detokenize=output.detokenize if output.HasField("detokenize") else True,
        prompt_ids=tuple(opened.prompt_token_ids),
    )
    return Opened(
        opened.num_sequences,
        rules,
        opened.streaming,
        output.return_all_generated_tokens,
        output.return_perf_metrics,
        opened.trace_parent,
        output.return_receipt,
    )
