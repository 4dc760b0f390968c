"""Limits on the memory used by request streams, both for partially received messages and for running requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from midstream.errors import OverloadedError
from router.authentication import current_caller

# Maximum number of streams that read their next message, in total and of one client.
_MAX_READS, _MAX_READS_PER_CLIENT = 128, 32
# Maximum bytes of running requests, in total and of one client; each request counts as its size plus a fixed amount.
_MAX_BYTES, _MAX_BYTES_PER_CLIENT = 256 << 20, 64 << 20
_BYTES_PER_REQUEST = 64 << 10
# A stream that has waited for less than this is considered in use.
_MIN_IDLE_S = 1.0
_WAIT_S = 5.0
_LOOK_INTERVAL_S = 0.1

_MessageT = TypeVar("_MessageT", bound=Message)


class StreamSlots:
    """Decides which streams may read their next message.

    While a stream waits for a message, all but the message's last byte may have arrived, in memory that gRPC has
    allocated. A client may leave a stream idle for any length of time, so a time limit cannot detect this. Instead, if
    there are too many such streams, the one that has waited longest is ended. Streams with running requests are never
    ended, and leave half of the slots to the others.
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
        self._num_reads = Counter[str]()
        self._num_bytes = Counter[str]()

    def stream(self, messages: AsyncIterator[_MessageT]) -> RequestStream[_MessageT]:
        """Return the current caller's stream."""
        return RequestStream(self, current_caller.get().name, messages)

    async def begin(self, stream: RequestStream[Any]) -> None:
        """Wait until a stream may read its next message.

        Raises:
            OverloadedError: There is no slot for the stream.
        """
        since = time.monotonic()
        while not self._has_room(stream):
            if not stream.num_running:
                if time.monotonic() - since > self._wait_s:
                    raise OverloadedError("too many request streams are waiting for their next message")
                self._end_idle(stream.client)
            # A stream may become idle just by waiting, so look again periodically.
            await asyncio.sleep(_LOOK_INTERVAL_S)
        stream.reads_since = time.monotonic()
        self._reading[stream] = None
        self._num_reads[stream.client] += 1

    def end(self, stream: RequestStream[Any]) -> None:
        """Release the slot of a stream that has read its message."""
        del self._reading[stream]
        self._add(self._num_reads, stream.client, -1)

    def hold(self, client: str, num_bytes: int) -> None:
        """Count the bytes of a request; the number is negative when the request ends."""
        self._add(self._num_bytes, client, num_bytes)

    def _has_room(self, stream: RequestStream[Any]) -> bool:
        part = 2 if stream.num_running else 1
        return (
            len(self._reading) < self._max_reads // part
            and self._num_reads[stream.client] < self._max_reads_per_client // part
            and self._num_bytes[stream.client] < self._max_bytes_per_client
            and self._num_bytes.total() < self._max_bytes
        )

    def _end_idle(self, client: str) -> None:
        """End an idle stream of `client` if it has too many streams, otherwise of the client that has the most."""
        if self._num_reads[client] < self._max_reads_per_client:
            if len(self._reading) < self._max_reads:
                return
            client = self._num_reads.most_common(1)[0][0]
        before = time.monotonic() - self._min_idle_s
        for stream in self._reading:
            if stream.client == client and not stream.num_running and stream.reads_since <= before:
                stream.refuse()
                return

    @staticmethod
    def _add(counts: Counter[str], client: str, number: int) -> None:
        counts[client] += number
        if not counts[client]:
            del counts[client]


class RequestStream(Generic[_MessageT]):
    """The requests of one call.

    Attributes:
        client: The client that made the call.
        num_running: Number of requests that have arrived and not ended.
        reads_since: Time at which the stream began to wait for its next message.
    """

    def __init__(self, slots: StreamSlots, client: str, messages: AsyncIterator[_MessageT]) -> None:
        self.client = client
        self.num_running = 0
        self.reads_since = 0.0
        self._slots = slots
        self._messages = messages
        self._task: asyncio.Task[object] | None = None
        self._is_refused = False

    async def requests(self) -> AsyncIterator[tuple[_MessageT, Callable[[object], None]]]:
        """Yield each request, with a callback to call when the request ends.

        Raises:
            OverloadedError: The stream was idle, and its memory is needed for others.
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

    def refuse(self) -> None:
        """End the stream while it waits for a message."""
        if not self._is_refused and self._task is not None:
            self._is_refused = True
            self._task.cancel()

    async def _next(self) -> _MessageT:
        await self._slots.begin(self)
        self._task = asyncio.current_task()
        try:
            return await anext(self._messages)
        except asyncio.CancelledError:
            if self._is_refused and self._task is not None:
                self._task.uncancel()
                raise OverloadedError("this stream was idle, and others need its memory; open a new one") from None
            raise
        finally:
            self._slots.end(self)
