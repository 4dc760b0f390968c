"""grpc.aio without sockets: channels, calls, servers and their contexts, over the simulated network.

Messages are serialized by the real stubs and handlers. A writer waits while more than the network's `window` messages
have not been read at the other end, as HTTP/2's flow control makes it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from tests.simulation.loop import Flag, Process
from tests.simulation.network import Network, Wire, running

_CONNECT_TIMEOUT_S = 2.0
_RECONNECT_S = 0.1

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Item:
    """What goes over a wire.

    Attributes:
        kind: start, message, read (the other end took one), half_close, cancel, headers, status, broken.
    """

    kind: str
    data: bytes = b""
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    trailing: Metadata = ()

    def label(self) -> str:
        """For the log of events."""
        size = f" {len(self.data)}" if self.data else ""
        return f"{self.kind}{size}{'' if self.code is grpc.StatusCode.OK else ' ' + self.code.name}"


class _End:
    """One end of a call: what has arrived, and how much may still be sent."""

    def __init__(self) -> None:
        self.inbox: deque[bytes] = deque()
        self.changed = Flag()
        self.can_write = Flag()
        self.num_unread = 0  # sent, and not yet taken at the other end
        self.has_eof = False


class Call:
    """Both ends of a call, and the connection between them."""

    def __init__(self, network: Network, client: Process, server: Process, method: str) -> None:
        self.network = network
        self.ends = (client, server)
        self.method = method
        self.client, self.server = _End(), _End()
        self.on_client_end: Callable[[Item], None] = lambda _: None
        self.on_server_end: Callable[[], None] = lambda: None
        self.on_headers: Callable[[], None] = lambda: None
        name = method.rpartition("/")[2]
        self.up = Wire(network, client, server, name, self._at_server)
        self.down = Wire(network, server, client, name, self._at_client)
        network.add(self)

    def _at_server(self, item: Item) -> None:
        if item.kind == "message":
            self.server.inbox.append(item.data)
        elif item.kind == "read":
            self.server.num_unread -= 1
            self.server.can_write.set()
        elif item.kind == "half_close":
            self.server.has_eof = True
        else:
            self.network.remove(self)
            self.on_server_end()
        self.server.changed.set()

    def _at_client(self, item: Item) -> None:
        if item.kind == "message":
            self.client.inbox.append(item.data)
            self.client.changed.set()
        elif item.kind == "read":
            self.client.num_unread -= 1
            self.client.can_write.set()
        elif item.kind == "headers":
            self.on_headers()
        else:
            self.network.remove(self)
            self.on_client_end(item)

    def break_(self) -> None:
        """Cuts the connection."""
        self.up.is_cut = self.down.is_cut = True
        self.network.remove(self)
        self.network.later(self.network.delay(), self.on_server_end)
        self.network.later(self.network.delay(), self.on_client_end, _broken("the connection was reset"))

    def end_closed(self, end: Process) -> None:
        """The system of a process that has gone closes the connection."""
        self.network.remove(self)
        if end is self.ends[0]:
            self.down.is_cut = True
            self.up.send_end(Item("cancel"))
        else:
            self.up.is_cut = True
            self.down.send_end(_broken("the connection was closed"))


def _broken(details: str) -> Item:
    return Item("broken", code=grpc.StatusCode.UNAVAILABLE, details=details)


class ClientCall:
    """A call as its caller sees it, of any kind; await it where the response is one message."""

    def __init__(
        self,
        network: Network,
        address: str,
        method: str,
        codecs: tuple[Any, Any],
        request: Any,
        options: dict[str, Any],
    ) -> None:
        self._network, self._address, self._method = network, address, method
        self._serialize, self._deserialize = codecs
        self._loop = asyncio.get_running_loop()
        self._call: Call | None = None
        self._end = _End()
        self._status: Item | None = None
        self._is_cancelled = False
        self._is_open = Flag()
        self._has_headers = False
        timeout = options.get("timeout")
        self._deadline = None if timeout is None else self._loop.time() + timeout
        self._timer = None if timeout is None else self._loop.call_later(max(timeout, 0), self._expire)
        self._connecting = self._loop.create_task(self._connect(request, bool(options.get("wait_for_ready"))))

    async def _connect(self, request: Any, wait_for_ready: bool) -> None:
        network, process = self._network, running()
        give_up_at = self._loop.time() + _CONNECT_TIMEOUT_S
        await asyncio.sleep(2 * network.delay())
        while not self._status:
            server: Server | None = network.listeners.get(self._address)
            is_parted = server is not None and network.is_parted(process, server.process)
            if server is not None and not is_parted and not process.is_dead:
                break
            if process.is_dead or (not wait_for_ready and (not is_parted or self._loop.time() >= give_up_at)):
                self._finish(Item("status", code=grpc.StatusCode.UNAVAILABLE, details="failed to connect"))
                return
            await asyncio.sleep(_RECONNECT_S)
        else:
            return
        call = self._call = Call(network, process, server.process, self._method)
        call.client = self._end
        call.on_client_end, call.on_headers = self._finish, self._note_headers
        data = b"" if request is None else self._serialize(request)
        call.up._receive = server.receiver(call, self._deadline)
        call.up.send(Item("start", data))
        if request is None:
            self._is_open.set()

    def _note_headers(self) -> None:
        self._has_headers = True
        self._is_open.set()

    def _finish(self, item: Item) -> None:
        if self._status is None:
            self._status = item
            if self._timer is not None:
                self._timer.cancel()
        for flag in (self._end.changed, self._end.can_write, self._is_open):
            flag.set()

    def _expire(self) -> None:
        if self._status is None:
            self._tell_server()
            self._finish(Item("status", code=grpc.StatusCode.DEADLINE_EXCEEDED, details="Deadline Exceeded"))

    def _tell_server(self) -> None:
        if self._call is not None:
            self._call.down.is_cut = True
            self._call.up.send(Item("cancel"))

    def cancel(self) -> bool:
        """Ends the call from this side."""
        if self._status is not None:
            return False
        self._is_cancelled = True
        self._connecting.cancel()
        self._tell_server()
        self._finish(Item("status", code=grpc.StatusCode.CANCELLED, details="Locally cancelled by application!"))
        return True

    def done(self) -> bool:
        """Whether it has ended."""
        return self._status is not None

    def __await__(self) -> Generator[Any, None, Any]:
        return self._response().__await__()

    async def _response(self) -> Any:
        response = await self.read()
        if response is grpc.aio.EOF:
            self._raise_for_status()
        while self._status is None:
            await self._wait(self._end.changed)
        self._raise_for_status()
        return response

    async def read(self) -> Any:
        """The next message; EOF after the last one of a call that ended well."""
        end = self._end
        while not end.inbox:
            if self._status is not None:
                self._raise_for_status()
                return grpc.aio.EOF
            await self._wait(end.changed)
        data = end.inbox.popleft()
        if self._call is not None:
            self._call.up.send(Item("read"))
        return self._deserialize(data)

    async def write(self, request: Any) -> None:
        """Sends a message."""
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        while self._call is None or self._end.num_unread >= self._network.window:
            await self._wait(self._is_open if self._call is None else self._end.can_write)
            if self._status is not None:
                self._raise_for_status()
                raise asyncio.InvalidStateError("RPC already finished.")
        self._end.num_unread += 1
        self._call.up.send(Item("message", self._serialize(request)))

    async def wait_for_connection(self) -> None:
        """Returns once the server has answered with its headers."""
        while not self._has_headers and self._status is None:
            await self._wait(self._is_open)
        if self._status is not None:
            self._raise_for_status()

    async def _wait(self, flag: Flag) -> None:
        try:
            await flag.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _raise_for_status(self) -> None:
        status = self._status
        if self._is_cancelled:
            raise asyncio.CancelledError
        if status is not None and status.code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing), details=status.details
            )


class Channel:
    """Opens calls from the process that made it."""

    def __init__(self, network: Network, target: str) -> None:
        self._network = network
        self._address = target.removeprefix("dns:///")
        self._calls: list[ClientCall] = []

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Cancels what is open."""
        for call in self._calls:
            call.cancel()

    def _multi_callable(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def call(request: Any = None, **options: Any) -> ClientCall:
            codecs = (request_serializer, response_deserializer)
            result = ClientCall(self._network, self._address, method, codecs, request, options)
            self._calls = [item for item in self._calls if not item.done()]
            self._calls.append(result)
            return result

        return call

    unary_unary = unary_stream = stream_unary = stream_stream = _multi_callable


class Context:
    """A call as its handler sees it."""

    def __init__(self, call: Call, deadline: float | None, handler: Any) -> None:
        self._call, self._deadline, self._handler = call, deadline, handler
        self._is_over = self._has_headers = False
        self._loop = asyncio.get_running_loop()

    def time_remaining(self) -> float | None:
        """Seconds until the call's deadline."""
        return None if self._deadline is None else max(self._deadline - self._loop.time(), 0.0)

    def done(self) -> bool:
        """Whether nobody listens any more."""
        return self._is_over

    def invocation_metadata(self) -> Metadata:
        """None is sent."""
        return ()

    def peer(self) -> str:
        """Who calls."""
        return f"ipv4:{self._call.ends[0].name}:1"

    def auth_context(self) -> dict[str, list[bytes]]:
        """Nobody is known."""
        return {}

    async def send_initial_metadata(self, _: object) -> None:
        """Tells the caller that the call is open."""
        if not self._has_headers:
            self._has_headers = True
            self._call.down.send(Item("headers"))

    async def read(self) -> Any:
        """The caller's next message; EOF after the last."""
        end = self._call.server
        while not end.inbox:
            if end.has_eof or self._is_over:
                return grpc.aio.EOF
            await end.changed.wait()
        self._call.down.send(Item("read"))
        return self._handler.request_deserializer(end.inbox.popleft())

    async def messages(self) -> AsyncIterator[Any]:
        """The caller's messages."""
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def write(self, message: Any) -> None:
        """Sends a message to the caller."""
        end = self._call.server
        while end.num_unread >= self._call.network.window and not self._is_over:
            await end.can_write.wait()
        if self._is_over:
            raise asyncio.CancelledError
        await self.send_initial_metadata(())
        self._call.network.on_write(self._call, message)
        end.num_unread += 1
        self._call.down.send(Item("message", self._handler.response_serializer(message)))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """Ends the call with a status."""
        self.finish(code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError(details)

    def finish(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        """Sends the status, unless it is sent."""
        if not self._is_over:
            self._is_over = True
            self._call.network.remove(self._call)
            self._call.down.send(Item("status", code=code, details=details, trailing=trailing))

    def leave(self) -> None:
        """The caller has left."""
        self._is_over = True
        self._call.server.can_write.set()
        self._call.server.changed.set()


class Server:
    """Stands in for what `grpc.aio.server` returns."""

    def __init__(self, network: Network, interceptors: Sequence[Any] = (), **_: Any) -> None:
        self.process = running()
        self._network = network
        self._interceptors = interceptors
        self._handlers: dict[str, Any] = {}
        self._addresses: list[str] = []
        self._calls: dict[asyncio.Task[None], None] = {}
        self._is_stopping = False

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """The registered ones say the same."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """What it answers."""
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def add_insecure_port(self, address: str) -> int:
        """Where it will answer."""
        self._addresses.append(address)
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        """Begins to answer."""
        for address in self._addresses:
            self._network.bind(address, self)

    async def stop(self, grace: float | None) -> None:
        """Refuses new calls; those in progress get `grace` seconds."""
        self._is_stopping = True
        for address in self._addresses:
            if self._network.listeners.get(address) is self:
                del self._network.listeners[address]
        if self._calls and grace:
            await asyncio.wait(list(self._calls), timeout=grace)
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(list(self._calls))

    def receiver(self, call: Call, deadline: float | None) -> Callable[[Item], None]:
        """Takes in what the caller of a new call sends."""

        def receive(item: Item) -> None:
            if item.kind == "start":
                self._open(call, deadline, item.data)
            else:
                call._at_server(item)

        return receive

    def _open(self, call: Call, deadline: float | None, data: bytes) -> None:
        if self.process.is_dead or self._is_stopping:
            call.network.remove(call)
            call.down.send_end(_broken("the server is going away"))
            return
        context = Context(call, deadline, self._handlers.get(call.method))
        if call.method not in self._handlers:
            context.finish(grpc.StatusCode.UNIMPLEMENTED, call.method)
            return
        task = self.process.spawn(self._answer(call, context, data), call.method)
        self._calls[task] = None
        task.add_done_callback(lambda task: self._calls.pop(task, None))

        def end() -> None:
            context.leave()
            task.cancel()

        call.on_server_end = end
        if deadline is not None:
            delay = max(deadline - call.network.loop.time(), 0)
            timer = call.network.loop.call_later(delay, end, context=self.process.context.copy())
            task.add_done_callback(lambda _: timer.cancel())

    async def _answer(self, call: Call, context: Context, data: bytes) -> None:
        try:
            handler = await self._intercepted(call.method)
            request = context.messages() if handler.request_streaming else handler.request_deserializer(data)
            if handler.response_streaming:
                behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
                result = behaviour(request, context)
                if hasattr(result, "__aiter__"):
                    async for message in result:
                        await context.write(message)
                else:
                    await result
            else:
                behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
                await context.write(await behaviour(request, context))
            context.finish(grpc.StatusCode.OK)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            context.finish(grpc.StatusCode.CANCELLED, "the handler was cancelled")
            raise

    async def _intercepted(self, method: str) -> Any:
        async def handler_of(_: object) -> Any:
            return self._handlers[method]

        handler = await handler_of(None)
        for interceptor in self._interceptors:
            with contextlib.suppress(NotImplementedError):
                handler = await interceptor.intercept_service(handler_of, _Details(method))
        return handler


@dataclass(frozen=True, slots=True)
class _Details(grpc.HandlerCallDetails):
    method: str
    invocation_metadata: Metadata = ()
