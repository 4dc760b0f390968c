"""Writes a FeedBatch: what is new behind the cursors of some readers."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from midstream.errors import NotFoundError
from protos import generation_pb2, scheduler_pb2, worker_pb2
from scheduler.request import Request, Sequence, SequenceEnd

if TYPE_CHECKING:
    from scheduler.feed import Attachment


class FeedBatchBuilder:
    """One batch in the making."""

    def __init__(self, scheduler_epoch: int) -> None:
        self._batch = scheduler_pb2.FeedBatch(scheduler_epoch=scheduler_epoch)
        self._streams: list[int] = []
        self._indices: list[int] = []
        self._offsets: list[int] = []
        self._counts: list[int] = []
        self._tokens: array[int] = array("I")
        self._is_several = False

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    def add_unknown(self, stream: int, request_id: str) -> None:
        """Answers an attach to a request that is not known."""
        opened = self._batch.opened.add(stream=stream, request_id=request_id)
        opened.error.CopyFrom(NotFoundError(f"no request {request_id!r} is known here").to_proto())

    def add(self, reader: Attachment) -> None:
        """Adds what is new for a reader, and moves its cursors."""
        log = reader.log
        if not reader.is_opened:
            reader.is_opened = True
            self._open(reader.stream, log.request)
        cursors = reader.cursors
        for index, num_committed in enumerate(log.num_committed):
            cursor = cursors[index]
            if num_committed > cursor:
                self._add_run(reader.stream, log.request.sequences[index], cursor, num_committed)
                cursors[index] = num_committed
        if log.request.sequences[0].outputs or len(cursors) > 1:
            self._add_outputs(reader)
        for index, has_ended in enumerate(log.has_ended):
            if has_ended and not reader.ends_sent[index]:
                reader.ends_sent[index] = True
                self._add_end(reader.stream, log.request.sequences[index])
        if log.is_over:
            self._add_over(reader.stream, log.request)

    def _open(self, stream: int, request: Request) -> None:
        contents = generation_pb2.GenerateRequest.FromString(request.spec.payload)
        opened = self._batch.opened.add(
            stream=stream,
            request_id=request.request_id,
            num_prompt_tokens=len(request.spec.prompt),
            num_sequences=len(request.sequences),
            stopping=contents.stopping,
            output=contents.output,
            min_tokens=request.spec.min_tokens,
            streaming=contents.streaming if contents.HasField("streaming") else True,
        )
        output = contents.output
        if output.HasField("exclude_input_from_output") and not output.exclude_input_from_output:
            opened.prompt_token_ids.extend(request.spec.prompt)

    def _add_run(self, stream: int, sequence: Sequence, start: int, end: int) -> None:
        self._streams.append(stream)
        self._indices.append(sequence.index)
        self._offsets.append(start)
        self._counts.append(end - start)
        if end - start == 1:
            self._tokens.append(sequence.output[start])
        else:
            self._is_several = True
            self._tokens.extend(sequence.output[start:end])

    def _add_outputs(self, reader: Attachment) -> None:
        for index, sequence in enumerate(reader.log.request.sequences):
            sent = reader.num_outputs[index]
            for extra in sequence.outputs[sent:]:
                if extra.token_offset >= reader.log.num_committed[index]:
                    break
                sent += 1
                row = worker_pb2.RowOutputs.FromString(extra.data)
                outputs = self._batch.outputs.add(
                    stream=reader.stream, sequence_index=index, token_offset=extra.token_offset, tensors=row.tensors
                )
                if row.HasField("log_probs"):
                    outputs.log_probs.CopyFrom(row.log_probs)
                if row.HasField("prompt_log_probs"):
                    outputs.prompt_log_probs.CopyFrom(row.prompt_log_probs)
            reader.num_outputs[index] = sent

    def _add_end(self, stream: int, sequence: Sequence) -> None:
        end = sequence.end
        assert isinstance(end, SequenceEnd)
        self._batch.sequence_ends.add(
            stream=stream,
            sequence_index=sequence.index,
            finish_reason=generation_pb2.FinishReason.ValueType(end.reason),
            num_tokens=end.num_tokens,
            matched_stop_word=end.stop_word,
            matched_stop_token_id=end.stop_token_id,
        )

    def _add_over(self, stream: int, request: Request) -> None:
        ended = self._batch.ended.add(stream=stream, usage=usage_of(request), perf_metrics=perf_metrics_of(request))
        if request.failure is not None:
            failure = request.failure
            ended.error.code, ended.error.message, ended.error.field = failure.code, failure.message, failure.field

    def finish(self) -> scheduler_pb2.FeedBatch:
        """The batch."""
        batch = self._batch
        batch.streams.extend(self._streams)
        batch.token_offsets.extend(self._offsets)
        batch.token_ids.extend(self._tokens)
        if any(self._indices):
            batch.sequence_indices.extend(self._indices)
        if self._is_several:
            batch.num_tokens.extend(self._counts)
        return batch


def usage_of(request: Request) -> generation_pb2.Usage:
    """Tokens that a request took."""
    return generation_pb2.Usage(
        prompt_tokens=len(request.spec.prompt),
        completion_tokens=request.num_output_tokens,
        cached_tokens=request.num_cached_tokens,
    )


def perf_metrics_of(request: Request) -> generation_pb2.PerfMetrics:
    """When things happened to a request."""
    times = request.times
    return generation_pb2.PerfMetrics(
        arrival_unix_ns=times.arrival_ns,
        first_scheduled_unix_ns=times.first_scheduled_ns,
        first_token_unix_ns=times.first_token_ns,
        last_token_unix_ns=times.last_token_ns,
        num_preemptions=request.num_preemptions,
        num_recoveries=request.num_recoveries,
        num_steps=request.num_steps + max(len(sequence.output) for sequence in request.sequences),
    )
