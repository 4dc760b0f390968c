"""Server side of the simulated gRPC: servers and calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from tests.simulation.grpc_call import Call, Item, Metadata, broken
from tests.simulation.network import Network, running


async def _only(message: Any) -> AsyncIterator[Any]:
    yield message


class Context:
    """A call, as seen by its handler."""

    def __init__(self, call: Call, deadline: float | None, handler: Any) -> None:
        self._call, self._deadline, self._handler = call, deadline, handler
        self._is_over = self._has_headers = False
        self._loop = asyncio.get_running_loop()

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline of the call."""
        return None if self._deadline is None else max(self._deadline - self._loop.time(), 0.0)

    def done(self) -> bool:
        """Return whether the call no longer has a listener."""
        return self._is_over

    def invocation_metadata(self) -> Metadata:
        """Return no metadata."""
        return ()

    def peer(self) -> str:
        """Return the name of the caller."""
        return f"ipv4:{self._call.ends[0].name}:1"

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return an empty identity."""
        return {}

    async def send_initial_metadata(self, _: object) -> None:
        """Send the headers, which tell the caller that the call is open."""
        if not self._has_headers:
            self._has_headers = True
            self._call.down.send(Item("headers"))

    async def read(self) -> Any:
        """Return the next message of the caller; EOF after the last message."""
        end = self._call.server
        while not end.inbox:
            if end.has_eof or self._is_over:
                return grpc.aio.EOF
            await end.changed.wait()
        return self._handler.request_deserializer(end.take(self._call.down, self._call.network.window))

    async def messages(self) -> AsyncIterator[Any]:
        """Yield the messages of the caller."""
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def write(self, message: Any) -> None:
        """Send a message to the caller."""
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
        """End the call with a status."""
        self.finish(code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError(details)

    def finish(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        """Send the status unless it has already been sent."""
        if not self._is_over:
            self._is_over = True
            self._call.network.remove(self._call)
            self._call.down.send(Item("status", code=code, details=details, trailing=trailing))

    def leave(self) -> None:
        """Handle the disconnection of the caller."""
        self._is_over = True
        self._call.server.can_write.set()
        self._call.server.changed.set()


class Server:
    """A stand-in for the server that `grpc.aio.server` returns."""

    def __init__(self, network: Network, interceptors: Sequence[Any] = (), **_: Any) -> None:
        self.process = running()
        self._network = network
        self._interceptors = interceptors
        self._handlers: dict[str, Any] = {}
        self._addresses: list[str] = []
        self._calls: dict[asyncio.Task[None], None] = {}
        self._is_stopping = False

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Do nothing, since the same handlers are also passed to `add_registered_method_handlers`."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Register the handlers."""
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def add_insecure_port(self, address: str) -> int:
        """Set the address to listen on."""
        self._addresses.append(address)
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        """Start accepting calls."""
        for address in self._addresses:
            self._network.bind(address, self)

    async def stop(self, grace: float | None) -> None:
        """Reject new calls; calls in progress have `grace` seconds to finish."""
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
        """Return the receiver of the messages of a new call."""

        def receive(item: Item) -> None:
            if item.kind == "start":
                self._open(call, deadline, item.data)
            else:
                call._at_server(item)

        return receive

    def _open(self, call: Call, deadline: float | None, data: bytes) -> None:
        if self.process.is_dead or self._is_stopping:
            call.network.remove(call)
            call.down.send_end(broken("the server is shutting down"))
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
            if self._handlers[call.method].request_streaming:
                request = context.messages()
            else:
                request = handler.request_deserializer(data)
                # In this case, an interceptor has replaced the handler, and reads the only message itself.
                if handler.request_streaming:
                    request = _only(request)
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
