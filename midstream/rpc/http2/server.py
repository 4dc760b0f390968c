"""The server: it listens, runs methods, and stops."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from midstream.rpc.http2.call import Call
from midstream.rpc.http2.connection import Connection
from midstream.rpc.http2.limits import Limits
from midstream.rpc.http2.metadata import Metadata
from midstream.security.tls import Tls

logger = logging.getLogger(__name__)

# Maximum number of connections accepted, and of calls started, in one iteration of the event loop, so that calls in
# progress do not wait for more than these.
_MAX_ACCEPTED_PER_TURN = 8
_MAX_STARTS_PER_TURN = 4
_NO_FILES_S = 0.5

_Handler = Any  # a grpc.RpcMethodHandler
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]]


class _Details(grpc.HandlerCallDetails):
    """The properties of a call that interceptors get."""

    def __init__(self, method: str, invocation_metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = invocation_metadata


class _Listener:
    """A listening socket."""

    def __init__(self, listener: socket.socket, tls: Tls | None, *, is_shared: bool) -> None:
        self.socket = listener
        self.is_shared = is_shared
        self.tls = tls
        self.context = tls.grpc_context() if tls is not None else None


class GrpcServer(grpc.aio.Server):
    """A gRPC server with the interface of `grpc.aio.Server`, from which it inherits only for type checking."""

    def __init__(
        self, *, interceptors: Sequence[grpc.aio.ServerInterceptor] = (), limits: Limits | None = None, **values: Any
    ) -> None:
        """Create a server.

        Args:
            interceptors: Called for each call, in this order.
            values: Fields of `Limits`, as an alternative to `limits`.
        """
        self.limits = limits or Limits(**values)
        self.connections: dict[Connection, None] = {}
        self._interceptors = tuple(interceptors)
        self._methods: dict[str, _Handler] = {}
        self._generic: list[grpc.GenericRpcHandler] = []
        self._listeners: list[_Listener] = []
        self._is_started = self._is_stopping = self._is_closing = self._has_left_shared_ports = False
        self._accepted: dict[socket.socket, str] = {}  # address by connection, including TLS handshakes
        self._num_of_host = Counter[str]()
        self._turns: dict[Connection, None] = {}  # connections with calls that have not started
        self._num_starts_left = _MAX_STARTS_PER_TURN
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()

    # grpc.aio.Server

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Add handlers that find methods by name."""
        self._generic += generic_rpc_handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, _Handler]) -> None:
        for name, handler in method_handlers.items():
            self._methods[f"/{service_name}/{name}"] = handler

    def add_insecure_port(self, address: str) -> int:
        raise NotImplementedError("use add_port")

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        raise NotImplementedError("use add_port")

    def add_port(self, host: str, port: int, tls: Tls | None = None, *, is_shared: bool = False) -> int:
        """Listen on a port; 0 chooses a free one. Connections are accepted once the server has started.

        Args:
            is_shared: Whether other processes of this user may listen on the same port; the kernel then gives each
                connection to one of them.

        Returns:
            The port.

        Raises:
            OSError: The port is in use, or the host is not an address of this machine.
        """
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with contextlib.ExitStack() as opened:
            added = []
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listener = opened.enter_context(socket.socket(family, kind, protocol))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
                if family == socket.AF_INET6:
                    # The IPv6 wildcard address also accepts IPv4 connections.
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
                try:
                    listener.bind((address[0], port, *address[2:]))
                except OSError as error:
                    raise OSError(f"cannot listen on {host}:{port}: {error}") from None
                port = listener.getsockname()[1]
                listener.listen(socket.SOMAXCONN)
                listener.setblocking(False)
                added.append(_Listener(listener, tls, is_shared=is_shared))
            opened.pop_all()
        self._listeners += added
        if self._is_started:
            self._listen(added)
        return port

    async def start(self) -> None:
        self._is_started = True
        self._listen(self._listeners)

    async def stop(self, grace: float | None) -> None:
        """Accept no more connections, ask clients to make no more calls, and give those in progress up to `grace`
        seconds; then cancel them.

        It may be called again, with a shorter time.
        """
        if not self._is_stopping:
            self._close_listeners(self._listeners)
            self._is_stopping = True
            for connection in tuple(self.connections):
                connection.go_away()
            self._check_stopped()
        if grace:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), grace)
        self._is_closing = True
        for task in self._opening:
            task.cancel()
        for connection in tuple(self.connections):
            for call in tuple(connection.calls.values()):
                call.refuse(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
            connection.close()
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
        self._check_stopped()
        await self._stopped.wait()

    def leave_shared_ports(self) -> None:
        """Accept no more connections on shared ports, and ask their clients to make no more calls here, so that they
        reach other processes.
        """
        self._has_left_shared_ports = True
        self._close_listeners([listener for listener in self._listeners if listener.is_shared])
        for connection in tuple(self.connections):
            if connection.is_shared:
                connection.go_away()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 (as in grpc.aio)
        raise NotImplementedError("await stop")

    def __del__(self) -> None:
        """Close the ports of a server that was never stopped."""
        for listener in getattr(self, "_listeners", ()):
            listener.socket.close()

    # For connections

    def add(self, connection: Connection) -> bool:
        """Add a connection; return False if its calls would not be served."""
        if self._is_closing:
            return False
        self.connections[connection] = None
        if self._is_stopping or (connection.is_shared and self._has_left_shared_ports):
            # It was accepted before, and its client may already have sent a call.
            asyncio.get_running_loop().call_soon(connection.go_away)
        return True

    def remove(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        self._turns.pop(connection, None)
        connection.waiting.clear()
        self._check_stopped()

    def arrive(self, connection: Connection, call: Call) -> None:
        """Start a call now, or after the calls of other connections that arrived earlier."""
        if not self._turns and self._num_starts_left:
            if self._num_starts_left == _MAX_STARTS_PER_TURN:
                asyncio.get_running_loop().call_soon(self._take_turns)
            self._num_starts_left -= 1
            self._start(connection, call)
            return
        connection.waiting.append(call)
        self._turns[connection] = None

    # Listening

    def _listen(self, listeners: Sequence[_Listener]) -> None:
        for listener in listeners:
            asyncio.get_running_loop().add_reader(listener.socket, self._accept, listener)

    def _close_listeners(self, listeners: Iterable[_Listener]) -> None:
        for listener in tuple(listeners):
            if self._is_started:
                # Closing the port resets the connections that wait to be accepted, after their clients may have sent a
                # call: proxies would not send it again.
                self._accept(listener, socket.SOMAXCONN)
            asyncio.get_running_loop().remove_reader(listener.socket)
            listener.socket.close()
            self._listeners.remove(listener)

    def _accept(self, listener: _Listener, limit: int = _MAX_ACCEPTED_PER_TURN) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(limit):
            try:
                found, address = listener.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("cannot accept connections: %s", error)
                loop.remove_reader(listener.socket)
                loop.call_later(_NO_FILES_S, self._accept_again, listener)
                return
            host = address[0]
            is_over = len(self._accepted) >= self.limits.max_connections
            if is_over or self._num_of_host[host] >= self.limits.max_connections_per_address:
                found.close()
                continue
            self._accepted[found] = host
            self._num_of_host[host] += 1
            found.setblocking(False)
            task = loop.create_task(self._open(found, listener))
            self._opening.add(task)
            task.add_done_callback(functools.partial(self._opened, found))

    def _accept_again(self, listener: _Listener) -> None:
        if listener in self._listeners:
            self._listen([listener])

    def _release(self, found: socket.socket) -> None:
        """Record that an accepted connection has ended."""
        host = self._accepted.pop(found, None)
        if host is not None:
            self._num_of_host[host] -= 1
            if not self._num_of_host[host]:
                del self._num_of_host[host]

    async def _open(self, found: socket.socket, listener: _Listener) -> None:
        context = listener.context
        if listener.tls is not None:
            listener.tls.refresh()
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Connection(self, functools.partial(self._release, found), is_shared=listener.is_shared),
            found,
            ssl=context,
            ssl_handshake_timeout=self.limits.handshake_timeout_s if context is not None else None,
        )

    def _opened(self, found: socket.socket, task: asyncio.Task[None]) -> None:
        """Close a connection if opening it failed or was canceled, possibly before its task began."""
        self._opening.discard(task)
        self._check_stopped()
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        self._release(found)
        found.close()
        if error is not None:
            is_usual = isinstance(error, OSError | TimeoutError)
            level = logging.DEBUG if is_usual else logging.ERROR
            logger.log(level, "a connection was not opened: %s", error, exc_info=None if is_usual else error)

    # Calls

    def _take_turns(self) -> None:
        """Start the next calls, one of each connection in turn."""
        self._num_starts_left = _MAX_STARTS_PER_TURN
        while self._turns and self._num_starts_left:
            connection = next(iter(self._turns))
            del self._turns[connection]
            call = connection.waiting.popleft()
            if connection.waiting:
                self._turns[connection] = None
            if not call.is_over:
                self._num_starts_left -= 1
                self._start(connection, call)
        if self._num_starts_left < _MAX_STARTS_PER_TURN:
            asyncio.get_running_loop().call_soon(self._take_turns)

    def _start(self, connection: Connection, call: Call) -> None:
        connection.num_running += 1
        task = asyncio.get_running_loop().create_task(self._run(call))
        call.start(task)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._ended, connection, call))

    def _ended(self, connection: Connection, call: Call, task: asyncio.Task[None]) -> None:
        """Record that a call's task has ended; it may never have begun."""
        self._tasks.discard(task)
        call.release_task()
        connection.num_running -= 1
        self._check_stopped()

    async def _run(self, call: Call) -> None:
        try:
            handler = await self._find(_Details(call.head.method, call.head.metadata))
            if handler is None:
                call.end(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            else:
                await _serve(handler, call)
                call.end()
        except asyncio.CancelledError:
            call.end(grpc.StatusCode.CANCELLED, "the call was canceled by the server")
        except grpc.aio.AbortError:
            pass  # `abort` has sent the status
        except Exception as error:
            if call.is_over:
                logger.debug("error after the end of a call", exc_info=error)
            elif call.is_status_set:
                call.end()
            else:
                logger.error("unexpected error in %s", call.head.method, exc_info=error)
                call.end(grpc.StatusCode.UNKNOWN, f"unexpected {type(error).__name__}; see the log for details")

    async def _find(self, details: _Details) -> _Handler:
        find: _Continuation = self._look_up
        for interceptor in reversed(self._interceptors):
            find = functools.partial(interceptor.intercept_service, find)
        return await find(details)

    async def _look_up(self, details: grpc.HandlerCallDetails) -> _Handler:
        handler = self._methods.get(details.method)
        if handler is not None:
            return handler
        return next((found for generic in self._generic if (found := generic.service(details)) is not None), None)

    def _check_stopped(self) -> None:
        if self._is_stopping and not self.connections and not self._tasks and not self._opening:
            self._stopped.set()


async def _serve(handler: Any, call: Call) -> None:
    method = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    call.messages.deserialize = handler.request_deserializer
    call.serialize = handler.response_serializer
    request: Any = call.messages
    if not handler.request_streaming:
        request = await call.read()
        if request is grpc.aio.EOF:
            call.end(grpc.StatusCode.INTERNAL, "the call has no request")
            return
    result = method(request, call)
    if hasattr(result, "__aiter__"):
        # The generator is closed explicitly when the client leaves, not when it is freed.
        async with contextlib.aclosing(result):
            async for response in result:
                await call.write(response)
        return
    response = await result
    if not handler.response_streaming and not call.is_status_set and not call.is_over:
        await call.write(response)
