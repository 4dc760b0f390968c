"""The router's HTTP port, served on its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import uuid
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import httptools
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from midstream.rpc.serving import MAX_METADATA_BYTES
from midstream.security.host_header import AllowedHosts
from midstream.security.peer_names import PeerCertificate
from midstream.security.tls import Tls
from midstream.telemetry import current_outer_id, current_request_id

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
# Time limits, in seconds: from connecting (or from the first byte of a further request) to the end of the head, and
# from there to the end of the body.
HEAD_TIMEOUT_S, BODY_TIMEOUT_S = 10.0, 60.0
_MAX_CONNECTIONS = 16_384
_BACKLOG = 2048
# Maximum number of connections accepted per iteration of the event loop; other requests wait for no more than these.
_MAX_ACCEPTED_PER_TURN = 8
# Time in which the first request must arrive on a connection that was open when the port closed.
_LAST_REQUEST_S = 1.0
# Maximum time for rejecting the requests that are cancelled at the end of the drain time.
_REJECTION_S = 1.0
# A client that has sent the end of its data may still wait for the answer, or be gone. If it is gone, it resets the
# connection once it gets any data, so it gets some after the first time unless the answer has ended; a reset is looked
# for at the intervals. A client's request is aborted within a second of its end.
_PROBE_AFTER_S, _RESET_INTERVAL_S = 0.25, 0.1
# Data without a meaning: an interim response before the head of a response, and a chunk with a comment between events.
_INTERIM, _COMMENT = b"HTTP/1.1 100 Continue\r\n\r\n", b"3\r\n:\n\n\r\n"
_EVENTS = "streams events"  # a key of the scope: whether the response is a stream of events
# A key of the scope: sends a part of the body, without the middleware that changes heads. Absent over HTTP/1.0.
SEND_BODY = "midstream.send_body"
# Headers that contain the id of a call, in OpenAI's API and in Anthropic's.
_ID_HEADERS = (b"x-request-id", b"request-id")
# An id from outside: printable ASCII characters.
_OUTER_ID = re.compile(rb"[!-~]{1,128}")
_DATE_INTERVAL_S = 1.0
_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n\r\n"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exits = asyncio.Event()

    async def main_loop(self) -> None:
        """Refresh the date header every second until `exit` is called; uvicorn would wake up ten times per second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_INTERVAL_S):
                    await self._exits.wait()

    def exit(self) -> None:
        """End `main_loop`."""
        self.should_exit = True
        self._exits.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handling to the gRPC server; both servers drain together."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        # asyncio uses one number for the backlog and for the connections to accept at once, so set the backlog again.
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)


class ConnectionLimits:
    """Counts the open connections of a port, in total and per client address."""

    def __init__(self, max_connections: int) -> None:
        """Limit all connections to `max_connections`, but at most _MAX_CONNECTIONS, and those from one address to half
        of that.
        """
        self.max_connections = max(min(max_connections, _MAX_CONNECTIONS), 2)
        self._open: Counter[str] = Counter()
        self._num_open = 0

    def enter(self, address: str) -> bool:
        """Count a connection and return True; return False if there are too many."""
        if self._num_open >= self.max_connections or self._open[address] >= self.max_connections // 2:
            return False
        self._num_open += 1
        self._open[address] += 1
        return True

    def leave(self, address: str) -> None:
        self._num_open -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


class _Parser(httptools.HttpRequestParser):
    """httptools' parser, which ignores a request's offer of another protocol.

    Otherwise, httptools would treat the bytes after the head as those of the other protocol, and lose the body.
    """

    def __init__(self, protocol: _Protocol) -> None:
        super().__init__(protocol)
        with contextlib.suppress(AttributeError):  # as uvicorn does; httptools before 0.6.3 is always lenient
            self.set_dangerous_leniencies(lenient_data_after_close=True)
        self._protocol = protocol

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        rest, parser = memoryview(data), self
        while True:
            try:
                super(_Parser, parser).feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._protocol.offers_protocol:
                    raise
                rest = rest[upgrade.args[0] :]
                parser = self._protocol.decline_offer()


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on connections, on the size of the head, and on the time to receive a request.

    It also extracts the names in the client's certificate, ignores offers of other protocols, as HTTP permits (some
    clients offer HTTP/2 with every request), and answers clients that close their side of the connection.

    Attributes:
        is_leaving: Whether the connection is to be closed after its next response; set for all connections of the port,
            or for one.
        offers_protocol: Whether the last head offers another protocol.
    """

    limits: ConnectionLimits
    timeouts_s: tuple[float, float]
    _num_held_bytes = 0  # number of bytes received of an incomplete head or body
    _is_too_large = False
    _is_counted = False
    _timer: asyncio.TimerHandle | None = None
    is_leaving = False
    _reset_timer: asyncio.TimerHandle | None = None
    offers_protocol = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Reject a connection over the limit; otherwise wait for the head of a request."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._is_counted = self.limits.enter(self._address)
        if not self._is_counted:
            transport.write(_REFUSAL)
            transport.close()
            return
        self._expect(self.timeouts_s[0])

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's resources."""
        self._expect(None)
        if self._reset_timer is not None:
            self._reset_timer.cancel()
        if self._is_counted:
            self._is_counted = False
            self.limits.leave(self._address)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a connection on which complete requests wait for their answers; it is closed after the last one.

        With TLS, the event loop closes the connection in any case. In HTTP/1.0 there is no data without a meaning, so
        the client is assumed to be gone.
        """
        cycle = self.cycle
        is_answered = cycle is None or cycle.response_complete or cycle.more_body
        if is_answered or self.scheme == "https" or cycle.scope["http_version"] == "1.0":
            return False
        self.is_leaving = True
        self._reset_timer = self.loop.call_later(_PROBE_AFTER_S, self._probe)
        return True

    def _probe(self) -> None:
        cycle = self.cycle
        if not self.pipeline and not self.transport.is_closing():  # else the earlier responses are such data
            if not cycle.response_started:
                self.transport.write(_INTERIM)
            elif cycle.chunked_encoding and cycle.scope.get(_EVENTS):
                self.transport.write(_COMMENT)
        self._look_for_reset()

    def _look_for_reset(self) -> None:
        # After the end of its data, the event loop no longer watches the connection.
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._reset_timer = self.loop.call_later(_RESET_INTERVAL_S, self._look_for_reset)

    def data_received(self, data: bytes) -> None:
        """Close a connection whose head (or trailer) exceeds the limit."""
        self._num_held_bytes += len(data)
        super().data_received(data)
        if self._num_held_bytes > MAX_METADATA_BYTES and not self.transport.is_closing():
            self._is_too_large = True
            self.send_400_response("")
        elif self._num_held_bytes and self._timer is None and not self.transport.is_closing():
            self._expect(self.timeouts_s[0])

    def _expect(self, timeout_s: float | None) -> None:
        """Close the connection unless this is called again within the time; None removes the time limit."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if timeout_s is None else self.loop.call_later(timeout_s, self._time_out, timeout_s)

    def _time_out(self, timeout_s: float) -> None:
        self._timer = None
        cycle = self.cycle
        if self.pipeline or (cycle is not None and not cycle.response_complete and not cycle.more_body):
            # Once a request is complete, no time limit applies here. The data of a pipelined request is not read until
            # the earlier request has been answered.
            self._expect(timeout_s)
        elif not self.transport.is_closing():
            if cycle is None or cycle.response_complete or not cycle.response_started:
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def decline_offer(self) -> _Parser:
        """Read the last head again, without its offer of another protocol; return the parser for the bytes after it."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.offers_protocol = False
        self.parser = parser = _Parser(self)
        parser.feed_data(b"\r\n".join([*lines, b"", b""]))
        return parser

    def on_headers_complete(self) -> None:
        """Handle a request's complete head."""
        # CONNECT asks for a tunnel: this is the request itself, not an offer of another protocol.
        self.offers_protocol = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self.offers_protocol:
            return
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_METADATA_BYTES:
            self._is_too_large = True
            raise ValueError("the head is too large")
        self._num_held_bytes = 0
        certificate = PeerCertificate.of_connection(self.transport.get_extra_info("peercert") or {})
        cast("dict[str, object]", self.scope)["certificate"] = certificate
        self._expect(self.timeouts_s[1])
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            _end_by_closing(self.cycle)
        else:
            self._announce_end(self.cycle)

    def _announce_end(self, cycle: RequestResponseCycle) -> None:
        """Let the last response of a connection say so (`Connection: close`), unless it is a stream: the `fetch` of
        Node.js 20 reports a stream with this header as complete even if it is cut off.
        """
        send = cycle.send
        cast("dict[str, object]", self.scope)[SEND_BODY] = send

        async def send_announced(message: Message) -> None:
            if message["type"] == "http.response.start" and self.is_leaving and not self.pipeline:
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.keep_alive = cycle.keep_alive and not has_length
            await send(cast("Any", message))

        cycle.send = send_announced  # type: ignore[assignment, method-assign]

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and self.is_leaving and not self._num_held_bytes:
            self.transport.close()

    def leave(self) -> None:
        """Close an idle connection at once, and any other one after the response to its request."""
        self.is_leaving = True
        if self.cycle is not None and self.cycle.response_complete and not self._num_held_bytes:
            self.transport.close()

    def shutdown(self) -> None:
        """Leave as the port closes. A client that has just connected may already have sent its request."""
        self.leave()
        if self.cycle is None and not self._num_held_bytes:
            self._expect(_LAST_REQUEST_S)

    def on_body(self, body: bytes) -> None:
        self._num_held_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.offers_protocol:
            return
        self._num_held_bytes = 0
        self._expect(None)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Reject malformed HTTP and oversized heads."""
        if not self._is_too_large:
            super().send_400_response(msg)
            return
        self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
        self.transport.close()


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """Let the end of the connection be the end of a response without a length, as in HTTP/1.0; uvicorn would send such
    a response in chunks, which HTTP/1.0 does not know.
    """
    send = cycle.send

    async def send_unsized(message: Message) -> None:
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                cycle.chunked_encoding = False
        elif cycle.chunked_encoding is False and not cycle.expected_content_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(cast("Any", message))

    cycle.send = send_unsized  # type: ignore[assignment, method-assign]


def _protocol(limits: ConnectionLimits, timeouts_s: tuple[float, float]) -> type[_Protocol]:
    """Return the protocol class for one port."""
    return type("_PortProtocol", (_Protocol,), {"limits": limits, "timeouts_s": timeouts_s})


class HostCheckedApp:
    """ASGI middleware that rejects requests for unknown host names."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
            if not all(map(self._allowed.include, hosts)):
                text = "421: this host name is not served here; see --allowed-hosts\n"
                await PlainTextResponse(text, 421)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class IdentifiedApp:
    """ASGI middleware that gives each call an id for the log, and for the header `x-request-id` of a response that has
    no id of its own. If the request has that header, from a client or a proxy, the response repeats it, and each line
    of the log has it, too. It also notes in the scope whether the response is a stream of events.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call_id = uuid.uuid4().hex
        current_request_id.set(call_id)
        given = _given_id(scope)
        if given:
            current_outer_id.set(given.decode())

        async def send_identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                types = (value for name, value in headers if name.lower() == b"content-type")
                scope[_EVENTS] = any(value.startswith(b"text/event-stream") for value in types)
                if given:
                    headers = [(name, value) for name, value in headers if name.lower() != _ID_HEADERS[0]]
                    message = {**message, "headers": [*headers, (_ID_HEADERS[0], given)]}
                elif not any(name.lower() in _ID_HEADERS for name, _ in headers):
                    message = {**message, "headers": [*headers, (_ID_HEADERS[0], call_id.encode())]}
            await send(message)

        await self._app(scope, receive, send_identified)


def _given_id(scope: Scope) -> bytes:
    """Return the id that the request's header gives the call; empty if there is none that can be repeated."""
    values: list[bytes] = [value for name, value in scope.get("headers", ()) if name == _ID_HEADERS[0]]
    return values[0] if len(values) == 1 and _OUTER_ID.fullmatch(values[0]) else b""


class DrainedApp:
    """ASGI middleware that rejects the requests that uvicorn cancels because they outlast the server's drain time."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            rejection = PlainTextResponse("503: this server is stopping; try again\n", 503, {"retry-after": "1"})
            with contextlib.suppress(RuntimeError):  # its response has begun; uvicorn closes the connection
                await rejection(scope, receive, send)


class OriginCheckedApp:
    """ASGI middleware that rejects calls by web pages of other sites, except GET.

    Otherwise a page could make calls, although the browser hides their responses from it: a POST of plain text needs no
    preflight.
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = {origin.encode("latin-1") for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            headers = dict(scope["headers"])
            if _is_from_another_site(headers) and headers.get(b"origin") not in self._origins:
                text = "403: web pages of this origin may not call this service; see --cors-origins\n"
                await PlainTextResponse(text, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_from_another_site(headers: Mapping[bytes, bytes]) -> bool:
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        return site not in (b"same-origin", b"none")
    # Browsers send `sec-fetch-site` only over HTTPS or to their own host. Clients other than browsers send no origin.
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


def for_pages(app: ASGIApp, origins: str) -> ASGIApp:
    """Return the application; only its own web pages and those of `origins`, comma-separated or `*`, may call methods
    other than GET, HEAD and OPTIONS.

    The answers to pages of `origins` have the headers (CORS) that let the pages read them.
    """
    listed = [origin.strip() for origin in origins.split(",") if origin.strip()]
    if "*" not in listed:
        app = OriginCheckedApp(app, listed)
    if not listed:
        return app
    return CORSMiddleware(
        app, allow_origins=listed, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"], max_age=600
    )


class HttpPort:
    """An ASGI application served on a port."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        tls: Tls | None = None,
        *,
        shared_port: int = 0,
        max_open_files: int = 1024,
        head_timeout_s: float = HEAD_TIMEOUT_S,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        """Bind the port.

        Args:
            port: 0 selects a free one, stored in `self.port`.
            shared_port: Another port, on which other processes may listen as well; 0 means none.
            max_open_files: The process's open-file limit; connections use at most half of it.
            head_timeout_s: Time limit to receive a request's head.
            body_timeout_s: Time limit to receive its body.

        Raises:
            OSError: The port is in use.
        """
        self._sockets = [_listen(host, port)]
        self.port: int = self._sockets[0].getsockname()[1]
        self._shared_port = shared_port
        if shared_port:
            self._sockets.append(_listen(host, shared_port, is_shared=True))
        self._tls = tls
        self._protocol = _protocol(ConnectionLimits(max_open_files // 2), (head_timeout_s, body_timeout_s))
        config = uvicorn.Config(
            IdentifiedApp(DrainedApp(app)),
            http=self._protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            log_level="warning",
            backlog=_MAX_ACCEPTED_PER_TURN,
            ssl_context_factory=(lambda *_: tls.http_context()) if tls is not None else None,
        )
        self._server = _Server(config)
        self._tasks: list[asyncio.Task[None]] = []
        self._opening: set[asyncio.Task[Any]] = set()

    def start(self) -> tuple[asyncio.Task[None], ...]:
        """Start serving; return the server's tasks, which end after `stop`."""
        self._tasks.append(asyncio.create_task(self._server.serve(self._sockets), name="http"))
        if self._tls is not None:
            self._tasks.append(asyncio.create_task(_keep_fresh(self._tls), name="certificates"))
        return tuple(self._tasks)

    def leave(self) -> None:
        """Let clients reach another process: close connections after their next response, stop listening on the shared
        port, and close its idle connections at once.
        """
        self._protocol.is_leaving = True
        self._close_listeners(self._sockets[1:])
        for connection in cast("list[_Protocol]", list(self._server.server_state.connections)):
            if connection.server is not None and connection.server[1] == self._shared_port:
                connection.leave()

    def _close_listeners(self, listeners: Iterable[socket.socket]) -> None:
        servers = {server.sockets[0].fileno(): server for server in self._servers() if server.sockets}
        for listener in listeners:
            server = servers.get(listener.fileno())
            if server is not None:
                # Closing the port resets the connections that wait to be accepted, after their clients may have sent a
                # request: proxies would not send it again.
                self._accept_waiting(listener)
                server.close()
            listener.close()

    def _accept_waiting(self, listener: socket.socket) -> None:
        config, loop = self._server.config, asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # BlockingIOError: no more connections wait
            for _ in range(_BACKLOG):
                found, _ = listener.accept()
                found.setblocking(False)

                def make() -> _Protocol:
                    return self._protocol(
                        config=config, server_state=self._server.server_state, app_state=self._server.lifespan.state
                    )

                opening = loop.create_task(loop.connect_accepted_socket(make, found, ssl=config.ssl))
                self._opening.add(opening)
                opening.add_done_callback(self._opened)

    def _opened(self, opening: asyncio.Task[Any]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and opening.exception() is not None:
            logger.debug("a connection was not opened", exc_info=opening.exception())

    def _servers(self) -> list[asyncio.Server]:
        return list(getattr(self._server, "servers", ()))  # set once the server has started

    async def stop(self, drain_timeout_s: float) -> None:
        """Accept no more connections, wait up to `drain_timeout_s` for running requests, and close the port, whether or
        not it was started. If it is called several times, the shortest time applies; with 0, running requests are
        cancelled at once.
        """
        self._protocol.is_leaving = True
        self._close_listeners(self._sockets)
        if drain_timeout_s > 0 and self._opening:
            await asyncio.wait(tuple(self._opening), timeout=_LAST_REQUEST_S)
        config, seconds = self._server.config, max(int(drain_timeout_s), 0)
        if self._server.should_exit:
            seconds = min(seconds, config.timeout_graceful_shutdown or 0)
            if not seconds:
                self._server.force_exit = True
                for request in tuple(self._server.server_state.tasks):
                    request.cancel()
        config.timeout_graceful_shutdown = seconds
        self._server.exit()
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # the caller watches these tasks
        if canceled := tuple(self._server.server_state.tasks):
            await asyncio.wait(canceled, timeout=_REJECTION_S)
        self.abort()
        await asyncio.sleep(0)  # aborted connections close in the next iteration of the event loop

    def abort(self) -> None:
        """Close the port and all its connections at once."""
        for server in self._servers():
            server.close()
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        for listener in self._sockets:
            listener.close()


def _listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=is_shared)


async def _keep_fresh(tls: Tls) -> None:
    while True:
        await asyncio.sleep(_LOOK_INTERVAL_S)
        tls.refresh()
