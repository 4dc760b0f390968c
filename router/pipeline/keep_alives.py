"""Keeps streams open that have no output for a while.

A request may wait for minutes, in the queue or for its first token, while proxies and clients end a stream that is
silent for 30 to 120 seconds. Each API has a message without output that its clients count as activity. One timer serves
all streams of the process: it counts the ticks since each stream's last message, so that a message costs no more than
resetting a number.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Self, TypeVar

logger = logging.getLogger(__name__)

# Decides what to send next, a message without output, and returns the coroutine that sends it.
Beat = Callable[[], Coroutine[object, object, None]]
_T = TypeVar("_T")
# A stream's silence is measured in ticks, so a beat comes after three to four quarters of the interval.
_TICKS_PER_INTERVAL = 4
# Maximum number of beats started in one iteration of the event loop, so that output does not wait for all of them.
_MAX_PER_ITERATION = 16


class KeepAlives:
    """The open streams of this process."""

    def __init__(self, interval_s: float) -> None:
        """A stream that has been silent for `interval_s` seconds sends a message without output; 0 disables this."""
        self._tick_s = interval_s / _TICKS_PER_INTERVAL
        self._streams: dict[KeptStream, None] = {}
        self._due: deque[KeptStream] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, beat: Beat) -> KeptStream:
        """Return a stream, as a context manager, for which `beat` is called whenever it has been silent."""
        return KeptStream(self, beat)

    def add(self, stream: KeptStream) -> None:
        """Begin to count a stream's silence."""
        if self._tick_s > 0:
            self._streams[stream] = None
            if self._timer is None:
                self._schedule()

    def remove(self, stream: KeptStream) -> None:
        """Stop counting a stream's silence."""
        self._streams.pop(stream, None)

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for stream in self._streams:
            stream.num_quiet_ticks += 1
            if stream.num_quiet_ticks >= _TICKS_PER_INTERVAL:
                stream.num_quiet_ticks = 0
                self._due.append(stream)
        if self._due:
            self._beat_next()
        if self._streams:
            self._schedule()

    def _beat_next(self) -> None:
        for _ in range(min(len(self._due), _MAX_PER_ITERATION)):
            stream = self._due.popleft()
            if stream in self._streams:
                stream.beat()
        if self._due:
            asyncio.get_running_loop().call_soon(self._beat_next)


class KeptStream:
    """A stream of messages to one client. Only one message is written at a time.

    Attributes:
        num_quiet_ticks: Number of ticks since the last message.
        is_writing: Whether a message is being written, so that no beat may begin.
        beating: The beat in progress.
    """

    __slots__ = ("_beat", "_owner", "beating", "is_writing", "num_quiet_ticks")

    def __init__(self, owner: KeepAlives, beat: Beat) -> None:
        self.num_quiet_ticks = 0
        self._owner = owner
        self._beat = beat
        self.beating: asyncio.Task[None] | None = None
        self.is_writing = False

    def __enter__(self) -> Self:
        self._owner.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._owner.remove(self)
        if self.beating is not None:
            self.beating.cancel()

    async def write(self, send: Callable[[_T], Awaitable[object]], message: _T) -> None:
        """Send a message, after the beat in progress, if any. After an error, the stream has no more beats."""
        if self.beating is not None:
            await asyncio.wait((self.beating,))
        self.num_quiet_ticks, self.is_writing = 0, True
        await send(message)
        self.is_writing = False

    def beat(self) -> None:
        """Start a beat, unless a message is being written, which a slow client may delay."""
        if not self.is_writing and self.beating is None:
            self.beating = asyncio.create_task(self._beat())
            self.beating.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.beating = None
        if not task.cancelled() and task.exception() is not None:
            # The client has left; the stream's own writes report it.
            logger.debug("a keep-alive failed", exc_info=task.exception())
