"""Client side of the simulated gRPC: channels and calls."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import grpc
import grpc.aio

from tests.simulation.grpc_call import Call, End, Item
from tests.simulation.grpc_server import Server
from tests.simulation.loop import Flag
from tests.simulation.network import Network, running

_CONNECT_TIMEOUT_S = 2.0
_RECONNECT_S = 0.1


class ClientCall:
    """A call of any kind, on the client side; await it if the response is a single message."""

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
        self._end = End()
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
        """Cancel the call from the client side."""
        if self._status is not None:
            return False
        self._is_cancelled = True
        self._connecting.cancel()
        self._tell_server()
        self._finish(Item("status", code=grpc.StatusCode.CANCELLED, details="Locally cancelled by application!"))
        return True

    def done(self) -> bool:
        """Return whether the call has ended."""
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
        """Return the next message; EOF after the last message of a successful call."""
        end = self._end
        while not end.inbox or self._call is None:
            if self._status is not None:
                self._raise_for_status()
                return grpc.aio.EOF
            await self._wait(end.changed)
        return self._deserialize(end.take(self._call.up, self._network.window))

    async def write(self, request: Any) -> None:
        """Send a message."""
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
        """Wait until the server has sent its headers."""
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
    """Opens calls on behalf of the process that created it."""

    def __init__(self, network: Network, target: str) -> None:
        self._network = network
        self._address = target.removeprefix("dns:///")
        self._calls: list[ClientCall] = []

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Cancel all open calls."""
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
