"""Convert the feed's protobuf messages into the detokenizer's own types."""

from __future__ import annotations

from detokenizer.feed_messages import Opened, SequenceEnd
from detokenizer.sequence import TextRules
from midstream.chunk import FinishReason, finish_reason_from_proto, matched_stop_from_proto
from protos import scheduler_pb2 as pb


def sequence_end_from_proto(end: pb.FeedSequenceEnd) -> SequenceEnd:
    """Return how a sequence ended; an end without a reason is an error."""
    return SequenceEnd(
        end.sequence_index,
        finish_reason_from_proto(end.finish_reason) or FinishReason.ERROR,
        end.num_tokens,
        matched_stop_from_proto(end),
        end.cumulative_log_prob if end.HasField("cumulative_log_prob") else None,
    )


def opened_from_proto(opened: pb.FeedOpened, end_ids: tuple[int, ...]) -> Opened:
    """Return a request's text options; `end_ids` are the model's, used when it names none."""
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
    )
