"""One HTTP/2 connection of a client: frames, flow control and limits.

Errors of a stream end that stream; errors of the connection end it with GOAWAY. Data to write is collected in a list,
which is joined and written at the end of the event loop's iteration. While the socket's buffer is full, or a
flow-control window is exhausted, messages stay with their calls, which are served in turn when there is room.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import hpack

from midstream.rpc.http2 import wire
from midstream.rpc.http2.call import Call
from midstream.rpc.http2.limits import Budget, Limits
from midstream.rpc.http2.metadata import Head, http_status_block, read_head
from midstream.rpc.http2.wire import ErrorCode, ProtocolError, Setting, StreamError

logger = logging.getLogger(__name__)

_HIGH_WATER = 256 << 10
# A client may send this much before the connection's window is renewed. Streams have their own windows.
_CONNECTION_WINDOW = 4 << 20
# Larger frames would delay other streams of the connection.
_MAX_FRAME = 64 << 10
_MAX_HEADER_FRAMES = 16
_MAX_SETTINGS = 32
# Number of calls that are parsed in one iteration of the event loop.
_MAX_CALLS_PER_TURN = 32
_MAX_PING_STRIKES = 2
# Maximum number of unread replies that a client may cause, in addition to one per concurrent call.
_MAX_UNWRITTEN_REPLIES = 1000
_CLOSE_S = 2.0
# Time in which a client acknowledges that it will make no more calls here.
_GOAWAY_S = 2.0
# Time limit for sending the rest of a message before the call's status.
_LAST_BYTES_S = 30.0
_NEVER = float("-inf")
_MAX_KNOWN_BLOCKS = 32
_MAX_KNOWN_BLOCK_BYTES = 2 << 10
_GOAWAY_PING = b"goaway\0\0"
_KEEPALIVE_PING = b"alive?\0\0"
_HTTP1 = re.compile(rb"[A-Z]{3,7} [/*h]")
_HTTP1_REASON = b"This port is for gRPC. The HTTP API of a router has its own port, --http-port, by default 8000.\n"
_HTTP1_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\nContent-Length: "
    + str(len(_HTTP1_REASON)).encode()
    + b"\r\n\r\n"
    + _HTTP1_REASON
)

_Headers = tuple[tuple[bytes, bytes], ...]


class Owner(Protocol):
    """The server of a connection."""

    limits: Limits

    def add(self, connection: Connection) -> bool:
        """Add a connection; return False if no more connections are accepted."""

    def remove(self, connection: Connection) -> None:
        """Remove a connection that was lost."""

    def arrive(self, connection: Connection, call: Call) -> None:
        """Start a call in its turn."""


class Connection(asyncio.Protocol):
    """A connection.

    Attributes:
        peer: The client's address in gRPC's format.
        auth_context: Properties of the client's TLS connection.
        calls: Calls that have not ended on both sides, by stream.
        waiting: Calls that have not started, in order.
        num_running: Number of tasks that run methods.
        num_unwritten: Number of bytes that will be written at the end of the event loop's iteration.
        is_shared: Whether it was made to a port that other processes share.
    """

    def __init__(self, owner: Owner, on_lost: Callable[[], None] = lambda: None, *, is_shared: bool = False) -> None:
        """Create a connection; `on_lost` is called at its end."""
        self.is_shared = is_shared
        self.limits = owner.limits
        self.peer = "unknown"
        self.auth_context: Mapping[str, Iterable[bytes]] = {}
        self.calls: dict[int, Call] = {}
        self.waiting: deque[Call] = deque()
        self.num_running = 0
        self.num_unwritten = 0
        self._owner = owner
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._has_preface = self._has_settings = False
        self._greeting = b""
        self._is_closed = False
        self._is_paused = False
        self._continuation: asyncio.Handle | None = None
        # Headers that CONTINUATION frames will complete: stream, flags and fragments.
        self._headers: tuple[int, int, list[bytes]] | None = None
        # The size of a header list is checked later for each call, so that a list that is too large does not end the
        # connection.
        self._decoder = hpack.Decoder(4 * self.limits.max_metadata_bytes)
        self._table_update = wire.EMPTY_TABLE  # sent at the beginning of the first header block
        self._known_blocks: dict[bytes, _Headers] = {}
        self._known_heads: dict[_Headers, Head] = {}
        self._last_stream = 0
        self._last_accepted = wire.MAX_STREAM
        self._ending: asyncio.TimerHandle | None = None  # runs once the client was asked to make no more calls
        self._window = self._initial_window = wire.DEFAULT_WINDOW
        self._max_frame = wire.DEFAULT_FRAME
        self._room = _CONNECTION_WINDOW
        self._out: list[bytes] = []
        self._is_full = False
        self._num_replies = 0  # written while the buffer was full
        self._blocked = OrderedDict[Call, None]()  # calls with unsent bytes and an open window, in turn
        self._heard_at = self._loop.time()
        self._asked_at = _NEVER  # when the client was pinged
        self._pinged_at = _NEVER
        self._num_strikes = 0
        self._resets = Budget(self.limits.max_resets, self.limits.resets_per_s)
        self._idle_frames = Budget(self.limits.max_idle_frames, self.limits.idle_frames_per_s)
        self._timer: asyncio.TimerHandle | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        tls = transport.get_extra_info("ssl_object")
        if not self._owner.add(self) or (tls is not None and tls.selected_alpn_protocol() != "h2"):
            self._is_closed = True
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        self.peer = _peer_name(transport.get_extra_info("peername"))
        self.auth_context = _auth_context(tls) if tls is not None else {}
        first = [
            (Setting.MAX_CONCURRENT_STREAMS, self.limits.max_concurrent_streams),
            (Setting.MAX_HEADER_LIST_SIZE, self.limits.max_metadata_bytes),
        ]
        more = wire.window_update(0, _CONNECTION_WINDOW - wire.DEFAULT_WINDOW)
        self._greeting = wire.settings(first) + more
        self._timer = self._loop.call_later(self.limits.handshake_timeout_s, self._give_up, "no HTTP/2 settings")

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        self._heard_at = self._loop.time()
        if self._continuation is not None:
            self._buffer += data
        else:
            self._read(data)

    def eof_received(self) -> None:
        """Close the whole connection when the client closes its side: half-open connections are not used."""

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._num_replies = 0
        self._serve_blocked()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closed = True
        for handle in (self._timer, self._continuation, self._ending):
            if handle is not None:
                handle.cancel()
        self._out.clear()
        self._blocked.clear()
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.cancel()
        self._owner.remove(self)
        self._on_lost()

    # For calls

    def send_headers(self, call: Call, block: bytes) -> None:
        self._put_headers(call.number, block, end_stream=False)

    def send_message(self, call: Call, body: bytes) -> bool:
        """Send a message, or as much of it as there is room for; return whether all of it was sent."""
        size = len(body) + 5
        if self._is_full or size > call.window or size > self._window or size > self._max_frame or call.unsent:
            call.unsent += b"\0" + len(body).to_bytes(4, "big")
            call.unsent += body
            self._queue(call)
            self._serve_blocked()
            return not call.unsent
        call.window -= size
        self._window -= size
        self._num_strikes, self._pinged_at = 0, _NEVER
        out = self._out
        is_first = not out
        out.append(wire.message_head(call.number, size - 5))
        out.append(body)
        self.num_unwritten += size + 9
        if is_first:
            # If no other callback is due, waiting would combine no writes, and another iteration costs more than a
            # write.
            if getattr(self._loop, "_ready", True):
                self._loop.call_soon(self._flush)
            else:
                self._flush()
        return True

    def end(self, call: Call, block: bytes) -> None:
        """Send the last headers of a response, after the call's unsent bytes."""
        if call.unsent:
            call.last_block = block
            self._loop.call_later(_LAST_BYTES_S, self.cut, call)
        else:
            self._end(call, block)

    def cut(self, call: Call) -> None:
        """Reset a stream whose response cannot be completed."""
        if self.calls.get(call.number) is call:
            self._put(wire.rst_stream(call.number, ErrorCode.CANCEL))
            self._forget(call.number)

    def grant(self, call: Call, size: int) -> None:
        """Let the client send more bytes of a call."""
        if call.number in self.calls:
            call.room += size
            self._put(wire.window_update(call.number, size))

    # For the server

    def go_away(self) -> None:
        """Ask the client to make no more calls here. Calls that it makes before it has learned of this are served."""
        if self._is_closed or self._ending is not None:
            return
        self._ending = self._loop.call_later(_GOAWAY_S, self._accept_no_more)
        self._greet()
        # The number of the last accepted call is sent only once the client has acknowledged this first GOAWAY: proxies
        # fail a call that they have sent with a higher number.
        self._put(wire.goaway(wire.MAX_STREAM, ErrorCode.NO_ERROR, b"server is stopping"))
        self._put(wire.frame(wire.PING, 0, 0, _GOAWAY_PING))

    def _accept_no_more(self) -> None:
        if self._is_closed or self._last_accepted != wire.MAX_STREAM:
            return
        self._last_accepted = self._last_stream
        self._put(wire.goaway(self._last_accepted, ErrorCode.NO_ERROR, b"server is stopping"))
        self._close_if_unused()

    def _greet(self) -> None:
        """Send the server's settings, which come first. HTTP/1.1 clients get an answer that they can read instead."""
        if self._greeting and self._transport is not None:
            self._transport.write(self._greeting)
        self._greeting = b""

    def _refuse_http1(self) -> None:
        if self._transport is not None:
            self._transport.write(_HTTP1_ANSWER)
        self._greeting = b""
        self._is_closed = True
        self._hang_up()

    def close(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Close the connection once everything has been written."""
        if self._is_closed:
            return
        self._greet()
        self._put(wire.goaway(self._last_stream, code, reason.encode()[:200]))
        self._flush()
        self._is_closed = True
        self._blocked.clear()
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.cancel()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(_CLOSE_S, self._transport.abort)

    # Reading

    def _read(self, data: bytes) -> None:
        """Parse as many frames as fit into one iteration of the event loop."""
        source: bytes | bytearray = data
        if self._buffer:
            self._buffer += data
            source = self._buffer
        at = 0
        try:
            at = self._parse(source)
            self._serve_blocked()  # called once for all window updates
        except ProtocolError as error:
            self._fail(error.code, str(error))
        except Exception:
            logger.exception("a connection failed")
            self._fail(ErrorCode.INTERNAL_ERROR, "internal error")
        if self._is_closed:
            self._buffer.clear()
        elif source is self._buffer:
            del self._buffer[:at]
        elif at < len(source):
            self._buffer += memoryview(data)[at:]

    def _parse(self, source: bytes | bytearray) -> int:
        at, end = 0, len(source)
        if not self._has_preface:
            at = self._parse_preface(source)
            if not self._has_preface:
                return at
        num_calls = 0
        unpack = wire.HEAD.unpack_from
        while end - at >= wire.HEAD_BYTES and not self._is_closed:
            high, low, kind, flags, stream = unpack(source, at)
            size = high << 8 | low
            if size > wire.DEFAULT_FRAME:
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "a frame is too large")
            begin = at + wire.HEAD_BYTES
            stop = begin + size
            if stop > end:
                break
            if kind in (wire.HEADERS, wire.CONTINUATION):
                if num_calls == _MAX_CALLS_PER_TURN:
                    self._continue_later()
                    break
                num_calls += 1
            body = bytes(source[begin:stop])
            at = stop
            stream &= wire.MAX_STREAM
            try:
                self._obey(kind, flags, stream, body)
            except StreamError as error:
                self._reset(stream, error.code)
        return at

    def _parse_preface(self, source: bytes | bytearray) -> int:
        preface = bytes(source[: len(wire.PREFACE)])
        if _HTTP1.match(preface) and not wire.PREFACE.startswith(preface):
            self._refuse_http1()
            return len(source)
        if not wire.PREFACE.startswith(preface):
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 preface")
        if len(preface) < len(wire.PREFACE):
            return 0
        self._has_preface = True
        self._greet()
        return len(wire.PREFACE)

    def _continue_later(self) -> None:
        if self._continuation is None:
            self._continuation = self._loop.call_soon(self._continue)
            if self._transport is not None and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()

    def _continue(self) -> None:
        self._continuation = None
        if self._is_closed:
            return
        self._read(b"")
        if self._continuation is None and self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def _obey(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if self._headers is not None and (kind != wire.CONTINUATION or stream != self._headers[0]):
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a CONTINUATION frame was expected")
        if not self._has_settings and kind != wire.SETTINGS:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        handle = _HANDLERS.get(kind)
        if handle is None:
            self._idle()  # unknown frames are ignored
        else:
            handle(self, flags, stream, body)

    def _on_data(self, flags: int, stream: int, body: bytes) -> None:
        size = len(body)
        if not stream or stream > self._last_stream:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "DATA on a stream that was not opened")
        if flags & wire.PADDED:
            body = _unpad(body)
        self._count_data(size)
        if not body and not flags & wire.END_STREAM:
            self._idle()
        call = self.calls.get(stream)
        if call is None:
            return  # this side has already ended the call
        if call.is_half_closed:
            raise StreamError(ErrorCode.STREAM_CLOSED, "DATA after the end of a stream")
        call.room -= size
        if call.room < 0:
            raise StreamError(ErrorCode.FLOW_CONTROL_ERROR, "the stream's window was exceeded")
        if not call.is_over:
            call.messages.feed(body, size)
        if flags & wire.END_STREAM:
            self._half_close(call)

    def _count_data(self, size: int) -> None:
        """Count received bytes. Unread streams are held back by their own windows, without affecting others."""
        self._room -= size
        if self._room < 0:
            raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window was exceeded")
        if self._room <= _CONNECTION_WINDOW // 2:
            self._put(wire.window_update(0, _CONNECTION_WINDOW - self._room))
            self._room = _CONNECTION_WINDOW

    def _on_headers(self, flags: int, stream: int, body: bytes) -> None:
        if not stream & 1:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a client's stream ids must be odd")
        if flags & wire.PADDED:
            body = _unpad(body)
        if flags & wire.HAS_PRIORITY:
            if len(body) < 5:
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "HEADERS is too short")
            if int.from_bytes(body[:4], "big") & wire.MAX_STREAM == stream:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")
            body = body[5:]
        if flags & wire.END_HEADERS:
            self._take_headers(stream, flags, body)
        else:
            self._headers = (stream, flags, [body])

    def _on_continuation(self, flags: int, stream: int, body: bytes) -> None:
        if self._headers is None:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        _, first_flags, fragments = self._headers
        fragments.append(body)
        size = sum(map(len, fragments))
        if len(fragments) > _MAX_HEADER_FRAMES or size > 4 * self.limits.max_metadata_bytes:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "headers are too large")
        if flags & wire.END_HEADERS:
            self._headers = None
            self._take_headers(stream, first_flags, b"".join(fragments))

    def _take_headers(self, stream: int, flags: int, block: bytes) -> None:
        headers = self._decode(block)
        ends = bool(flags & wire.END_STREAM)
        call = self.calls.get(stream)
        if call is not None:
            if call.is_half_closed:
                raise StreamError(ErrorCode.STREAM_CLOSED, "HEADERS after the end of a stream")
            if not ends:
                raise StreamError(ErrorCode.PROTOCOL_ERROR, "trailers do not end the stream")
            self._half_close(call)
            return
        if stream <= self._last_stream:
            self._idle()  # this side has already ended the call
            return
        self._last_stream = stream
        num_calls = max(len(self.calls), self.num_running + len(self.waiting))
        if stream > self._last_accepted or num_calls >= self.limits.max_concurrent_streams:
            self._reset(stream, ErrorCode.REFUSED_STREAM)
        else:
            self._begin(stream, headers, ends)

    def _begin(self, stream: int, headers: _Headers, ends: bool) -> None:
        head = self._known_heads.get(headers)
        if head is None:
            head = read_head(headers, self.limits.max_metadata_bytes)
            if not head.http_status and head.problem is None:  # so it is not too large either
                if len(self._known_heads) == _MAX_KNOWN_BLOCKS:
                    self._known_heads.clear()
                self._known_heads[headers] = head
        call = Call(
            self,
            stream,
            head,
            window=self._initial_window,
            room=wire.DEFAULT_WINDOW,
            max_receive_bytes=self.limits.max_receive_bytes,
        )
        self.calls[stream] = call
        if ends:
            self._half_close(call)
        if head.http_status:
            call.end_with(http_status_block(head.http_status))
        elif head.problem is not None:
            call.end(*head.problem)
        else:
            self._owner.arrive(self, call)

    def _decode(self, block: bytes) -> _Headers:
        headers = self._known_blocks.get(block)
        if headers is not None:
            return headers
        table = self._decoder.header_table
        before, first = (table.maxsize, len(table.dynamic_entries)), next(iter(table.dynamic_entries), None)
        try:
            headers = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
        except hpack.OversizedHeaderListError:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "headers are too large") from None
        except hpack.HPACKError:
            raise ProtocolError(ErrorCode.COMPRESSION_ERROR, "headers cannot be decoded") from None
        # A block that did not change the dynamic table decodes to the same headers until another block changes the
        # table.
        after = (table.maxsize, len(table.dynamic_entries))
        if before != after or next(iter(table.dynamic_entries), None) is not first:
            self._known_blocks.clear()
        elif len(self._known_blocks) < _MAX_KNOWN_BLOCKS and len(block) <= _MAX_KNOWN_BLOCK_BYTES:
            self._known_blocks[block] = headers
        return headers

    def _on_priority(self, flags: int, stream: int, body: bytes) -> None:
        if not stream:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "PRIORITY without a stream")
        if len(body) != 5:
            raise StreamError(ErrorCode.FRAME_SIZE_ERROR, "invalid length of PRIORITY")
        self._idle()

    def _on_reset(self, flags: int, stream: int, body: bytes) -> None:
        wire.read_number(body)
        if not stream or stream > self._last_stream:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "RST_STREAM for a stream that was not opened")
        if not self._resets.spend(self._heard_at):
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "too many calls were canceled")
        self._forget(stream)

    def _on_settings(self, flags: int, stream: int, body: bytes) -> None:
        if stream or (flags & wire.ACK and not self._has_settings):
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "unexpected SETTINGS")
        if flags & wire.ACK:
            if body:
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement has settings")
            return
        if not self._has_settings:
            self._has_settings = True
            self._keep_alive()
        self._idle()
        self._obey_settings(wire.read_settings(body))
        self._reply(wire.frame(wire.SETTINGS, wire.ACK, 0))

    def _obey_settings(self, values: Sequence[tuple[int, int]]) -> None:
        if len(values) > _MAX_SETTINGS:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "too many settings")
        initial_window = self._initial_window
        for name, value in values:
            if name == Setting.INITIAL_WINDOW_SIZE:
                if value > wire.MAX_WINDOW:
                    raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "the initial window is too large")
                initial_window = value
            elif name == Setting.MAX_FRAME_SIZE:
                if not wire.DEFAULT_FRAME <= value < 1 << 24:
                    raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "the maximum frame size is invalid")
                self._max_frame = min(value, _MAX_FRAME)
            elif name == Setting.ENABLE_PUSH and value > 1:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is invalid")
        if initial_window != self._initial_window:
            self._set_initial_window(initial_window)

    def _keep_alive(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self.limits.keepalive_s, self._look)

    def _set_initial_window(self, value: int) -> None:
        change, self._initial_window = value - self._initial_window, value
        for call in self.calls.values():
            call.window += change
            self._queue(call)
            if call.window > wire.MAX_WINDOW:
                raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "a stream's window is too large")

    def _on_push_promise(self, flags: int, stream: int, body: bytes) -> None:
        raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a client cannot push")

    def _on_ping(self, flags: int, stream: int, body: bytes) -> None:
        if stream:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(body) != 8:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "invalid length of PING")
        if flags & wire.ACK:
            if body == _GOAWAY_PING and self._ending is not None:
                self._accept_no_more()
            return
        if self._heard_at - self._pinged_at < self.limits.min_ping_interval_s:
            self._num_strikes += 1
            if self._num_strikes > _MAX_PING_STRIKES:
                raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._pinged_at = self._heard_at
        self._reply(wire.frame(wire.PING, wire.ACK, 0, body))

    def _on_goaway(self, flags: int, stream: int, body: bytes) -> None:
        if stream:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(body) < 8:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY is too short")
        self._idle()  # the client's calls continue

    def _on_window_update(self, flags: int, stream: int, body: bytes) -> None:
        size = wire.read_number(body)
        if not stream:
            if not size or self._window + size > wire.MAX_WINDOW:
                code = ErrorCode.FLOW_CONTROL_ERROR if size else ErrorCode.PROTOCOL_ERROR
                raise ProtocolError(code, "invalid WINDOW_UPDATE")
            self._window += size
        else:
            if stream > self._last_stream:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE for a stream that was not opened")
            call = self.calls.get(stream)
            if call is None:
                return
            if not size or call.window + size > wire.MAX_WINDOW:
                code = ErrorCode.FLOW_CONTROL_ERROR if size else ErrorCode.PROTOCOL_ERROR
                raise StreamError(code, "invalid WINDOW_UPDATE")
            call.window += size
            self._queue(call)

    def _half_close(self, call: Call) -> None:
        call.is_half_closed = True
        call.messages.end()

    def _idle(self) -> None:
        """Count a frame that has no effect."""
        if not self._idle_frames.spend(self._heard_at):
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "too many frames without an effect")

    # Writing

    def _put(self, data: bytes) -> None:
        self._num_strikes, self._pinged_at = 0, _NEVER  # clients may ping while they receive data
        self._append(data)

    def _put_headers(self, stream: int, block: bytes, *, end_stream: bool) -> None:
        block, self._table_update = self._table_update + block, b""
        self._put(wire.header_frames(stream, block, self._max_frame, end_stream=end_stream))

    def _append(self, data: bytes) -> None:
        if self._is_closed:
            return
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)
        self.num_unwritten += len(data)

    def _reply(self, data: bytes) -> None:
        """Send a reply that a client can cause at no cost."""
        if self._is_unread():
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "replies are not read")
        self._append(data)

    def _is_unread(self) -> bool:
        """Count a reply; return whether too many were caused by a client that does not read them."""
        self._num_replies += self._is_full
        return self._num_replies > _MAX_UNWRITTEN_REPLIES + self.limits.max_concurrent_streams

    def _flush(self) -> None:
        out = self._out
        if not out or self._transport is None or self._is_closed:
            return
        data = b"".join(out)
        out.clear()
        self.num_unwritten = 0
        self._transport.write(data)

    def _queue(self, call: Call) -> None:
        """Let a call take turns if it has something to send and its own window is open."""
        if call.unsent and call.window > 0:
            self._blocked[call] = None
        else:
            self._blocked.pop(call, None)

    def _serve_blocked(self) -> None:
        """Send pending data of calls in round-robin order, one frame at a time, while there is room."""
        while self._blocked and not self._is_full and self._window > 0:
            call, _ = self._blocked.popitem(last=False)
            unsent = call.unsent
            size = min(len(unsent), call.window, self._window, self._max_frame)
            call.window -= size
            self._window -= size
            self._put(wire.frame(wire.DATA, 0, call.number, bytes(memoryview(unsent)[:size])))
            del unsent[:size]
            self._queue(call)
            if not unsent:
                if call.last_block:
                    self._end(call, call.last_block)
                else:
                    call.drain()
            if self.num_unwritten > _HIGH_WATER:
                self._flush()  # this may set is_full

    def _end(self, call: Call, block: bytes) -> None:
        if self.calls.pop(call.number, None) is None:
            return
        if self._is_unread():
            self._fail(ErrorCode.ENHANCE_YOUR_CALM, "replies are not read")
            return
        self._put_headers(call.number, block, end_stream=True)
        if not call.is_half_closed:
            self._put(wire.rst_stream(call.number, ErrorCode.NO_ERROR))
        self._close_if_unused()

    def _reset(self, stream: int, code: ErrorCode) -> None:
        self._reply(wire.rst_stream(stream, code))
        self._forget(stream)
        if code is not ErrorCode.REFUSED_STREAM and not self._resets.spend(self._heard_at):
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "too many errors")

    def _forget(self, stream: int) -> None:
        call = self.calls.pop(stream, None)
        if call is not None:
            self._blocked.pop(call, None)
            call.cancel()
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        """Close the connection after its last call, if no more calls are accepted."""
        if not self.calls and self._last_accepted != wire.MAX_STREAM:
            self._loop.call_soon(self.close)

    def _fail(self, code: ErrorCode, reason: str) -> None:
        logger.debug("closing the connection of %s: %s", self.peer, reason)
        self.close(code, reason)

    def _give_up(self, reason: str) -> None:
        logger.debug("closing the connection of %s: %s", self.peer, reason)
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def _look(self) -> None:
        """Ping a client that has been silent, and disconnect from one that does not reply."""
        limits, now = self.limits, self._loop.time()
        silent_s = now - self._heard_at
        if self._asked_at > self._heard_at:
            wait_s = limits.keepalive_timeout_s - (now - self._asked_at)
            if wait_s <= 0:
                self._give_up(f"no data for {silent_s:.1f} s")
                return
        elif silent_s >= limits.keepalive_s:
            self._put(wire.frame(wire.PING, 0, 0, _KEEPALIVE_PING))
            self._asked_at, wait_s = now, limits.keepalive_timeout_s
        else:
            wait_s = limits.keepalive_s - silent_s
        self._timer = self._loop.call_later(max(wait_s, 0.001), self._look)


_HANDLERS: dict[int, Callable[[Connection, int, int, bytes], None]] = {
    wire.DATA: Connection._on_data,
    wire.HEADERS: Connection._on_headers,
    wire.PRIORITY: Connection._on_priority,
    wire.RST_STREAM: Connection._on_reset,
    wire.SETTINGS: Connection._on_settings,
    wire.PUSH_PROMISE: Connection._on_push_promise,
    wire.PING: Connection._on_ping,
    wire.GOAWAY: Connection._on_goaway,
    wire.WINDOW_UPDATE: Connection._on_window_update,
    wire.CONTINUATION: Connection._on_continuation,
}


def _unpad(body: bytes) -> bytes:
    if not body or body[0] >= len(body):
        raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "invalid padding")
    return body[1 : len(body) - body[0]]


def _peer_name(address: Any) -> str:
    """Return an address in gRPC's format."""
    if not isinstance(address, tuple):
        return "unix:"
    host, port = address[0].removeprefix("::ffff:"), address[1]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _auth_context(tls: ssl.SSLObject) -> dict[str, tuple[bytes, ...]]:
    """Return the names in a TLS client's certificate in gRPC's format."""
    certificate: Mapping[str, Any] = tls.getpeercert() or {}
    names: dict[str, list[str]] = {"transport_security_type": ["ssl"]}
    for part in certificate.get("subject", ()):
        for key, value in part:
            if key == "commonName":
                names.setdefault("x509_common_name", []).append(value)
    for kind, value in certificate.get("subjectAltName", ()):
        if not isinstance(value, str):
            continue  # a DirName is a nested tuple
        names.setdefault("x509_subject_alternative_name", []).append(value)
        if kind in ("DNS", "URI"):
            names.setdefault(f"peer_{kind.lower()}", []).append(value)
    return {key: tuple(value.encode() for value in values) for key, values in names.items()}
