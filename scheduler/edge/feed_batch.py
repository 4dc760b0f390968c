"""Builds a FeedBatch from the data past the cursors of some readers."""

from __future__ import annotations

from array import array
from typing import Generic, Protocol, TypeVar

from midstream.clock import SteadyClock
from midstream.errors import MidstreamError
from midstream.kind_names import DEFAULT_VERSION
from protos import generation_pb2, scheduler_pb2, weights_pb2, worker_pb2
from scheduler.core.request import Request, Sequence, SequenceEnd

MAX_TOKENS = 65_536  # of a batch; the last reader's may exceed it
MAX_BYTES = 8 << 20  # maximum bytes of a batch other than its tokens; the last item may exceed it


class Log(Protocol):
    """The committed part of a request's output, which may be sent."""

    request: Request
    num_committed: list[int]
    has_ended: list[bool]
    is_over: bool
    kind_changed_at: tuple[int, ...]


class Reader(Protocol):
    """A reader's cursors into a request's output; see scheduler.edge.feed.Attachment."""

    stream: int
    is_begun: bool
    is_opened: bool
    is_plain: bool
    wants_perf_metrics: bool
    has_stop_words: bool
    cursors: list[int]
    num_outputs: list[int]
    ends_sent: list[bool]

    @property
    def log(self) -> Log:
        """The log of the reader's request."""


ReaderT = TypeVar("ReaderT", bound=Reader)


class FeedBatchBuilder(Generic[ReaderT]):
    """Builds one FeedBatch.

    Attributes:
        over: Readers to which their request's end was added.
        unfinished: Readers some of whose data did not fit.
    """

    def __init__(self, scheduler_epoch: int, clock: SteadyClock) -> None:
        self._clock = clock
        self._batch = scheduler_pb2.FeedBatch(scheduler_epoch=scheduler_epoch)
        self.over: list[ReaderT] = []
        self.unfinished: list[ReaderT] = []
        self._streams: list[int] = []
        self._indices: list[int] = []
        self._offsets: list[int] = []
        self._counts: list[int] = []
        self._tokens: array[int] = array("I")
        self._is_several = False
        self._num_prompt_tokens = 0
        self._num_bytes = 0  # without tokens

    def add_refused(self, stream: int, request_id: str, error: MidstreamError) -> None:
        """Add an error reply to an attach command."""
        opened = self._batch.opened.add(stream=stream, request_id=request_id)
        opened.error.CopyFrom(error.to_proto())

    def add(self, readers: list[ReaderT]) -> int:
        """Add new data for readers, in order, and advance their cursors; return how many there was space for.

        First tokens, which come first in a step's results, have their own batch, so that their clients do not wait
        until the other streams' tokens have been processed.
        """
        streams, indices, offsets, counts = self._streams, self._indices, self._offsets, self._counts
        tokens, are_first = self._tokens, True
        for number, reader in enumerate(readers):
            start, log = reader.cursors[0], reader.log
            if are_first and start:
                are_first = False
                if tokens or self._num_prompt_tokens:
                    return number
            if len(tokens) + self._num_prompt_tokens >= MAX_TOKENS or self._num_bytes >= MAX_BYTES:
                return number
            sequence = log.request.sequences[0]
            if not (reader.is_plain and reader.is_begun) or log.has_ended[0] or log.is_over or sequence.outputs:
                self._add(reader, log)
                continue
            # The tokens of a single sequence that goes on. This is the hot loop, so it calls no functions of ours.
            end = log.num_committed[0]
            if end - start == 1:
                tokens.append(sequence.output[start])
            elif end > start:
                self._is_several = True
                tokens.extend(sequence.output[start:end])
            else:
                continue
            streams.append(reader.stream)
            indices.append(0)
            offsets.append(start)
            counts.append(end - start)
            reader.cursors[0] = end
        return len(readers)

    def _add(self, reader: ReaderT, log: Log) -> None:
        request, sequences = log.request, log.request.sequences
        if not reader.is_begun:
            self._begin(reader, request)
        cursors = reader.cursors
        limits = log.num_committed
        if sequences[0].outputs or len(cursors) > 1:
            limits = [self._add_outputs(reader, index) for index in range(len(cursors))]
        for index, num_committed in enumerate(limits):
            cursor = cursors[index]
            if num_committed > cursor and request.spec.max_tokens:
                self._add_run(reader.stream, sequences[index], cursor, num_committed)
                cursors[index] = num_committed
        if limits is not log.num_committed and limits != log.num_committed:
            self.unfinished.append(reader)
            return
        if log.has_ended != reader.ends_sent:
            for index, has_ended in enumerate(log.has_ended):
                if has_ended and not reader.ends_sent[index]:
                    reader.ends_sent[index] = True
                    self._add_end(reader.stream, sequences[index])
        if log.is_over:
            self._add_over(reader, request)
            self.over.append(reader)

    def _begin(self, reader: Reader, request: Request) -> None:
        """Add what precedes tokens: the properties of the request, and the change of its kind."""
        reader.is_begun = True
        if not reader.is_opened:
            reader.is_opened = True
            self._open(reader, request)
        if reader.log.kind_changed_at:
            self._batch.kind_changes.add(stream=reader.stream, changed_at=reader.log.kind_changed_at)

    def _open(self, reader: Reader, request: Request) -> None:
        contents = generation_pb2.GenerateRequest.FromString(request.spec.payload)
        opened = self._batch.opened.add(
            stream=reader.stream,
            request_id=request.request_id,
            num_prompt_tokens=len(request.spec.prompt),
            num_sequences=len(request.sequences),
            stopping=contents.stopping,
            output=contents.output,
            min_tokens=contents.sampling.min_tokens,
            streaming=contents.streaming if contents.HasField("streaming") else True,
            trace_parent=contents.trace_parent,
        )
        output = contents.output
        reader.is_plain = len(request.sequences) == 1 and request.spec.max_tokens > 0
        reader.wants_perf_metrics = output.return_perf_metrics
        reader.has_stop_words = bool(contents.stopping.stop_words)
        if output.HasField("exclude_input_from_output") and not output.exclude_input_from_output:
            opened.prompt_token_ids.extend(request.spec.prompt)
            self._num_prompt_tokens += len(request.spec.prompt)
        self._num_bytes += opened.ByteSize()

    def _add_run(self, stream: int, sequence: Sequence, start: int, end: int) -> None:
        count = end - start
        self._streams.append(stream)
        self._indices.append(sequence.index)
        self._offsets.append(start)
        self._counts.append(count)
        if count == 1:
            self._tokens.append(sequence.output[start])
        else:
            self._is_several = True
            self._tokens.extend(sequence.output[start:end])

    def _add_outputs(self, reader: Reader, index: int) -> int:
        """Add extra outputs of a sequence; return the number of its tokens for which all outputs have been sent."""
        sequence, num_committed = reader.log.request.sequences[index], reader.log.num_committed[index]
        for extra in sequence.outputs[reader.num_outputs[index] :]:
            if extra.token_offset >= num_committed:
                break
            if self._num_bytes >= MAX_BYTES:
                return extra.token_offset
            reader.num_outputs[index] += 1
            self._num_bytes += len(extra.data)
            row = worker_pb2.RowOutputs.FromString(extra.data)
            outputs = self._batch.outputs.add(
                stream=reader.stream, sequence_index=index, token_offset=extra.token_offset, tensors=row.tensors
            )
            if row.HasField("log_probs"):
                outputs.log_probs.CopyFrom(row.log_probs)
            if row.HasField("prompt_log_probs"):
                outputs.prompt_log_probs.CopyFrom(row.prompt_log_probs)
        return num_committed

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
            cumulative_log_prob=end.cumulative_log_prob,
            weights=weights_parts(sequence, end.num_tokens),
        )

    def _add_over(self, reader: Reader, request: Request) -> None:
        ended = self._batch.ended.add(stream=reader.stream, usage=usage_of(request))
        if reader.wants_perf_metrics:
            ended.perf_metrics.CopyFrom(perf_metrics_of(request, self._clock))
        if request.failure is not None:
            failure = request.failure
            ended.error.code, ended.error.message, ended.error.field = failure.code, failure.message, failure.field

    def finish(self) -> scheduler_pb2.FeedBatch:
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
    return generation_pb2.Usage(
        prompt_tokens=len(request.spec.prompt),
        completion_tokens=request.num_output_tokens,
        cached_tokens=request.counters.num_cached_tokens,
    )


def perf_metrics_of(request: Request, clock: SteadyClock) -> generation_pb2.PerfMetrics:
    """Return the performance metrics of a request, with wall-clock times."""
    times = request.times
    return generation_pb2.PerfMetrics(
        arrival_unix_ns=clock.to_unix_ns(times.arrival_ns),
        first_scheduled_unix_ns=clock.to_unix_ns(times.first_scheduled_ns),
        first_token_unix_ns=clock.to_unix_ns(times.first_token_ns),
        last_token_unix_ns=clock.to_unix_ns(times.last_token_ns),
        num_preemptions=request.counters.num_preemptions,
        num_recoveries=request.counters.num_recoveries,
        num_draft_tokens=request.counters.num_draft_tokens,
        num_accepted_tokens=request.counters.num_accepted_tokens,
        num_steps=request.num_decoding_steps,
        num_kind_changes=request.counters.num_kind_changes,
    )


def weights_parts(sequence: Sequence, num_tokens: int) -> list[weights_pb2.WeightsPart]:
    """Return the versions of the weights that computed a sequence's first tokens; none before the first change."""
    parts = sequence.request.kind_parts
    if parts is None:
        return []
    earlier, kind = parts
    if not kind.weights_version and not any(item.kind.weights_version for item in earlier):
        return []
    starts = [0, *(item.ends[sequence.index] for item in earlier)]
    found: list[weights_pb2.WeightsPart] = []
    for start, computing in zip(starts, [*(item.kind for item in earlier), kind], strict=True):
        version = weights_pb2.WeightsPart(
            from_token=start, version=computing.weights_version or DEFAULT_VERSION, weights_root=computing.weights_root
        )
        if found and (start >= num_tokens or found[-1].weights_root == version.weights_root):
            continue
        if found and found[-1].from_token == start:
            found.pop()
        found.append(version)
    return found
