"""Frames between services: length-prefixed protobuf messages on a socket, as specified in protos/frames.proto.

Messages are handled as they are read, and written as they are created, without a task, future or wake-up per message;
messages posted in one iteration of the event loop are written together. While a connection's buffer is full
(`is_writable`), writers wait and keep their cursors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from contextvars import Context, ContextVar, copy_context
from enum import IntEnum
from typing import Any, Self, cast

import grpc.aio
from google.protobuf.message import Message

from midstream.config import DetokenizerConfig, SchedulerConfig
from midstream.rpc.connection import Connection, FrameHandler
from midstream.rpc.local_connection import LocalConnection, connect_ends
from midstream.rpc.tunnel import TunnelTransport
from midstream.security.tls import Tls
from protos import frames_pb2 as pb
from protos import frames_pb2_grpc

logger = logging.getLogger(__name__)

# Same values as for gRPC's keepalive.
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 10.0, 15.0
_HELLO_S = 5.0
_HANDSHAKE_S = 10.0
_CLOSE_S = 1.0
_TOKEN_S = 30.0
_TOKEN_BYTES = 16
_MAX_TOKENS = 1024
_MAX_UNKNOWN = 64
_HIGH_WATER = 256 << 10
_LENGTH_BYTES = 4
_HEAD = struct.Struct(">IB")
_UCRED = struct.Struct("3i")


class Kind(IntEnum):
    """The kinds of frames."""

    HELLO = 1
    WELCOME = 2
    MESSAGE = 3
    PING = 4
    PONG = 5


class FrameError(Exception):
    """A frame is invalid or unexpected."""


class FrameConnection(asyncio.Protocol):
    """One end of a connection over a socket or within a call; see Connection.

    Attributes:
        is_open: Whether frames can be sent, from the welcome until the connection is closed.
        is_writable: Whether frames can be sent and the send buffer has room.
        on_read: Called after the messages that were read together have been handled.
    """

    def __init__(
        self,
        max_message_bytes: int,
        handler: FrameHandler,
        *,
        keepalive_s: float = KEEPALIVE_S,
        timeout_s: float = KEEPALIVE_TIMEOUT_S,
    ) -> None:
        """Create one end of a connection that is not connected yet.

        Args:
            keepalive_s: Time without a message after which the peer is pinged.
            timeout_s: Time without a message after which the connection is closed.
        """
        self.handler = handler
        self.is_open = False
        self.on_read: Callable[[], None] = lambda: None
        self.on_welcome: Callable[[], None] = lambda: None
        self.on_hello: Callable[[bytes], None] = lambda _: self.fail(
            FrameError("a hello was received from the accepting side")
        )
        self._max_bytes = max_message_bytes + 1
        self._keepalive_s = keepalive_s
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_full = False
        self._awaits_welcome = False
        self._is_lost = False
        self._is_closed = False
        self._error: Exception | None = None
        self._buffer = bytearray()
        self._posted: list[bytes] = []
        self._num_posted_bytes = 0
        self._heard_at = self._loop.time()
        self._pinged_at: float | None = None  # time of a ping since `_heard_at`
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_writable(self) -> bool:
        """Whether frames can be sent and the send buffer, with the messages posted in this iteration, has room."""
        return self.is_open and not self._is_full and self._num_posted_bytes <= _HIGH_WATER

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        if self._is_closed:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._heard_at, self._pinged_at = self._loop.time(), None
        try:
            try:
                self._parse(data)
            finally:
                self.on_read()
        except Exception as error:  # noqa: BLE001 (told to the handler)
            self.fail(error)

    def eof_received(self) -> None:
        """Close the whole connection when the peer closes its side: half-open connections are not used."""

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self.is_open:
            self.handler.resume()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_lost:
            self._is_lost = True
            self.handler.lose(self._error or error)

    def say_hello(self, token: bytes) -> None:
        """Send the first frame; only the side that connects calls this."""
        self._awaits_welcome = True
        self._write(Kind.HELLO, token)

    def open(self, *, welcome: bool) -> None:
        """Accept messages from now on; with `welcome`, also notify the other side."""
        self.is_open, self._awaits_welcome = True, False
        if welcome:
            self._write(Kind.WELCOME)
        self._timer = self._loop.call_later(self._keepalive_s, self._look)

    def send(self, message: Message) -> None:
        """Write a message immediately."""
        if self.is_open:
            self._write(Kind.MESSAGE, message.SerializeToString())

    def post(self, message: Message) -> None:
        """Write a message at the end of this event-loop iteration, together with other messages."""
        if not self._posted:
            self._loop.call_soon(self._flush)
        body = message.SerializeToString()
        self._posted += (_HEAD.pack(len(body) + 1, Kind.MESSAGE), body)
        self._num_posted_bytes += len(body)

    def fail(self, error: Exception) -> None:
        """Close the connection immediately because of an error; unsent data is dropped."""
        self._error = self._error or error
        self.is_open, self._is_closed = False, True
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection once all data has been written."""
        self._flush()
        self.is_open, self._is_closed = False, True
        if self._transport is not None:
            self._transport.close()

    def peer_uid(self) -> int | None:
        """Return the user id of the process at the other end of a Unix socket; None for other sockets."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        if sock is None or sock.family != socket.AF_UNIX:
            return None
        _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return int(uid)

    def _write(self, kind: Kind, body: bytes = b"") -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_HEAD.pack(len(body) + 1, kind) + body)

    def _flush(self) -> None:
        posted, self._posted = self._posted, []
        was_full = self._num_posted_bytes > _HIGH_WATER
        self._num_posted_bytes = 0
        if not posted or not self.is_open or self._transport is None:
            return
        self._transport.write(b"".join(posted))
        if self._transport.get_write_buffer_size() > self._max_bytes:
            self.fail(FrameError("the peer stopped reading"))
        elif was_full and self.is_writable:
            self.handler.resume()

    def _parse(self, data: bytes) -> None:
        buffer = self._buffer
        source: bytes | bytearray = data
        if buffer:
            buffer += data
            source = buffer
        at, end = 0, len(source)
        while end - at >= _HEAD.size and self._error is None:
            length, kind = _HEAD.unpack_from(source, at)
            if not 1 <= length <= (self._max_bytes if self.is_open else _TOKEN_BYTES + 1):
                raise FrameError(f"invalid frame length: {length} bytes")
            stop = at + _LENGTH_BYTES + length
            if stop > end:
                break
            body = bytes(source[at + _HEAD.size : stop])
            at = stop
            self._obey(kind, body)
        if source is buffer:
            del buffer[:at]
        elif at < end:
            buffer += data[at:]

    def _obey(self, kind: int, body: bytes) -> None:
        if not self.is_open:
            if kind == Kind.HELLO:
                self.on_hello(body)
            elif kind == Kind.WELCOME and self._awaits_welcome:
                self.open(welcome=False)
                self.on_welcome()
            else:
                raise FrameError(f"unexpected frame kind {kind} before the connection is open")
        elif kind == Kind.MESSAGE:
            self.handler.take(self.handler.message_class.FromString(body))
        elif kind == Kind.PING:
            self._write(Kind.PONG)
        elif kind != Kind.PONG:
            raise FrameError(f"unknown frame kind {kind}")

    def _look(self) -> None:
        """Ping a peer that has been silent for `keepalive_s`, and close the connection if it does not reply in time.

        The time for the reply starts with the ping: if this process itself did not run for a while, the peer has not
        had time to reply.
        """
        now, reply_s = self._loop.time(), self._timeout_s - self._keepalive_s
        due = self._heard_at + self._keepalive_s if self._pinged_at is None else self._pinged_at + reply_s
        if now >= due and self._pinged_at is not None:
            self.fail(TimeoutError(f"no message for {now - self._heard_at:.1f} s"))
            return
        if now >= due:
            self._write(Kind.PING)
            self._pinged_at, due = now, now + reply_s
        self._timer = self._loop.call_at(due, self._look)


class Pump:
    """Writes all new data as a batch at the end of each event-loop iteration, while the connection is writable."""

    def __init__(
        self,
        connection: Connection,
        collect: Callable[[], Message | None],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the writer.

        Args:
            collect: Returns the next batch; None if there is nothing new.
            after: Called when everything has been written.
        """
        self._connection = connection
        self._collect = collect
        self._after = after
        self._is_due = False
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        """Schedule a write, because there is new data."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.run)

    def run(self) -> None:
        """Write new data."""
        self._is_due = False
        connection = self._connection
        try:
            while connection.is_writable and (batch := self._collect()) is not None:
                connection.send(batch)
            self._after()
        except Exception as error:
            logger.exception("a batch could not be written")
            connection.fail(error)


class _Unknown:
    """Handles a connection that has not sent its hello yet."""

    message_class = pb.FramesOffer

    def __init__(self, forget: Callable[[], object]) -> None:
        self._forget = forget

    def take(self, message: Message) -> None:
        raise FrameError("message received before the hello")

    def resume(self) -> None:
        pass

    def lose(self, error: Exception | None) -> None:
        self._forget()


Accept = Callable[[Connection], FrameHandler]

# The servers of this process, if it hosts several parts. Its other parts then connect to them without a socket.
local_servers: ContextVar[list[FrameServer] | None] = ContextVar("local_servers", default=None)


class FrameServer(frames_pb2_grpc.FramesServicer):
    """Accepts frame connections that were offered over gRPC, on its own port and within calls of its gRPC service.

    Attributes:
        port: TCP port, set when the server has started.
    """

    def __init__(self, host: str, port: int, *, max_message_bytes: int, tls: Tls | None = None) -> None:
        """Create the listener; port 0 chooses a free one."""
        self.port = port
        self.connections: dict[Connection, None] = {}
        self._host = host
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._unix_name = ""
        self._tokens: dict[bytes, tuple[float, Accept]] = {}
        self._unknown: dict[FrameConnection, None] = {}
        self._servers: list[asyncio.Server] = []
        self._none_left: asyncio.Event | None = None
        self._is_closed = False
        self._context: Context | None = None

    @classmethod
    def from_config(cls, config: SchedulerConfig | DetokenizerConfig, tls: Tls | None) -> Self:
        return cls(config.host, config.frames_port, max_message_bytes=config.max_message_bytes, tls=tls)

    async def start(self) -> None:
        """Listen. Raises OSError if the port is in use."""
        loop = asyncio.get_running_loop()
        self._context = copy_context()
        local = local_servers.get()
        if local is not None:
            local.append(self)
        context = self._tls.http_context() if self._tls is not None else None
        limit_s = _HANDSHAKE_S if context is not None else None
        server = await loop.create_server(
            self._connect, self._host, self.port, ssl=context, ssl_handshake_timeout=limit_s
        )
        self.port = server.sockets[0].getsockname()[1]
        self._servers.append(server)
        # A name in the abstract namespace leaves no file behind when the process is killed; only Linux supports it.
        name = f"midstream-{secrets.randbits(128):032x}"
        with contextlib.suppress(NotImplementedError, OSError):
            self._servers.append(await loop.create_unix_server(self._connect, f"\0{name}"))
            self._unix_name = name

    def offer(self, accept: Accept) -> pb.FramesOffer:
        """Return an offer for one connection; `accept` is called when it opens."""
        now = asyncio.get_running_loop().time()
        self._tokens = {token: item for token, item in self._tokens.items() if item[0] > now}
        while len(self._tokens) >= _MAX_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        if self._tls is not None:
            self._tls.refresh()
        token = secrets.randbits(8 * _TOKEN_BYTES).to_bytes(_TOKEN_BYTES, "big")
        self._tokens[token] = (now + _TOKEN_S, accept)
        return pb.FramesOffer(port=self.port, unix_name=self._unix_name, token=token)

    async def Tunnel(  # type: ignore[override]  # it reads from and writes to the context
        self, request_iterator: object, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve one connection until either side closes it."""
        await TunnelTransport(context, self._connect()).run()

    async def close(self) -> None:
        """Stop listening, and close all connections once their data has been written."""
        self._is_closed = True
        # If a server is closed when a connection has been accepted but has no transport yet, asyncio forgets the socket
        # without closing it.
        loop = asyncio.get_running_loop()
        for server in self._servers:
            for listener in server.sockets:
                loop.remove_reader(listener)
        await asyncio.sleep(0)
        for server in self._servers:
            server.close()
        for connection in (*self.connections, *self._unknown):
            connection.close()
        await self._wait_until_none_left()
        for connection in (*self.connections, *self._unknown):
            connection.fail(ConnectionAbortedError("the server has stopped"))
        await self._wait_until_none_left()

    async def _wait_until_none_left(self) -> None:
        if self.connections or self._unknown:
            self._none_left = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), _CLOSE_S)

    def _connect(self) -> FrameConnection:
        connection = FrameConnection(self._max_message_bytes, _Unknown(lambda: self._forget(connection)))
        connection.on_hello = lambda token: self._greet(connection, token)
        if len(self._unknown) >= _MAX_UNKNOWN:
            next(iter(self._unknown)).fail(FrameError("too many connections have not sent a hello"))
        self._unknown[connection] = None
        if self._is_closed:  # accepted before the server was closed, and called back afterwards
            connection.close()
        asyncio.get_running_loop().call_later(_HELLO_S, self._expire, connection)
        return connection

    def _expire(self, connection: FrameConnection) -> None:
        if connection in self._unknown:
            connection.fail(TimeoutError("no hello received"))

    def _greet(self, connection: FrameConnection, token: bytes) -> None:
        if not _is_own(connection):
            # The token stays valid, because the other side now connects over TCP.
            connection.fail(FrameError("the socket's peer is another user"))
            return
        accept = self._take_token(token)
        if accept is None:
            logger.warning("connection rejected: unknown token")
            connection.fail(FrameError("unknown token"))
            return
        self._unknown.pop(connection, None)
        connection.handler = _Counted(accept(connection), lambda: self._forget(connection))
        self.connections[connection] = None
        connection.open(welcome=True)

    def _take_token(self, token: bytes) -> Accept | None:
        expires_at, accept = self._tokens.pop(token, (0.0, None))
        return accept if expires_at > asyncio.get_running_loop().time() else None

    def connect_locally(self, token: bytes, handler: FrameHandler) -> LocalConnection | None:
        """Open an offered connection from another part of this process; None if it was not offered by this server."""
        accept = None if self._is_closed or self._context is None else self._take_token(token)
        if accept is None or self._context is None:
            return None
        here, there = (
            LocalConnection(handler, copy_context()),
            LocalConnection(_Unknown(lambda: None), self._context.copy()),
        )
        there.handler = _Counted(self._context.copy().run(accept, there), lambda: self._forget(there))
        self.connections[there] = None
        connect_ends(here, there)
        return here

    def _forget(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        self._unknown.pop(connection, None)  # type: ignore[call-overload]
        if self._none_left is not None and not self.connections and not self._unknown:
            self._none_left.set()


class _Counted:
    """Handles an accepted connection."""

    def __init__(self, handler: FrameHandler, forget: Callable[[], object]) -> None:
        self.message_class = handler.message_class
        self.take = handler.take
        self.resume = handler.resume
        self._handler = handler
        self._forget = forget

    def lose(self, error: Exception | None) -> None:
        self._forget()
        self._handler.lose(error)


def _is_own(connection: FrameConnection) -> bool:
    """Return whether the peer is trusted; on a Unix socket, only processes of this user or of root are."""
    return connection.peer_uid() in (None, 0, os.geteuid())


async def connect(
    offer: pb.FramesOffer,
    target: str,
    handler: FrameHandler,
    *,
    max_message_bytes: int,
    tls: Tls | None = None,
    server_name: str = "",
    keepalive_s: float = KEEPALIVE_S,
    timeout_s: float = KEEPALIVE_TIMEOUT_S,
) -> Connection:
    """Open an offered connection; within a process that hosts both ends, without a socket.

    Args:
        offer: The offer that the other side sent over gRPC.
        server_name: Name that its certificate must contain; empty means its address.
        keepalive_s: Time without a message after which the peer is pinged.
        timeout_s: Time without a message after which the connection is closed.

    Raises:
        OSError: The connection cannot be opened in time.
    """
    for server in local_servers.get() or ():
        local = server.connect_locally(offer.token, handler)
        if local is not None:
            return local
    loop = asyncio.get_running_loop()

    def make() -> FrameConnection:
        return FrameConnection(max_message_bytes, handler, keepalive_s=keepalive_s, timeout_s=timeout_s)

    async with asyncio.timeout(_HELLO_S):
        if offer.unix_name:
            # This fails if the other side is on another host, or if either side does not trust the other's user.
            with contextlib.suppress(NotImplementedError, OSError):
                connection = make()
                return await _greet(
                    connection, offer, loop.create_unix_connection(lambda: connection, f"\0{offer.unix_name}")
                )
        host = target.rpartition(":")[0].strip("[]")
        context = tls.client_context() if tls is not None else None
        name = (server_name or host) if tls is not None else None
        connection = make()
        return await _greet(
            connection,
            offer,
            loop.create_connection(lambda: connection, host, offer.port, ssl=context, server_hostname=name),
        )


async def connect_within(
    channel: grpc.aio.Channel,
    offer: pb.FramesOffer,
    handler: FrameHandler,
    *,
    max_message_bytes: int,
    keepalive_s: float = KEEPALIVE_S,
    timeout_s: float = KEEPALIVE_TIMEOUT_S,
) -> FrameConnection:
    """Open an offered connection within a call over `channel`; otherwise like `connect`."""
    connection = FrameConnection(max_message_bytes, handler, keepalive_s=keepalive_s, timeout_s=timeout_s)
    stub: frames_pb2_grpc.FramesAsyncStub = frames_pb2_grpc.FramesStub(channel)  # type: ignore[assignment]

    async def call() -> None:
        tunnel = stub.Tunnel()
        TunnelTransport(tunnel, connection).start(tunnel.cancel)

    async with asyncio.timeout(_HELLO_S):
        return await _greet(connection, offer, call())


async def _greet(connection: FrameConnection, offer: pb.FramesOffer, opening: Awaitable[object]) -> FrameConnection:
    """Open a connection's transport, send its hello, and return it once it is welcome. Raises OSError if it is not."""
    handler, waiting = connection.handler, _Waiting(asyncio.get_running_loop().create_future())

    def be_welcomed() -> None:
        connection.handler = handler
        if not waiting.welcomed.done():
            waiting.welcomed.set_result(None)

    connection.handler, connection.on_welcome = waiting, be_welcomed
    await opening
    if _is_own(connection):
        connection.say_hello(offer.token)
    else:
        connection.fail(FrameError("the socket belongs to another user"))
    try:
        await waiting.welcomed
    except BaseException:
        connection.fail(ConnectionAbortedError("given up"))
        raise
    return connection


class _Waiting:
    """Handles a connection that has not been welcomed yet."""

    message_class = pb.FramesOffer

    def __init__(self, welcomed: asyncio.Future[None]) -> None:
        self.welcomed = welcomed
        # Retrieve the exception, since a connection may be lost while no task waits for it.
        welcomed.add_done_callback(lambda done: done.cancelled() or done.exception())

    def take(self, message: Message) -> None:
        raise FrameError("a message was received before the welcome")

    def resume(self) -> None:
        pass

    def lose(self, error: Exception | None) -> None:
        if not self.welcomed.done():
            self.welcomed.set_exception(ConnectionResetError(f"connection rejected: {error}"))
