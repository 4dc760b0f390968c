"""A connection between two parts of one process: messages are passed as they are, without a socket or serialization.

It behaves like a connection over a socket: messages arrive in order, a writer waits while its peer has not kept up, and
either end learns once that the connection has ended. What is posted is handled in the next iteration of the event loop.
What is sent is handled at once, by a call: tokens then pass from the scheduler to the router's stream in one iteration.
Each end runs in its own context, which names its part in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context

from google.protobuf.message import Message

from midstream.rpc.connection import FrameHandler

# Number of messages not yet handled from which on the connection is not writable. The size of a message is not known
# without serializing it, but writers that wait until a connection is writable limit the size of their batches.
_MAX_UNREAD = 64


class LocalConnection:
    """One end of a connection within a process; `connect_ends` connects two."""

    def __init__(self, handler: FrameHandler, context: Context) -> None:
        """Create an end that is not connected; `handler` is called within `context`, which no other end may use."""
        self.handler = handler
        self.is_open = False
        self.on_read: Callable[[], None] = lambda: None
        self._peer = self
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._unread: list[Message] = []  # what the peer has sent and this end has not handled
        self._is_busy = False  # whether the handler is running
        self._is_ending = False

    @property
    def is_writable(self) -> bool:
        """Whether messages can be sent and the peer has handled most of the earlier ones."""
        return self.is_open and len(self._peer._unread) < _MAX_UNREAD

    def send(self, message: Message) -> None:
        """Pass a message to the other end, which handles it before this returns, unless it has unread messages or is
        itself waiting for a call to return.
        """
        peer = self._peer
        if peer._unread or peer._is_busy:
            self.post(message)
        elif self.is_open:
            peer._context.run(peer._take, [message])

    def post(self, message: Message) -> None:
        """Pass a message to the other end, which handles it in the next iteration of the event loop."""
        if self.is_open:
            peer = self._peer
            if not peer._unread:
                self._loop.call_soon(peer._read, context=peer._context)
            peer._unread.append(message)

    def fail(self, error: Exception) -> None:
        """Close the connection immediately because of an error; what has not been handled is dropped."""
        self._peer._unread.clear()
        self._end(error)

    def close(self) -> None:
        """Close the connection; the other end still handles what was sent before."""
        self._end(None)

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        self._take(unread)
        if len(unread) >= _MAX_UNREAD and self._peer.is_writable:
            self._loop.call_soon(self._peer._resume, context=self._peer._context)

    def _take(self, messages: list[Message]) -> None:
        if not self.is_open:
            return
        self._is_busy = True
        try:
            try:
                for message in messages:
                    self.handler.take(message)
                    if not self.is_open:
                        break
            finally:
                self.on_read()
        except Exception as error:  # noqa: BLE001 (told to the handler)
            self.fail(error)
        finally:
            self._is_busy = False

    def _resume(self) -> None:
        if self.is_open:
            self._is_busy = True
            try:
                self.handler.resume()
            finally:
                self._is_busy = False

    def _end(self, error: Exception | None) -> None:
        self.is_open = False
        if not self._is_ending:
            self._is_ending = self._peer._is_ending = True
            for end, reason in ((self, error), (self._peer, None)):
                self._loop.call_soon(end._lose, reason, context=end._context)

    def _lose(self, error: Exception | None) -> None:
        self.is_open = False
        self.handler.lose(error)


def connect_ends(one: LocalConnection, other: LocalConnection) -> None:
    """Connect two ends, which are open from now on."""
    one._peer, other._peer = other, one
    one.is_open = other.is_open = True
