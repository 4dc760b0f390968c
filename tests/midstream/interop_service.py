"""The service of gRPC's interoperability tests, with JSON in place of protobuf messages.

The cases are described in https://github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio

SERVICE = "midstream.test.Interop"
INITIAL_KEY = "x-grpc-test-echo-initial"
TRAILING_KEY = "x-grpc-test-echo-trailing-bin"
JsonObject = dict[str, Any]
_Context = grpc.aio.ServicerContext[Any, Any]


def encode(message: JsonObject) -> bytes:
    """Return a message as JSON."""
    return json.dumps(message, ensure_ascii=False).encode()


def decode(data: bytes) -> JsonObject:
    """Return the message in `data`."""
    return cast("JsonObject", json.loads(data))


class InteropServicer:
    """Implements the service.

    Attributes:
        ended: Set when a stream or a sleeping call has ended.
        num_running: Number of running calls.
    """

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.num_running = 0

    async def empty_call(self, request: JsonObject, context: _Context) -> JsonObject:
        """Return an empty message."""
        return {}

    async def unary_call(self, request: JsonObject, context: _Context) -> JsonObject:
        """Return a payload of the requested size."""
        await _echo_metadata(context)
        await _end_as_asked(request, context)
        return {"payload": "\0" * request.get("size", 0), "received": len(request.get("payload", ""))}

    async def streaming_input_call(self, requests: AsyncIterator[JsonObject], context: _Context) -> JsonObject:
        """Return the total size of the requests' payloads."""
        return {"total": sum([len(request["payload"]) async for request in requests])}

    async def streaming_output_call(self, request: JsonObject, context: _Context) -> AsyncIterator[JsonObject]:
        """Yield messages of the given sizes."""
        for size in request["sizes"]:
            yield {"payload": "\0" * size}
            await asyncio.sleep(request.get("interval_s", 0))

    async def written_output_call(self, request: JsonObject, context: _Context) -> None:
        """Write messages of the given sizes."""
        for size in request["sizes"]:
            await context.write({"payload": "\0" * size})

    async def full_duplex_call(
        self, requests: AsyncIterator[JsonObject], context: _Context
    ) -> AsyncIterator[JsonObject]:
        """Answer each request as `streaming_output_call` does."""
        await _echo_metadata(context)
        self.num_running += 1
        try:
            async for request in requests:
                await _end_as_asked(request, context)
                for size in request.get("sizes", ()):
                    yield {"payload": "\0" * size}
        finally:
            self.num_running -= 1
            self.ended.set()

    async def sleeping_call(self, request: JsonObject, context: _Context) -> JsonObject:
        """Wait until the call is cancelled."""
        self.num_running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_running -= 1
            self.ended.set()
        return {}


async def _echo_metadata(context: _Context) -> None:
    metadata = [(key, value) for key, value in context.invocation_metadata() or ()]
    initial = tuple((key, value) for key, value in metadata if key == INITIAL_KEY)
    if initial:
        await context.send_initial_metadata(initial)
    trailing = tuple((key, value) for key, value in metadata if key == TRAILING_KEY)
    if trailing:
        context.set_trailing_metadata(trailing)


async def _end_as_asked(request: JsonObject, context: _Context) -> None:
    status = request.get("status")
    if status is not None:
        code = next(code for code in grpc.StatusCode if code.value[0] == status["code"])
        await context.abort(code, status["message"])


def handlers_of(servicer: InteropServicer) -> grpc.GenericRpcHandler:
    """Return the handlers to add to a server."""
    codec: Any = {"request_deserializer": decode, "response_serializer": encode}
    make = {
        "EmptyCall": grpc.unary_unary_rpc_method_handler(servicer.empty_call, **codec),
        "UnaryCall": grpc.unary_unary_rpc_method_handler(servicer.unary_call, **codec),
        "StreamingInputCall": grpc.stream_unary_rpc_method_handler(servicer.streaming_input_call, **codec),
        "StreamingOutputCall": grpc.unary_stream_rpc_method_handler(servicer.streaming_output_call, **codec),
        "WrittenOutputCall": grpc.unary_stream_rpc_method_handler(servicer.written_output_call, **codec),
        "FullDuplexCall": grpc.stream_stream_rpc_method_handler(servicer.full_duplex_call, **codec),
        "SleepingCall": grpc.unary_unary_rpc_method_handler(servicer.sleeping_call, **codec),
    }
    return grpc.method_handlers_generic_handler(SERVICE, cast("Any", make))
