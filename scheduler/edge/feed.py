"""The token feeds of detokenizers.

Tokens are stored in their sequence's output, and a reader has a cursor into each output. When its stream can take more,
a feed collects all tokens past its cursors into one batch. A slow reader therefore costs a cursor instead of a queue,
and all tokens since the last batch are sent together. Only committed tokens are sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from midstream.clock import SteadyClock
from midstream.errors import InvalidArgumentError, MidstreamError, NotFoundError, UnavailableError
from protos import scheduler_pb2
from scheduler.core.effects import Accepted, Emitted, KindSet, RequestEnded, RequestForgotten, SequenceEnded
from scheduler.core.request import Request
from scheduler.edge.feed_batch import FeedBatchBuilder
from scheduler.journal import JournalEntry

# Maximum number of ended streams that may still report a stop word found in their last batches.
_MAX_OVER = 4096


class RequestLog:
    """The committed part of a request's output, which may be sent.

    Attributes:
        num_committed: Number of committed output tokens of each sequence.
        is_awaited: Whether its last reader was lost without detaching, and is expected to reconnect.
        kind_changed_at: As in Request, as far as it is committed.
        num_expected: Number of readers that are expected because the request was submitted again.
    """

    __slots__ = (
        "has_ended", "is_awaited", "is_over", "kind_changed_at", "num_committed", "num_expected", "readers", "request",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_committed = [0] * len(request.sequences)
        self.has_ended = [False] * len(request.sequences)
        self.is_over = False
        self.is_awaited = False
        self.num_expected = 0
        self.kind_changed_at: tuple[int, ...] = ()
        self.readers: dict[Attachment, None] = {}  # in the order of their attachment, so that runs are reproducible


class Attachment:
    """A reader of one request on one feed.

    Attributes:
        stream: The detokenizer's stream number.
        wants_perf_metrics: Whether the request asks for performance metrics; known once it is opened.
        has_stop_words: Whether the request has stop words; known once it is opened.
        cursors: Number of tokens sent, by sequence.
        num_outputs: Number of extra outputs sent, by sequence.
        is_begun: Whether what precedes its next tokens was sent.
        is_plain: Whether the request has one sequence, with output; known once it is opened.
    """

    __slots__ = (
        "cursors",
        "ends_sent",
        "feed",
        "has_stop_words",
        "is_begun",
        "is_opened",
        "is_plain",
        "log",
        "num_outputs",
        "stream",
        "wants_perf_metrics",
    )

    def __init__(self, feed: DetokenizerFeed, stream: int, log: RequestLog) -> None:
        self.feed = feed
        self.stream = stream
        self.log = log
        self.is_begun = self.is_opened = self.is_plain = self.wants_perf_metrics = self.has_stop_words = False
        self.cursors = [0] * len(log.num_committed)
        self.num_outputs = [0] * len(log.num_committed)
        self.ends_sent = [False] * len(log.num_committed)


class FeedHub:
    """The logs of all requests, and the feeds that read from them."""

    def __init__(
        self,
        scheduler_epoch: int,
        on_attach: Callable[[str], None],
        on_detach: Callable[[Request], None],
        clock: SteadyClock,
    ) -> None:
        """Create a hub without requests.

        Args:
            scheduler_epoch: The epoch to send with every batch.
            on_attach: Called with the id of a request that gained a reader.
            on_detach: Called with a request that lost a reader.
        """
        self.clock = clock
        self.scheduler_epoch = scheduler_epoch
        self.on_attach = on_attach
        self.on_detach = on_detach
        self.logs: dict[str, RequestLog] = {}
        self.feeds: list[DetokenizerFeed] = []
        self._fresh: list[DetokenizerFeed] = []  # feeds with published data that were not flushed yet
        self._publish: dict[type[Any], Callable[[Any], None]] = {
            Accepted: self._publish_accepted,
            Emitted: self._publish_tokens,
            KindSet: self._publish_kind,
            SequenceEnded: self._publish_sequence_end,
            RequestEnded: self._publish_end,
            RequestForgotten: self._forget,
        }

    def restore(self, request: Request) -> None:
        """Add a request from the journal, all of whose output is committed."""
        log = self.logs[request.request_id] = RequestLog(request)
        log.num_committed = [len(sequence.output) for sequence in request.sequences]
        log.has_ended = [sequence.end is not None for sequence in request.sequences]
        log.is_over = not request.live_sequences
        log.is_awaited = True
        log.kind_changed_at = request.kind_changed_at

    def expect_reader(self, request_id: str) -> None:
        """Record that a client submitted a known request again, and will read it."""
        log = self.logs.get(request_id)
        if log is not None:
            log.num_expected += 1

    def has_reader_left(self, request_id: str) -> bool:
        """Return whether a client remains after one has left: a detokenizer that reads the request, or did so until its
        connection was lost, or a reader that is expected. A reader is expected only until the next client leaves.
        """
        log = self.logs.get(request_id)
        if log is None:
            return False
        is_expected = log.num_expected > 0
        if is_expected:
            log.num_expected -= 1
        return bool(log.readers) or log.is_awaited or is_expected

    def is_over(self, request_id: str) -> bool:
        """Return whether a request's end has been committed."""
        log = self.logs.get(request_id)
        return log is not None and log.is_over

    def publish(self, entries: list[JournalEntry]) -> None:
        """Publish committed entries; `flush` sends them."""
        for entry in entries:
            publish = self._publish.get(type(entry))
            if publish is not None:
                publish(entry)

    def _publish_accepted(self, entry: Accepted) -> None:
        self.logs[entry.request.request_id] = RequestLog(entry.request)

    def _publish_kind(self, entry: KindSet) -> None:
        log = self.logs[entry.request.request_id]
        log.kind_changed_at = entry.changed_at
        for reader in log.readers:
            reader.is_begun = False

    def _publish_sequence_end(self, entry: SequenceEnded) -> None:
        log = self.logs[entry.sequence.request.request_id]
        log.has_ended[entry.sequence.index] = True
        self._mark(log)

    def _publish_end(self, entry: RequestEnded) -> None:
        log = self.logs[entry.request.request_id]
        log.is_over = True
        self._mark(log)

    def _forget(self, entry: RequestForgotten) -> None:
        request = entry.request
        log = self.logs.get(request.request_id)
        if log is None or log.request is not request:  # the log of a request restored from the kept requests
            return
        del self.logs[request.request_id]
        if not request.num_attached:
            # They were attached before this was committed, but after the core had forgotten the request.
            for reader in list(log.readers):
                reader.feed.lose(reader)

    def _publish_tokens(self, entry: Emitted) -> None:
        logs = self.logs
        for sequence, length in zip(entry.sequences, entry.lengths, strict=True):
            log = logs[sequence.request.spec.request_id]
            log.num_committed[sequence.index] = length
            for reader in log.readers:  # like `_mark`, without a function call per token
                dirty = reader.feed.dirty
                if not dirty:
                    self._fresh.append(reader.feed)
                dirty[reader] = None

    def _mark(self, log: RequestLog) -> None:
        for reader in log.readers:
            if reader.feed.add_dirty(reader):
                self._fresh.append(reader.feed)

    def flush(self) -> None:
        """Send the published data in this iteration of the event loop."""
        feeds, self._fresh = self._fresh, []
        for feed in feeds:
            feed.flush()

    def connect(
        self,
        detokenizer_id: str,
        wake: Callable[[], None],
        tokenizer_fingerprint: str = "",
        *,
        flush: Callable[[], None] | None = None,
    ) -> DetokenizerFeed:
        """Open a feed for a detokenizer.

        Args:
            wake: Called when there is something new to collect.
            tokenizer_fingerprint: Identifies its tokenizer.
            flush: Called instead of `wake` when everything new has been published; collects it immediately.
        """
        feed = DetokenizerFeed(self, detokenizer_id, wake, flush or wake, tokenizer_fingerprint)
        self.feeds.append(feed)
        return feed


class DetokenizerFeed:
    """One detokenizer's feed.

    Attributes:
        tokenizer_fingerprint: Identifies the detokenizer's tokenizer.
        num_attached_total: Number of requests that were ever attached to it.
        dirty: Readers with new tokens to collect, in order.
        flush: Collects and sends new data, or wakes a task that does.
    """

    def __init__(
        self,
        hub: FeedHub,
        detokenizer_id: str,
        wake: Callable[[], None],
        flush: Callable[[], None],
        tokenizer_fingerprint: str = "",
    ) -> None:
        self.flush = flush
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.detokenizer_id = detokenizer_id
        self.num_attached_total = 0
        self._hub = hub
        self._attachments: dict[int, Attachment] = {}
        self._over: OrderedDict[int, tuple[str, int]] = OrderedDict()  # id and ordinal of the request, by stream
        self._refused: list[tuple[int, str, MidstreamError]] = []
        self.dirty: dict[Attachment, None] = {}
        self._wake = wake
        self._is_closed = False

    @property
    def num_attached(self) -> int:
        """Number of requests attached to this feed."""
        return len(self._attachments)

    def mark(self, attachment: Attachment) -> None:
        """Record that a reader has new tokens to collect; wake the session if no other reader had any."""
        if self.add_dirty(attachment):
            self._wake()

    def add_dirty(self, attachment: Attachment) -> bool:
        """Record that a reader has new tokens to collect; return whether it is the first one since the last batch."""
        is_first = not self.dirty
        self.dirty[attachment] = None
        return is_first

    def attach(self, stream: int, request_id: str) -> None:
        """Start to feed a request from its first token; reply with an error if the request is unknown. Raises
        InvalidArgumentError if the stream number is in use.
        """
        if stream in self._attachments:
            raise InvalidArgumentError(f"{stream} is already in use on this feed", field="attach.stream")
        log = self._hub.logs.get(request_id)
        if log is None:
            self._refuse_unknown(stream, request_id)
            return
        if log.request.spec.tokenizer_fingerprint not in ("", self.tokenizer_fingerprint):
            # Its text would differ from that of the tokenizer with which the request began.
            message = f"the detokenizer {self.detokenizer_id!r} has another tokenizer than the request"
            self.refuse(stream, request_id, UnavailableError(message, field="tokenizer_fingerprint"))
            return
        self._over.pop(stream, None)
        attachment = Attachment(self, stream, log)
        self._attachments[stream] = attachment
        self.num_attached_total += 1
        log.readers[attachment] = None
        log.num_expected = max(log.num_expected - 1, 0)
        self._hub.on_attach(request_id)
        self.mark(attachment)

    def lose(self, attachment: Attachment) -> None:
        """Detach a reader whose request was forgotten, and reply that it is unknown."""
        self.detach(attachment.stream)
        self._refuse_unknown(attachment.stream, attachment.log.request.request_id)

    def _refuse_unknown(self, stream: int, request_id: str) -> None:
        self.refuse(stream, request_id, NotFoundError(f"no request {request_id[:128]!r} is known here"))

    def refuse(self, stream: int, request_id: str, error: MidstreamError) -> None:
        """Reply to an attach command with an error."""
        self._refused.append((stream, request_id, error))
        self._wake()

    def detach(self, stream: int) -> None:
        """Stop feeding a request; ignore unknown streams."""
        attachment = self._attachments.pop(stream, None)
        if attachment is not None:
            attachment.log.readers.pop(attachment, None)
            attachment.log.is_awaited = False
            self.dirty.pop(attachment, None)
            self._hub.on_detach(attachment.log.request)

    def request_of(self, stream: int) -> Request | None:
        """Return the request of a stream that is attached, or was until its end was sent; None if it is unknown."""
        attachment = self._attachments.get(stream)
        if attachment is not None:
            return attachment.log.request
        request_id, ordinal = self._over.get(stream, ("", 0))
        log = self._hub.logs.get(request_id)
        return log.request if log is not None and log.request.ordinal == ordinal else None

    def _end(self, attachment: Attachment) -> None:
        """Detach a reader to which its request's end was sent. The reader may still find a stop word in the last
        tokens.
        """
        self.detach(attachment.stream)
        if attachment.has_stop_words:
            request = attachment.log.request
            self._over[attachment.stream] = request.request_id, request.ordinal
            if len(self._over) > _MAX_OVER:
                self._over.popitem(last=False)

    def close(self) -> None:
        """Detach all requests."""
        if self._is_closed:
            return
        self._is_closed = True
        self._hub.feeds.remove(self)
        for stream, attachment in list(self._attachments.items()):
            self.detach(stream)
            attachment.log.is_awaited = True

    def collect(self) -> scheduler_pb2.FeedBatch | None:
        """Return new data, as much as fits into a batch, or None."""
        if not self.dirty and not self._refused:
            return None
        builder = FeedBatchBuilder[Attachment](self._hub.scheduler_epoch, self._hub.clock)
        for stream, request_id, error in self._refused:
            builder.add_refused(stream, request_id, error)
        self._refused.clear()
        readers = list(self.dirty)
        self.dirty.clear()
        self.dirty.update(dict.fromkeys(readers[builder.add(readers) :]))
        for reader in builder.unfinished:
            self.mark(reader)
        for reader in builder.over:
            self._end(reader)
        return builder.finish()
