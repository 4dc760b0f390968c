"""Limits on the memory used by request streams, both for partially received messages and for running requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from midstream.errors import MidstreamError, OverloadedError
from router.authentication import current_caller

# Maximum number of streams that read their next message, in total and per client.
_MAX_READS, _MAX_READS_PER_CLIENT = 128, 32
# Maximum bytes of running requests, in total and per client; each request counts as its size plus a fixed amount.
_MAX_BYTES, _MAX_BYTES_PER_CLIENT = 256 << 20, 64 << 20
_BYTES_PER_REQUEST = 64 << 10
# A stream that has waited for less than this is considered in use.
_MIN_IDLE_S = 1.0
_WAIT_S = 5.0
_LOOK_INTERVAL_S = 0.05
# Ending a call takes the event loop a fraction of a millisecond, so the calls that have waited too long are not all
# ended at once.
_MAX_ENDED_PER_LOOK = 8

_MessageT = TypeVar("_MessageT", bound=Message)


class StreamSlots:
    """Decides which streams may read their next message.

    While a stream waits for a message, all but the message's last byte may have arrived, in memory that gRPC has
    allocated. A client may leave a stream idle for any length of time, so a time limit cannot detect this. Instead, if
    there are too many such streams, the one that has waited longest is ended. Streams with running requests are never
    ended, and have separate slots, half as many as idle streams.
    """

    def __init__(
        self,
        max_reads: int = _MAX_READS,
        max_reads_per_client: int = _MAX_READS_PER_CLIENT,
        *,
        max_bytes: int = _MAX_BYTES,
        max_bytes_per_client: int = _MAX_BYTES_PER_CLIENT,
        min_idle_s: float = _MIN_IDLE_S,
        wait_s: float = _WAIT_S,
    ) -> None:
        self._max_reads, self._max_reads_per_client = max_reads, max_reads_per_client
        self._max_bytes, self._max_bytes_per_client = max_bytes, max_bytes_per_client
        self._min_idle_s, self._wait_s = min_idle_s, wait_s
        self._reading: dict[RequestStream[Any], None] = {}  # in order; the first has waited longest
        self._num_bytes = Counter[str]()
        # Streams without a slot by client, in order. The future's result is whether the stream has got one.
        self._waiting: dict[str, dict[RequestStream[Any], asyncio.Future[bool]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def stream(self, messages: AsyncIterator[_MessageT]) -> RequestStream[_MessageT]:
        """Return the current caller's stream."""
        return RequestStream(self, current_caller.get().name, messages)

    async def begin(self, stream: RequestStream[Any]) -> None:
        """Wait until a stream may read its next message. Raises OverloadedError if there is no slot for the stream."""
        stream.waits_since = time.monotonic()
        if stream.client not in self._waiting and self._has_room(stream):
            self._take(stream)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(stream.client, {})[stream] = turn
        self._look_later()
        try:
            has_slot = await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove(stream)
            elif turn.result():
                self.end(stream)
            raise
        if not has_slot:
            raise OverloadedError("too many request streams are waiting for their next message")

    def end(self, stream: RequestStream[Any]) -> None:
        """Release the slot of a stream that has read its message."""
        del self._reading[stream]

    def hold(self, client: str, num_bytes: int) -> None:
        """Count the bytes of a request; the number is negative when the request ends."""
        self._add(self._num_bytes, client, num_bytes)

    def _take(self, stream: RequestStream[Any]) -> None:
        stream.reads_since = time.monotonic()
        self._reading[stream] = None

    def _remove(self, stream: RequestStream[Any]) -> None:
        own = self._waiting.get(stream.client, {})
        own.pop(stream, None)
        if not own:
            self._waiting.pop(stream.client, None)

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_INTERVAL_S, self._look)

    def _look(self) -> None:
        """Give slots to waiting streams, end idle streams whose slots are needed, and refuse streams that have waited
        too long.

        This happens periodically, because a stream becomes idle just by waiting.
        """
        self._timer = None
        num_left = _MAX_ENDED_PER_LOOK
        for own in list(self._waiting.values()):
            has_no_room = set[bool]()  # contains True for streams with running requests, False for others
            for stream, turn in list(own.items()):
                is_busy = stream.num_running > 0
                if turn.done():  # cancelled, but its task has not run since
                    continue
                if is_busy not in has_no_room and self._has_room(stream):
                    self._remove(stream)
                    self._take(stream)
                    turn.set_result(True)
                    continue
                if is_busy not in has_no_room:
                    has_no_room.add(is_busy)
                    self._end_idle(stream)
                if num_left and not is_busy and time.monotonic() - stream.waits_since > self._wait_s:
                    num_left -= 1
                    self._remove(stream)
                    turn.set_result(False)
        for client in list(self._waiting)[:1]:  # another client will be first next time
            self._waiting[client] = self._waiting.pop(client)
            self._look_later()

    def _has_room(self, stream: RequestStream[Any]) -> bool:
        return (
            self._num_bytes[stream.client] < self._max_bytes_per_client
            and self._num_bytes.total() < self._max_bytes
            and self._has_slot(stream, self._own(stream.client), self._max_reads_per_client)
            and self._has_slot(stream, list(self._reading), self._max_reads)
        )

    @staticmethod
    def _has_slot(stream: RequestStream[Any], reading: list[RequestStream[Any]], limit: int) -> bool:
        """Return whether `stream` can be added, given that `limit` streams may be idle, and half as many busy.

        A stream becomes idle when its last request ends, so more than `limit` streams may be idle.
        """
        is_busy = stream.num_running > 0
        num_alike = sum((other.num_running > 0) == is_busy for other in reading)
        return num_alike < (limit // 2 if is_busy else limit) and len(reading) < limit + limit // 2

    def _own(self, client: str) -> list[RequestStream[Any]]:
        return [stream for stream in self._reading if stream.client == client]

    def _end_idle(self, stream: RequestStream[Any]) -> None:
        """End an idle stream whose slot `stream` needs: one of its client, or if that client has slots left, one of the
        client that has the most streams.
        """
        reading, limit = self._own(stream.client), self._max_reads_per_client
        if self._has_slot(stream, reading, limit):
            reading, limit = list(self._reading), self._max_reads
        if self._has_slot(stream, reading, limit):
            return  # the stream waits for memory, not for a slot
        if stream.num_running and len(reading) < limit + limit // 2:
            return  # the stream waits for the slot of another stream with running requests
        client, _ = Counter(other.client for other in reading).most_common(1)[0]
        before = time.monotonic() - self._min_idle_s
        for other in reading:
            if other.client == client and not other.num_running and other.reads_since <= before:
                other.refuse(OverloadedError, "this stream was idle, and others need its memory; open a new one")
                return

    @staticmethod
    def _add(counts: Counter[str], client: str, number: int) -> None:
        counts[client] += number
        if not counts[client]:
            del counts[client]


class RequestStream(Generic[_MessageT]):
    """The requests of one call.

    Attributes:
        num_running: Number of requests that have arrived and not ended.
        waits_since: Time at which the stream began to wait for a slot.
        reads_since: Time at which the stream began to wait for its next message.
    """

    def __init__(self, slots: StreamSlots, client: str, messages: AsyncIterator[_MessageT]) -> None:
        self.client = client
        self.num_running = 0
        self.waits_since = self.reads_since = 0.0
        self._slots = slots
        self._messages = messages
        self._task: asyncio.Task[object] | None = None  # set while it waits for a message
        self._refusal: Callable[[], MidstreamError] | None = None

    async def requests(self) -> AsyncIterator[tuple[_MessageT, Callable[[object], None]]]:
        """Yield each request, with a callback to call when the request ends. Raises OverloadedError if the stream was
        idle, and its memory is needed for others, or the error that was passed to `refuse`.
        """
        while True:
            try:
                message = await self._next()
            except StopAsyncIteration:
                return
            num_bytes = message.ByteSize() + _BYTES_PER_REQUEST
            self.num_running += 1
            self._slots.hold(self.client, num_bytes)

            def ended(_: object, num_bytes: int = num_bytes) -> None:
                self.num_running -= 1
                self._slots.hold(self.client, -num_bytes)

            yield message, ended

    def refuse(self, kind: type[MidstreamError], message: str) -> None:
        """Read no further message: raise an error of this kind instead."""
        if self._refusal is None:
            self._refusal = partial(kind, message)
            if self._task is not None:
                self._task.cancel()

    async def _next(self) -> _MessageT:
        if self._refusal is not None:
            raise self._refusal()
        task = self._task = asyncio.current_task()
        try:
            await self._slots.begin(self)
            try:
                return await anext(self._messages)
            finally:
                self._slots.end(self)
        except asyncio.CancelledError:
            if self._refusal is None or task is None or task.uncancel():
                raise
            raise self._refusal() from None
        finally:
            self._task = None
