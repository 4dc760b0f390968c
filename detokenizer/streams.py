"""The output of one request for one router, starting at an offset.

A stream reads its request's tokens from the first one, because the decoder's state depends on all of them, and delivers
the output from the router's offset on. Ready output is held in one chunk per sequence, which grows while the router is
slow, so no queue is needed. Tokens that are sent again, because the scheduler restarted or the feed was reopened, are
dropped here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from detokenizer.feed_messages import Opened, SequenceEnd
from detokenizer.outputs import OutputCursor
from midstream.chunk import Chunk, FinishReason, PerfMetrics, Usage
from midstream.errors import InvalidArgumentError, MidstreamError, OutOfRangeError, OverloadedError, UnavailableError
from midstream.extras import Extras
from midstream.telemetry.tracing import TraceParent, Tracer
from midstream.text.incremental import DecoderFactory
from midstream.text.sequence import SequenceText, TextRules
from protos import detokenizer_pb2 as pb

logger = logging.getLogger(__name__)

# Maximum bytes of one sequence's tensors in a message to the router, and of all its chunks together; the last chunk may
# exceed this limit.
MAX_TENSOR_BYTES = 8 << 20
MAX_BATCH_BYTES = 8 << 20


class Upstream(Protocol):
    """The feed that delivers a stream's tokens."""

    def send_stop(self, stream: OutputStream, sequence_index: int, num_tokens: int, stop_word: str) -> None:
        """Tell the scheduler where a sequence ends."""


@dataclass(slots=True)
class _Sequence:
    """One sequence; offsets into its output include the prompt if the output starts with it."""

    text: SequenceText
    from_token: int
    pending: Chunk | None = None
    has_ended: bool = False
    length: int | None = None  # number of tokens, including those of the prompt as in offsets, if it ended normally
    is_stop_due: bool = False  # whether the stop must be sent again, because the feed was reopened
    is_stop_known: bool = False  # whether the scheduler has ended the sequence at the stop
    num_output: int = 0  # number of output tokens, without the prompt, once it has ended
    num_dropped: int = 0  # tokens after the stop word, which the scheduler has counted as output
    outputs: OutputCursor = field(default_factory=OutputCursor)
    early: list[tuple[int, Extras]] = field(default_factory=list)  # outputs of tokens not yet received
    kind_changed_at: int | None = None  # as in GenerateResponse
    all_ids: list[int] = field(default_factory=list)
    all_text: str = ""


class OutputStream:
    """A request's output for one router.

    Attributes:
        number: The number assigned by the router.
        scheduler: Address of the scheduler that has the request; empty if unknown.
        feed_number: The number that identifies the stream on the feeds.
        is_done: Whether all output was delivered; stays false if the stream fails.
        attached_ns: Creation time in Unix nanoseconds.
        first_output_ns: Time of the first delivered output in Unix nanoseconds; 0 before that.
    """

    def __init__(
        self,
        number: int,
        request_id: str,
        feed_number: int,
        from_token: int,
        from_token_by_sequence: Sequence[int],
        connection: RouterConnection,
        decoders: DecoderFactory,
        max_pending_bytes: int,
        scheduler: str = "",
    ) -> None:
        """Deliver each sequence from its entry in `from_token_by_sequence` on, or from `from_token` if it has none."""
        self.number = number
        self.request_id = request_id
        self.scheduler = scheduler
        self.feed_number = feed_number
        self.error: MidstreamError | None = None
        self.is_done = False
        self.attached_ns = time.time_ns()
        self.first_output_ns = 0
        self._from_token = from_token
        self._from_token_by_sequence = from_token_by_sequence
        self._connection = connection
        self._decoders = decoders
        self._max_pending_bytes = max_pending_bytes
        self._opened: Opened | None = None
        self._num_prompt = 0  # number of prompt tokens, if the output begins with the prompt
        self._sequences: list[_Sequence] = []
        self._has_ended = False

    @property
    def trace_parent(self) -> str:
        """Trace parent as in GenerateRequest; empty until the request is opened."""
        return self._opened.trace_parent if self._opened is not None else ""

    @property
    def num_tokens(self) -> int:
        """Number of tokens received, over all sequences."""
        return sum(sequence.text.num_tokens for sequence in self._sequences)

    @property
    def num_held(self) -> int:
        """Number of tokens that wait for the end of their sequence, because the request is not streamed."""
        if self._opened is None or self._opened.is_streaming:
            return 0
        return sum(
            len(sequence.pending.token_ids)
            for sequence in self._sequences
            if sequence.pending is not None and not sequence.has_ended
        )

    @property
    def is_open(self) -> bool:
        """Whether a scheduler has accepted the attachment."""
        return self._opened is not None

    def open(self, opened: Opened) -> None:
        """Handle the feed's `opened` message; after a reconnect, the feed sends all output again."""
        if self._opened is not None:
            for sequence in self._sequences:
                sequence.outputs.reopen()
                sequence.early.clear()
                # The scheduler may not have received the stop, or may have failed before it was committed.
                sequence.is_stop_due = sequence.text.stop_at is not None and not sequence.is_stop_known
            return
        num_offsets = len(self._from_token_by_sequence)
        if num_offsets > opened.num_sequences:
            message = f"has {num_offsets} offsets, but the request has {opened.num_sequences} sequences"
            self.fail(InvalidArgumentError(message, field="from_token_by_sequence"))
            return
        self._opened = opened
        self._num_prompt = len(opened.rules.prompt_ids)
        for index in range(opened.num_sequences):
            own = self._from_token_by_sequence[index : index + 1]
            offset = own[0] if own else self._from_token
            sequence = _Sequence(SequenceText(opened.rules, self._decoders), offset)
            self._sequences.append(sequence)
            prompt = opened.rules.prompt_ids
            if prompt:
                # The offset may be inside the prompt: text before the offset is decoded but not sent.
                head = SequenceText(_with_prompt(opened.rules, prompt[:offset]), self._decoders).prompt_text
                self._add(index, sequence, 0, prompt, sequence.text.prompt_text, head)
        self._flush()

    def push(self, upstream: Upstream, sequence_index: int, token_offset: int, token_ids: Sequence[int]) -> None:
        """Add tokens of a sequence; tokens already received are dropped."""
        if self._opened is None or sequence_index >= len(self._sequences):
            return
        sequence = self._sequences[sequence_index]
        text = sequence.text
        first = text.num_tokens
        if token_offset < first:
            self._send_lost_stop(upstream, sequence_index, sequence, token_offset + len(token_ids))
            token_ids = token_ids[first - token_offset :]
        if not token_ids or text.stop_at is not None or sequence.has_ended:
            return
        if token_offset > first:
            self.fail(UnavailableError(f"the feed skipped tokens {first} to {token_offset}"))
            return
        offset = self._num_prompt + first
        head = tail = ""
        num_before = sequence.from_token - offset
        if num_before > 0:
            head = text.push(token_ids[:num_before])
            if text.stop_at is None and num_before < len(token_ids):
                tail = text.push(token_ids[num_before:])
        else:
            tail = text.push(token_ids)
        if text.stop_at is not None:
            token_ids = token_ids[: text.stop_at - first]
            upstream.send_stop(self, sequence_index, text.stop_at, text.stop_word or "")
        self._add(sequence_index, sequence, offset, token_ids, head + tail, head)
        if sequence.early:
            self._add_early(sequence_index, sequence)
        if self._opened.is_streaming and sequence.pending is not None:
            self._show(sequence.pending, has_ended=False)

    def _send_lost_stop(self, upstream: Upstream, sequence_index: int, sequence: _Sequence, num_resent: int) -> None:
        """Send a sequence's stop again once the tokens up to it have been resent, since the scheduler ignores an
        earlier stop.
        """
        text = sequence.text
        if sequence.is_stop_due and text.stop_at is not None and num_resent >= text.stop_at:
            sequence.is_stop_due = False
            upstream.send_stop(self, sequence_index, text.stop_at, text.stop_word or "")

    def change_kind(self, changed_at: Sequence[int]) -> None:
        """Record from which of its tokens on each sequence is computed by another kind of workers."""
        for sequence, offset in zip(self._sequences, changed_at, strict=False):
            sequence.kind_changed_at = self._num_prompt + offset

    def add_outputs(self, sequence_index: int, token_offset: int, extras: Extras) -> None:
        """Add log probabilities and tensors of the tokens from `token_offset` on."""
        if self._opened is None or sequence_index >= len(self._sequences):
            return
        sequence = self._sequences[sequence_index]
        num_known, rows = sequence.text.num_tokens - token_offset, extras.log_probs
        is_open = sequence.text.stop_at is None and not sequence.has_ended
        if is_open and num_known > 0 and rows is not None and len(rows.token_log_probs) > num_known:
            # A client may resume between these tokens, so each row is sent with its token.
            sequence.early.append((sequence.text.num_tokens, Extras(rows.without(num_known))))
            extras = replace(extras, log_probs=rows.first(num_known))
        if is_open and num_known <= 0:
            # The token of these outputs arrives with the next batch, and may follow a stop word.
            sequence.early.append((token_offset, extras))
        else:
            # The scheduler samples a token even if the request asked only for its prompt; the outputs of this token are
            # dropped.
            end = 0 if sequence.has_ended and not sequence.text.num_tokens else sequence.text.stop_at
            self._deliver(sequence_index, sequence, token_offset, extras, end)

    def _deliver(
        self, sequence_index: int, sequence: _Sequence, token_offset: int, extras: Extras, end: int | None
    ) -> None:
        """Add extras to the pending chunk, except those of tokens from `end` on."""
        from_token = max(sequence.from_token - self._num_prompt, 0)
        new = sequence.outputs.new(extras, token_offset, from_token, end)
        if new is None:
            return
        chunk = sequence.pending
        if chunk is None:
            chunk = sequence.pending = Chunk(sequence_index, self._end_offset(sequence))
        chunk.extras = chunk.extras + new if chunk.extras is not None else new

    def _add_early(self, sequence_index: int, sequence: _Sequence) -> None:
        early, sequence.early = sequence.early, []
        for token_offset, extras in early:
            self.add_outputs(sequence_index, token_offset, extras)

    def end_sequence(self, end: SequenceEnd, upstream: Upstream | None = None) -> None:
        """End a sequence, and release its remaining text; report a stop word in this text to `upstream`."""
        if self._opened is None or end.sequence_index >= len(self._sequences):
            return
        sequence = self._sequences[end.sequence_index]
        if sequence.has_ended:
            return
        text = sequence.text
        if text.num_tokens < end.num_tokens and text.stop_at is None:
            self.fail(UnavailableError(f"the feed skipped tokens {text.num_tokens} to {end.num_tokens}"))
            return
        if not end.num_tokens:
            # The request asked only for its prompt, so no token follows the outputs of the prompt.
            for token_offset, extras in sequence.early:
                self._deliver(end.sequence_index, sequence, token_offset, extras, 0)
            sequence.early.clear()
        include_stop = self._opened.rules.include_stop
        was_stopped = text.stop_at is not None
        rest = text.finish(ends_with_stop_token=isinstance(end.matched_stop, int) and not include_stop)
        reason, matched, log_prob = end.reason, end.matched_stop, end.cumulative_log_prob
        if text.stop_at is not None:
            # The sequence ends at the stop word even if the scheduler learned of it too late.
            reason, matched = FinishReason.STOP, text.stop_word
            sequence.num_dropped = max(end.num_tokens - text.stop_at, 0)
            if sequence.num_dropped:
                log_prob = None
            sequence.is_stop_known = end.matched_stop == text.stop_word
            if upstream is not None and not was_stopped:
                upstream.send_stop(self, end.sequence_index, text.stop_at, text.stop_word or "")
        self._add(end.sequence_index, sequence, self._end_offset(sequence), (), rest, "")
        chunk = sequence.pending or Chunk(end.sequence_index, self._end_offset(sequence))
        chunk.is_sequence_final = True
        chunk.finish_reason, chunk.matched_stop = reason, matched
        chunk.cumulative_log_prob = sequence.outputs.cumulative_log_prob if log_prob is None else log_prob
        length = end.num_tokens if text.stop_at is None else text.stop_at
        chunk.weights = [
            replace(part, from_token=self._num_prompt + part.from_token) if part.from_token else part
            for part in end.weights
            if part.from_token < max(length, 1)
        ]
        sequence.pending, sequence.has_ended = chunk, True
        sequence.num_output = length
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            sequence.length = self._num_prompt + sequence.num_output
        self._flush()

    def end(self, usage: Usage | None, perf_metrics: PerfMetrics | None, error: MidstreamError | None) -> None:
        """End the request; the last sequence's final chunk also ends the request."""
        if self._opened is None or self._has_ended:
            return
        for index, sequence in enumerate(self._sequences):
            if not sequence.has_ended:
                reason = FinishReason.ERROR if error else FinishReason.ABORT
                self.end_sequence(SequenceEnd(index, reason, sequence.text.num_tokens))
        if error is None and (beyond := self._offset_beyond_end()) is not None:
            self.fail(beyond)
            return
        self._has_ended = True
        last = next((item for item in reversed(self._sequences) if item.pending is not None), self._sequences[-1])
        if last.pending is None:
            index = self._sequences.index(last)
            last.pending = Chunk(index, self._end_offset(last), is_sequence_final=True)
        num_dropped = sum(sequence.num_dropped for sequence in self._sequences)
        if usage is not None and num_dropped:
            completion = usage.completion_tokens - num_dropped
            usage = Usage(usage.prompt_tokens, completion, usage.cached_tokens)
        chunk = last.pending
        chunk.is_final, chunk.usage, chunk.error = True, usage, error
        chunk.perf_metrics = perf_metrics if self._opened.return_perf_metrics else None
        if self._opened.return_receipt:
            chunk.receipt_lengths = [sequence.num_output for sequence in self._sequences]
        self._flush()

    def _offset_beyond_end(self) -> OutOfRangeError | None:
        """Return an error if the router's offset of a sequence, or its offset for all, is greater than the output."""
        lengths = [sequence.length for sequence in self._sequences]
        for index, (offset, length) in enumerate(zip(self._from_token_by_sequence, lengths, strict=False)):
            if length is not None and offset > length:
                message = f"is {offset} for sequence {index}, whose output has {length} tokens"
                return OutOfRangeError(message, field="from_token_by_sequence")
        longest = max((length for length in lengths if length is not None), default=None)
        if not self._from_token_by_sequence and longest is not None and self._from_token > longest:
            return OutOfRangeError(f"is {self._from_token}, but the output has {longest} tokens", field="from_token")
        return None

    def fail(self, error: MidstreamError) -> None:
        """End the stream without a final chunk."""
        if self.error is None and not self.is_done:
            self.error = error
            self._connection.mark_ready(self)

    def take(self, max_bytes: int = MAX_BATCH_BYTES) -> list[Chunk]:
        """Return the output that is ready, up to about `max_bytes`; set `is_done` if it includes the final chunk."""
        if self._opened is None:
            return []
        chunks, num_bytes, is_several = [], 0, len(self._sequences) > 1
        for sequence in self._sequences:
            if sequence.pending is None or not self._is_ready(sequence):
                continue
            chunk, sequence.pending = sequence.pending.cut(MAX_TENSOR_BYTES)
            if self._opened.return_all:
                chunk.token_offset, chunk.token_ids, chunk.text = 0, sequence.all_ids[:], sequence.all_text
            changed_at = sequence.kind_changed_at
            if changed_at is not None and (chunk.next_offset > changed_at or chunk.is_sequence_final):
                chunk.kind_changed_at = changed_at
            chunks.append(chunk)
            if is_several:
                num_bytes += chunk.num_message_bytes
            if sequence.pending is not None or num_bytes >= max_bytes:
                # The final chunk, which belongs to the last sequence with output, must not overtake the rest.
                self._connection.mark_ready(self)
                break
        # The final chunk must be the last one.
        if len(chunks) > 1:
            chunks.sort(key=lambda chunk: chunk.is_final)
        self.is_done = bool(chunks) and chunks[-1].is_final
        if chunks and not self.first_output_ns:
            self.first_output_ns = time.time_ns()
        return chunks

    def _end_offset(self, sequence: _Sequence) -> int:
        """Return the length of the sequence's output so far, or the router's offset if that is greater."""
        count = sequence.text.num_tokens if sequence.text.stop_at is None else sequence.text.stop_at
        return max(self._num_prompt + count, sequence.from_token)

    def _is_ready(self, sequence: _Sequence) -> bool:
        """Return whether output may be sent; the last sequence's final chunk waits for the request's end and usage."""
        if sequence.has_ended:
            return self._has_ended or not all(other.has_ended for other in self._sequences)
        return self._opened is not None and self._opened.is_streaming

    def _add(
        self, index: int, sequence: _Sequence, offset: int, token_ids: Sequence[int], text: str, hidden_text: str
    ) -> None:
        """Add output from `offset` on to the pending chunk, except for the part before the router's offset.

        `hidden_text` is the part of `text` that belongs to tokens before that offset.
        """
        if self._opened is not None and self._opened.return_all:
            sequence.all_ids.extend(token_ids)
            sequence.all_text += text
            hidden_text = text
        num_hidden = sequence.from_token - offset
        if num_hidden > 0:
            offset, token_ids = sequence.from_token, token_ids[num_hidden:]
        text = text[len(hidden_text) :]
        if not token_ids and not text:
            return
        chunk = Chunk(index, offset, token_ids, text)
        if sequence.pending is None:
            sequence.pending = chunk
        else:
            sequence.pending.append(chunk)

    def _flush(self) -> None:
        for sequence in self._sequences:
            if sequence.pending is not None and self._is_ready(sequence):
                self._show(sequence.pending, has_ended=sequence.has_ended)

    def _show(self, pending: Chunk, *, has_ended: bool) -> None:
        self._connection.mark_ready(self)
        # Without streaming, a sequence is sent as a whole at its end, however fast the router reads.
        if not has_ended and pending.num_bytes > self._max_pending_bytes:
            self.fail(OverloadedError("the router reads too slowly"))


class RouterConnection:
    """The streams of one router; they mark themselves as ready, and `collect` returns all ready output as a batch."""

    def __init__(
        self, wake: Callable[[], None], detach: Callable[[OutputStream], None], tokenizer_fingerprint: str = ""
    ) -> None:
        """`wake` is called when there is output to collect, `detach` with each stream that has ended."""
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._is_new = False
        self.streams: dict[int, OutputStream] = {}
        self._wake = wake
        self._detach = detach
        self._ready: dict[int, OutputStream] = {}
        self._held: dict[int, int] = {}  # as last reported, for streams that hold tokens
        self._progress: dict[int, int] = {}  # to be sent

    def begin(self) -> None:
        """Send the first batch, which identifies the tokenizer."""
        self._is_new = True
        self._wake()

    def mark_ready(self, stream: OutputStream) -> None:
        """Record that a stream has output to send."""
        if not self._ready:  # otherwise `collect` will be called anyway
            self._wake()
        self._ready[stream.number] = stream

    def report_progress(self) -> None:
        """Send how many tokens the streams hold, if any of them holds more than at the last report."""
        held = {number: count for number, stream in self.streams.items() if (count := stream.num_held)}
        self._progress |= {number: count for number, count in held.items() if count > self._held.get(number, 0)}
        self._held = held
        if self._progress:
            self._wake()

    def collect(self) -> pb.StreamBatch | None:
        """Return ready output, one chunk per sequence, up to about MAX_BATCH_BYTES, and drop finished streams; None if
        there is none.
        """
        if self._is_new or self._progress:
            # Progress precedes the output that is ready, which may include the tokens counted in it.
            return self._take_first() if self._is_new else self._take_progress()
        if not self._ready:
            return None
        ready, self._ready = self._ready, {}
        batch, batch_bytes = pb.StreamBatch(), 0
        add = batch.chunks.add
        for number, stream in ready.items():
            if batch_bytes >= MAX_BATCH_BYTES:
                self.mark_ready(stream)
                continue
            for chunk in stream.take(MAX_BATCH_BYTES - batch_bytes):
                batch_bytes += chunk.num_message_bytes
                item = add()
                item.stream = number
                item.response.SetInParent()
                if chunk.fill(item.response):
                    item.is_plain = True
            if stream.error is not None and not stream.is_done:
                logger.info("a stream failed: %s", stream.error, extra={"request_id": stream.request_id})
                add(stream=number, error=stream.error.to_proto())
            if stream.is_done or stream.error is not None:
                self.detach(number)
                self._detach(stream)
        return batch if batch.chunks else None

    def _take_first(self) -> pb.StreamBatch:
        self._is_new = False
        if self._ready:
            self._wake()
        return pb.StreamBatch(tokenizer_fingerprint=self._tokenizer_fingerprint)

    def _take_progress(self) -> pb.StreamBatch:
        counts, self._progress = self._progress, {}
        items = [pb.StreamProgress(stream=number, num_held_tokens=count) for number, count in counts.items()]
        return pb.StreamBatch(progress=items)

    def detach(self, number: int) -> OutputStream | None:
        self._progress.pop(number, None)
        self._ready.pop(number, None)
        return self.streams.pop(number, None)


def _with_prompt(rules: TextRules, prompt: tuple[int, ...]) -> TextRules:
    return TextRules(skip_special_tokens=rules.skip_special_tokens, detokenize=rules.detokenize, prompt_ids=prompt)


def record_stream(tracer: Tracer, stream: OutputStream) -> None:
    """Record the span of a detached stream, if its request is traced."""
    parent = TraceParent.sampled(stream.trace_parent)
    if parent is None:
        return
    attributes: dict[str, str | int] = {
        "midstream.request_id": stream.request_id,
        "midstream.tokens": stream.num_tokens,
    }
    error = stream.error.message if stream.error is not None else ""
    events = [("first output", stream.first_output_ns)] if stream.first_output_ns else []
    tracer.record(
        "detokenizer.stream", parent, stream.attached_ns, time.time_ns(), attributes, error=error, events=events
    )
