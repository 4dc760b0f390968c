"""The token feed: one stream per scheduler, which carries the tokens of all requests.

1. A router attaches a request; the pool sends `attach` on the feed of its scheduler. If the router does not know the
   scheduler, `attach` is sent on all feeds: the scheduler that has the request replies with `opened`, the others with
   an error.
2. Tokens arrive in batches, each with all tokens since the previous batch; they are passed to the request's stream.
3. When a stop word is found, `stop` is sent, and the scheduler ends the sequence as usual.
4. When a feed breaks, it is reopened and its requests are attached again. Tokens are resent from the first one, and the
   streams drop those they already have. If the scheduler stays unreachable, the streams fail, so that their routers try
   another detokenizer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

import grpc.aio

from detokenizer.feed_messages import opened_from_proto, sequence_end_from_proto
from detokenizer.streams import OutputStream
from midstream.chunk import perf_metrics_from_proto, usage_from_proto
from midstream.errors import ExecutionError, NotFoundError, UnavailableError, from_proto
from midstream.extras import extras_from_proto
from midstream.rpc.discovery import Discovery
from midstream.rpc.frame_link import FrameLink, LinkSettings
from midstream.rpc.frames import Pump
from midstream.rpc.scheduler_epoch import scheduler_epoch
from protos import scheduler_pb2 as pb
from protos import scheduler_pb2_grpc
from protos.frames_pb2 import FramesOffer, OpenFramesRequest

logger = logging.getLogger(__name__)

# Time for which streams wait for an unreachable scheduler before they fail.
_LOST_GRACE_S = 2.0
_PartT = TypeVar("_PartT", pb.FeedOpened, pb.FeedKindChange, pb.FeedOutputs, pb.FeedSequenceEnd, pb.FeedEnded)


class SchedulerFeed(FrameLink[pb.FeedCommand, pb.FeedBatch]):
    """The feed of one scheduler."""

    message_class = pb.FeedBatch

    def __init__(
        self,
        pool: FeedPool,
        target: str,
        detokenizer_id: str,
        end_ids: tuple[int, ...],
        tokenizer_fingerprint: str = "",
    ) -> None:
        super().__init__("scheduler", target, pool.settings, pool.server_name(target))
        self._pool = pool
        self._detokenizer_id = detokenizer_id
        self._end_ids, self._tokenizer_fingerprint = end_ids, tokenizer_fingerprint
        self._streams: dict[int, OutputStream] = {}

    def attach(self, stream: OutputStream) -> None:
        """Subscribe to a request's tokens, immediately or once the feed is open."""
        self._streams[stream.feed_number] = stream
        if self.is_open:
            self._send(_attach(stream))
        else:
            self._give_up_later([stream.feed_number])

    def detach(self, stream: OutputStream) -> None:
        """Unsubscribe from a request's tokens; no effect if the stream was not attached."""
        if self._streams.pop(stream.feed_number, None) is not None and self.is_open:
            self._send(pb.FeedCommand(detach=pb.FeedDetach(stream=stream.feed_number)))

    def close(self) -> None:
        """Fail the attached streams because the scheduler was removed; routers then attach to another detokenizer."""
        self.is_open = False
        self._give_up(list(self._streams))

    def has(self, stream: OutputStream) -> bool:
        """Return whether the stream is attached, or will be once the feed is open."""
        return stream.feed_number in self._streams

    def send_stop(self, stream: OutputStream, sequence_index: int, num_tokens: int, stop_word: str) -> None:
        """Tell the scheduler where a sequence ends; the stream repeats this if the feed reconnects."""
        stop = pb.FeedStop(
            stream=stream.feed_number, sequence_index=sequence_index, num_tokens=num_tokens, stop_word=stop_word
        )
        self._send(pb.FeedCommand(stop=stop))

    def _ask_for_frames(self, channel: grpc.aio.Channel) -> Awaitable[FramesOffer]:
        stub: scheduler_pb2_grpc.SchedulerAsyncStub = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[assignment]
        return stub.OpenTokenFeed(OpenFramesRequest(), wait_for_ready=True)

    def _hello(self) -> pb.FeedCommand:
        hello = pb.FeedHello(
            detokenizer_id=self._detokenizer_id,
            tokenizer_fingerprint=self._tokenizer_fingerprint,
        )
        return pb.FeedCommand(hello=hello)

    def _greet(self) -> None:
        for stream in self._streams.values():
            self._send(_attach(stream))

    def _lose(self) -> None:
        self._give_up_later(list(self._streams))

    def _give_up_later(self, lost: list[int]) -> None:
        asyncio.get_running_loop().call_later(_LOST_GRACE_S, self._give_up, lost)

    def _give_up(self, lost: list[int]) -> None:
        """Fail all streams of the feed, which could not reconnect in time."""
        for number in () if self.is_open else lost:
            stream = self._streams.get(number)
            if stream is not None:
                stream.fail(UnavailableError(f"the scheduler at {self.target} cannot be reached"))

    def take(self, batch: pb.FeedBatch) -> None:
        """Handle a batch received over frames; `_finish_read` follows."""
        if self._connection is not None:
            self._pool.hold_routers()
        super().take(batch)

    def _finish_read(self) -> None:
        self._pool.release_routers()

    def _take(self, batch: pb.FeedBatch) -> None:
        self._take_each(batch.opened, self._open)
        self._take_each(batch.kind_changes, _change_kind)
        self._push_tokens(batch)
        self._take_each(batch.outputs, _add_outputs)
        self._take_each(batch.sequence_ends, self._end_sequence)
        self._take_each(batch.ended, _end)
        for ended in batch.ended:
            self._streams.pop(ended.stream, None)
        if batch.streams and not any(batch.token_offsets):
            self._pool.release_routers()  # first tokens are sent before the next batch is processed

    def _take_each(self, messages: Iterable[_PartT], take: Callable[[OutputStream, _PartT], None]) -> None:
        """Pass each message to its stream; an error fails only that stream."""
        for message in messages:
            stream = self._streams.get(message.stream)
            if stream is None:
                continue
            try:
                take(stream, message)
            except Exception as error:
                logger.exception("cannot process output for a stream", extra={"request_id": stream.request_id})
                stream.fail(ExecutionError(f"invalid output: {error}"))

    def _push_tokens(self, batch: pb.FeedBatch) -> None:
        token_ids, offsets, streams = batch.token_ids[:], batch.token_offsets[:], self._streams
        sequence_indices = batch.sequence_indices[:] or [0] * len(offsets)
        lengths = batch.num_tokens[:] or [1] * len(offsets)
        start = 0
        for number, sequence_index, offset, length in zip(
            batch.streams, sequence_indices, offsets, lengths, strict=True
        ):
            stream = streams.get(number)
            if stream is not None:
                try:
                    stream.push(self, sequence_index, offset, token_ids[start : start + length])
                except Exception as error:
                    logger.exception("cannot process tokens for a stream", extra={"request_id": stream.request_id})
                    stream.fail(ExecutionError(f"invalid tokens: {error}"))
            start += length
        self._pool.count_tokens(len(token_ids))

    def _end_sequence(self, stream: OutputStream, end: pb.FeedSequenceEnd) -> None:
        stream.end_sequence(sequence_end_from_proto(end), self)

    def _open(self, stream: OutputStream, opened: pb.FeedOpened) -> None:
        if opened.HasField("num_prompt_tokens"):
            stream.open(opened_from_proto(opened, self._end_ids))
            self._pool.claim(stream, self)
        else:
            del self._streams[opened.stream]
            self._pool.refused(stream, opened)


class FeedPool:
    """The feeds of all schedulers."""

    def __init__(
        self,
        targets: str,
        detokenizer_id: str,
        end_ids: tuple[int, ...],
        settings: LinkSettings,
        count_tokens: Callable[[int], None],
        on_detach: Callable[[OutputStream], None] = lambda _: None,
        tokenizer_fingerprint: str = "",
    ) -> None:
        """`on_detach` is called with each stream that is detached; schedulers are told `tokenizer_fingerprint`."""
        self.settings = settings
        self.count_tokens = count_tokens
        self.feeds: dict[str, SchedulerFeed] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running = asyncio.TaskGroup()
        self._detokenizer_id = detokenizer_id
        self._end_ids, self._tokenizer_fingerprint = end_ids, tokenizer_fingerprint
        self._discovery = Discovery(
            targets, field="schedulers", on_change=self._set_targets, get_epoch=partial(scheduler_epoch, settings)
        )
        self._on_detach = on_detach
        self._waiting: dict[int, OutputStream] = {}  # attached, but not yet claimed by a scheduler
        self._held: dict[Pump, None] | None = None

    async def run(self) -> None:
        """Keep the feeds open until cancelled."""
        async with self._running:  # an error in one task ends all tasks
            await self._discovery.run()
            await asyncio.Event().wait()

    def wake_router(self, pump: Pump) -> None:
        """Schedule a router's pump; while pumps are held, it runs when they are released."""
        if self._held is None:
            pump.wake()
        else:
            self._held[pump] = None

    def hold_routers(self) -> None:
        """Hold the routers' pumps while tokens are read; `release_routers` then runs them in the same iteration of the
        event loop.
        """
        if self._held is None:
            self._held = {}

    def release_routers(self) -> None:
        """Run the pumps that were woken while they were held."""
        held, self._held = self._held, None
        for pump in held or ():
            pump.run()

    def server_name(self, target: str) -> str:
        """Return the name that a scheduler's certificate must contain; empty if it is the scheduler's address."""
        return self._discovery.name_of(target)

    def attach(self, stream: OutputStream) -> None:
        """Subscribe to a request's tokens on the feed of its scheduler, or on all feeds if its scheduler is unknown."""
        self._waiting[stream.feed_number] = stream
        known = self.feeds.get(stream.scheduler)
        for feed in self.feeds.values() if known is None else (known,):
            feed.attach(stream)

    def detach(self, stream: OutputStream) -> None:
        """Unsubscribe from a request's tokens."""
        self._on_detach(stream)
        self._waiting.pop(stream.feed_number, None)
        for feed in self.feeds.values():
            feed.detach(stream)

    def claim(self, stream: OutputStream, owner: SchedulerFeed) -> None:
        """Detach the request from all schedulers except `owner`, which holds it."""
        if self._waiting.pop(stream.feed_number, None) is not None:
            for feed in self.feeds.values():
                if feed is not owner:
                    feed.detach(stream)

    def refused(self, stream: OutputStream, opened: pb.FeedOpened) -> None:
        """Handle a scheduler's reply that it does not have the request, lost it, or cannot resume it."""
        error = from_proto(opened.error)
        if isinstance(error, NotFoundError) and any(feed.has(stream) for feed in self.feeds.values()):
            return
        self._waiting.pop(stream.feed_number, None)
        stream.fail(error)

    def _set_targets(self, targets: list[str]) -> None:
        for target in [target for target in self.feeds if target not in targets]:
            self.feeds.pop(target).close()
            self._tasks.pop(target).cancel()
        for target in targets:
            if target not in self.feeds:
                identity = self._detokenizer_id, self._end_ids, self._tokenizer_fingerprint
                feed = self.feeds[target] = SchedulerFeed(self, target, *identity)
                self._tasks[target] = self._running.create_task(feed.run(), name=f"feed-{target}")
                for stream in self._waiting.values():
                    feed.attach(stream)


def _add_outputs(stream: OutputStream, outputs: pb.FeedOutputs) -> None:
    stream.add_outputs(outputs.sequence_index, outputs.token_offset, extras_from_proto(outputs))


def _change_kind(stream: OutputStream, change: pb.FeedKindChange) -> None:
    stream.change_kind(change.changed_at)


def _end(stream: OutputStream, ended: pb.FeedEnded) -> None:
    stream.end(
        usage_from_proto(ended.usage) if ended.HasField("usage") else None,
        perf_metrics_from_proto(ended.perf_metrics) if ended.HasField("perf_metrics") else None,
        from_proto(ended.error) if ended.HasField("error") else None,
    )


def _attach(stream: OutputStream) -> pb.FeedCommand:
    return pb.FeedCommand(attach=pb.FeedAttach(stream=stream.feed_number, request_id=stream.request_id))
