"""One call: its state in HTTP/2, and the context that its method gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio

from midstream.rpc.errors import shorten_details
from midstream.rpc.http2.limits import Limits
from midstream.rpc.http2.messages import Messages
from midstream.rpc.http2.metadata import Head, encode_metadata, response_block, status_block

_Items = Iterable[tuple[str, str | bytes]]
# A call lets other tasks run when the connection has this many bytes to write in one iteration of the event loop, and
# after this many messages.
_MAX_BYTES_PER_TURN = 64 << 10
_MAX_WRITES_PER_TURN = 64


class Carrier(Protocol):
    """The connection of a call; see Connection."""

    limits: Limits
    peer: str
    auth_context: Mapping[str, Iterable[bytes]]
    num_unwritten: int

    def send_headers(self, call: Call, block: bytes) -> None:
        """Send the first headers of a response."""

    def send_message(self, call: Call, body: bytes) -> bool:
        """Send a message, or as much of it as there is room for; return whether all of it was sent."""

    def end(self, call: Call, block: bytes) -> None:
        """Send the last headers of a response, after the call's unsent bytes."""

    def cut(self, call: Call) -> None:
        """Reset a stream whose response cannot be completed."""

    def grant(self, call: Call, size: int) -> None:
        """Let the client send more bytes of a call."""


class Call(grpc.aio.ServicerContext[Any, Any]):
    """A call, from its headers until both sides have ended it.

    Attributes:
        window: Number of bytes that the client lets this call send.
        room: Number of bytes that this call lets the client send.
        unsent: Bytes of messages that wait for the window or the socket.
        last_block: Header block that follows the unsent bytes; empty if there is none.
        has_response: Whether response headers were sent.
        is_half_closed: Whether the client has ended its side.
        is_over: Whether the response is complete, or the call was canceled.
        serialize: Converts a response to bytes; None if responses are bytes.
    """

    __slots__ = (
        "_callbacks", "_code", "_connection", "_deadline", "_details", "_drained", "_is_canceled", "_num_writes",
        "_task", "_timer", "_trailing", "has_response", "head", "is_half_closed", "is_over", "last_block", "messages",
        "number", "room", "serialize", "unsent", "window",
    )  # fmt: skip

    def __init__(
        self, connection: Carrier, number: int, head: Head, *, window: int, room: int, max_receive_bytes: int
    ) -> None:
        self.number = number
        self.head = head
        self.messages = Messages(self, max_receive_bytes, head.encoding)
        self.window, self.room = window, room
        self.unsent = bytearray()
        self.last_block = b""
        self.has_response = self.is_half_closed = self.is_over = False
        self.serialize: Callable[[Any], bytes] | None = None
        self._connection = connection
        self._is_canceled = False
        self._num_writes = 0
        self._task: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: tuple[tuple[str, str | bytes], ...] = ()
        self._callbacks: list[Callable[[Any], None]] = []
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        if head.timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.time() + head.timeout_s
            self._timer = loop.call_at(self._deadline, self._expire)

    # For methods: the interface of grpc.aio.ServicerContext.

    async def read(self) -> Any:
        """Return the client's next message, or `grpc.aio.EOF`."""
        try:
            return await anext(self.messages)
        except StopAsyncIteration:
            return grpc.aio.EOF

    async def write(self, message: Any) -> None:
        """Send a message; wait while the client or the network cannot take it."""
        if self.is_over:
            raise grpc.aio.UsageError("the call has ended")
        body = message if self.serialize is None else self.serialize(message)
        connection = self._connection
        if len(body) > connection.limits.max_send_bytes:
            await self.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the response is too large ({len(body)} bytes, the limit is {connection.limits.max_send_bytes})",
            )
        if not self.has_response:
            self._respond(())
        if not connection.send_message(self, body):
            await self._until_drained()
            return
        self._num_writes += 1
        if connection.num_unwritten > _MAX_BYTES_PER_TURN or not self._num_writes % _MAX_WRITES_PER_TURN:
            await asyncio.sleep(0)

    async def send_initial_metadata(self, initial_metadata: _Items) -> None:
        if self.is_over or self.has_response:
            raise grpc.aio.UsageError("the response has begun")
        self._respond(tuple(initial_metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: _Items | None = None) -> Any:
        if self.is_over:
            raise grpc.aio.UsageError("the call has ended")
        if trailing_metadata is not None:
            self.set_trailing_metadata(trailing_metadata)
        self.end(grpc.StatusCode.UNKNOWN if code is grpc.StatusCode.OK else code, details)
        raise grpc.aio.AbortError

    async def abort_with_status(self, status: grpc.Status) -> Any:
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: _Items) -> None:
        items = tuple((key, value) for key, value in trailing_metadata)
        encode_metadata(items)  # raises an error for invalid items
        self._trailing = items

    def code(self) -> grpc.StatusCode | None:  # type: ignore[override]  # None if it is not set
        return self._code

    def details(self) -> str:
        """Return the description of the status that is set."""
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing

    def invocation_metadata(self) -> Any:
        return self.head.metadata

    def time_remaining(self) -> float | None:  # type: ignore[override]  # None if there is no deadline
        """Return the seconds until the deadline."""
        if self._deadline is None:
            return None
        return max(self._deadline - asyncio.get_running_loop().time(), 0.0)

    def peer(self) -> str:
        """Return the client's address in gRPC's format."""
        return self._connection.peer

    def peer_identities(self) -> Iterable[bytes] | None:
        """Return the names in the client's certificate."""
        names = self.auth_context()
        return names.get("x509_subject_alternative_name") or names.get("x509_common_name")

    def peer_identity_key(self) -> str | None:
        """Return the kind of `peer_identities`."""
        names = self.auth_context()
        keys = ("x509_subject_alternative_name", "x509_common_name")
        return next((key for key in keys if key in names), None)

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return properties of the client's TLS connection."""
        return self._connection.auth_context

    def set_compression(self, compression: grpc.Compression) -> None:
        """Do nothing: responses are not compressed."""

    def disable_next_message_compression(self) -> None:
        """Do nothing: responses are not compressed."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def cancelled(self) -> bool:
        """Return whether the call was canceled, or its deadline passed."""
        return self._is_canceled

    def done(self) -> bool:
        """Return whether the call has ended."""
        return self.is_over

    # For the server.

    def start(self, task: asyncio.Task[None]) -> None:
        """Set the task that runs the method."""
        self._task = task

    def release_task(self) -> None:
        """Drop the task, which has ended and may hold this call."""
        self._task = None

    @property
    def is_status_set(self) -> bool:
        """Whether the method has set a status other than OK."""
        return self._code is not None and self._code is not grpc.StatusCode.OK

    def end(self, code: grpc.StatusCode | None = None, details: str | None = None) -> None:
        """Send the status, by default the one that was set; no effect if the call has ended."""
        if self.is_over:
            return
        code = code or self._code or grpc.StatusCode.OK
        text = self._details if details is None else details
        self._code, self._details = code, text
        block = status_block(code, shorten_details(text), self._trailing, is_only=not self.has_response)
        self.end_with(block)

    def end_with(self, block: bytes) -> None:
        """Send the last headers."""
        if not self.is_over:
            self.has_response = True
            self._finish()
            self._connection.end(self, block)

    def refuse(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status, and cancel its task."""
        if not self.is_over:
            self.end(code, details)
            self._cancel_task()

    def grant(self, num_bytes: int) -> None:
        """Let the client send more bytes."""
        self._connection.grant(self, num_bytes)

    # For the connection.

    def cancel(self) -> None:
        """End the call because the response can no longer be received."""
        self.unsent.clear()
        if not self.is_over:
            self._is_canceled = True
            self._finish()
            self._cancel_task()

    def drain(self) -> None:
        """Resume the method's write after all its bytes were sent."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _respond(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        block = response_block(metadata)
        self.has_response = True
        self._connection.send_headers(self, block)

    async def _until_drained(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()
        try:
            await self._drained
        finally:
            self._drained = None

    def _expire(self) -> None:
        if not self.is_over:
            self._is_canceled = True
            if self.unsent:
                self._connection.cut(self)
            else:
                self.refuse(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed")

    def _finish(self) -> None:
        self.is_over = True
        self.messages.drop()
        if self._timer is not None:
            self._timer.cancel()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            asyncio.get_running_loop().call_soon(callback, self)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
