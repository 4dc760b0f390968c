"""gRPC's interoperability cases, with gRPC's own client.

One test runs them with another implementation: `npm install --prefix DIR @grpc/grpc-js`, then
`TEST_NODE_MODULES=DIR/node_modules pytest tests/midstream/test_grpc_interop.py -k another`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from midstream.rpc.http2 import GrpcServer
from tests.midstream.interop_service import (
    INITIAL_KEY,
    SERVICE,
    TRAILING_KEY,
    InteropServicer,
    JsonObject,
    decode,
    encode,
    handlers_of,
)

WAIT_S = 240
MAX_MESSAGE_BYTES = 4 << 20
Stub = Callable[..., Any]


class InteropServer:
    """A running server and a client's channel."""

    def __init__(self, servicer: InteropServicer, port: int, channel: grpc.Channel) -> None:
        self.servicer = servicer
        self.port = port
        self.channel = channel

    def stub(self, method: str, kind: str = "unary_unary", service: str = SERVICE) -> Stub:
        """Return the client's side of a method."""
        make: Stub = getattr(self.channel, kind)
        stub: Stub = make(f"/{service}/{method}", request_serializer=encode, response_deserializer=decode)
        return stub

    async def run(self, case: Callable[[], None]) -> None:
        """Run a case with the synchronous client, in a thread."""
        await asyncio.wait_for(asyncio.to_thread(case), WAIT_S)


@pytest_asyncio.fixture
async def interop() -> AsyncIterator[InteropServer]:
    server = GrpcServer(max_receive_bytes=MAX_MESSAGE_BYTES)
    servicer = InteropServicer()
    server.add_generic_rpc_handlers((handlers_of(servicer),))
    port = server.add_port("127.0.0.1", 0)
    await server.start()
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield InteropServer(servicer, port, channel)
    await server.stop(0)


def payload(size: int) -> JsonObject:
    return {"payload": "\0" * size}


async def test_an_empty_message_is_answered(interop: InteropServer) -> None:
    await interop.run(lambda: _equal(interop.stub("EmptyCall")({}), {}))


@pytest.mark.parametrize("sizes", [(0, 0), (1, 1), (271_828, 314_159), (1, 600_000), (600_000, 1)])
async def test_a_large_message_arrives_whole(interop: InteropServer, sizes: tuple[int, int]) -> None:
    sent, asked = sizes

    def case() -> None:
        response = interop.stub("UnaryCall")(payload(sent) | {"size": asked})
        assert (len(response["payload"]), response["received"]) == (asked, sent)

    await interop.run(case)


async def test_a_stream_of_requests_is_read_to_its_end(interop: InteropServer) -> None:
    def case() -> None:
        requests = (payload(size) for size in (27_182, 8, 1_828, 45_904))
        assert interop.stub("StreamingInputCall", "stream_unary")(requests) == {"total": 74_922}

    await interop.run(case)


@pytest.mark.parametrize("method", ["StreamingOutputCall", "WrittenOutputCall"])
async def test_a_stream_of_responses_arrives_in_order(interop: InteropServer, method: str) -> None:
    def case() -> None:
        sizes = [31_415, 9, 2_653, 58_979]
        responses = interop.stub(method, "unary_stream")({"sizes": sizes})
        assert [len(response["payload"]) for response in responses] == sizes

    await interop.run(case)


async def test_each_request_of_a_stream_is_answered_before_the_next_one_is_sent(interop: InteropServer) -> None:
    def case() -> None:
        requests = Requests()
        responses = interop.stub("FullDuplexCall", "stream_stream")(requests)
        for sent, asked in ((27_182, 31_415), (8, 9), (1_828, 2_653), (45_904, 58_979)):
            requests.send(payload(sent) | {"sizes": [asked]})
            assert len(next(responses)["payload"]) == asked
        requests.close()
        assert list(responses) == []
        assert responses.code() is grpc.StatusCode.OK

    await interop.run(case)


async def test_a_stream_without_requests_ends_well(interop: InteropServer) -> None:
    def case() -> None:
        responses = interop.stub("FullDuplexCall", "stream_stream")(iter(()))
        assert list(responses) == []
        assert responses.code() is grpc.StatusCode.OK

    await interop.run(case)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_are_read(interop: InteropServer, compression: grpc.Compression) -> None:
    def case() -> None:
        assert interop.stub("UnaryCall")(payload(27_182), compression=compression)["received"] == 27_182
        requests = (payload(size) for size in (27_182, 45_904))
        response = interop.stub("StreamingInputCall", "stream_unary")(requests, compression=compression)
        assert response == {"total": 73_086}

    await interop.run(case)


async def test_metadata_is_echoed(interop: InteropServer) -> None:
    metadata = ((INITIAL_KEY, "test_initial_metadata_value"), (TRAILING_KEY, b"\xab\xab\xab"))

    def case() -> None:
        _, call = interop.stub("UnaryCall").with_call({"size": 8}, metadata=metadata)  # type: ignore[attr-defined]
        _check(call)
        responses = interop.stub("FullDuplexCall", "stream_stream")(iter([{"sizes": [8]}]), metadata=metadata)
        assert len(list(responses)) == 1
        _check(responses)

    def _check(call: Any) -> None:
        assert (INITIAL_KEY, "test_initial_metadata_value") in call.initial_metadata()
        assert (TRAILING_KEY, b"\xab\xab\xab") in call.trailing_metadata()

    await interop.run(case)


@pytest.mark.parametrize("value", [b"", b"\0", b"\xff" * 3, bytes(range(256)), b"a,b"])
async def test_binary_metadata_keeps_every_byte(interop: InteropServer, value: bytes) -> None:
    def case() -> None:
        _, call = interop.stub("UnaryCall").with_call({}, metadata=((TRAILING_KEY, value),))  # type: ignore[attr-defined]
        assert (TRAILING_KEY, value) in call.trailing_metadata()

    await interop.run(case)


@pytest.mark.parametrize(
    "message",
    [
        "test status message",
        "",
        "100 % of %20",
        "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n",
    ],
)
async def test_a_status_arrives_with_its_message(interop: InteropServer, message: str) -> None:
    request = {"status": {"code": 2, "message": message}}

    def case() -> None:
        with pytest.raises(grpc.RpcError) as unary:
            interop.stub("UnaryCall")(request)
        with pytest.raises(grpc.RpcError) as stream:
            list(interop.stub("FullDuplexCall", "stream_stream")(iter([{"sizes": [3]}, request])))
        for error in (unary.value, stream.value):
            assert isinstance(error, grpc.Call)
            assert (error.code(), error.details()) == (grpc.StatusCode.UNKNOWN, message)

    await interop.run(case)


@pytest.mark.parametrize(("service", "method"), [(SERVICE, "Missing"), ("midstream.test.Missing", "EmptyCall")])
async def test_unknown_methods_are_unimplemented(interop: InteropServer, service: str, method: str) -> None:
    def case() -> None:
        assert _code_of(lambda: interop.stub(method, service=service)({})) is grpc.StatusCode.UNIMPLEMENTED
        call = interop.stub(method, "stream_stream", service)(iter([{}]))
        assert _code_of(lambda: list(call)) is grpc.StatusCode.UNIMPLEMENTED

    await interop.run(case)


async def test_a_call_that_is_cancelled_before_its_first_request_ends(interop: InteropServer) -> None:
    def case() -> None:
        call = interop.stub("StreamingInputCall", "stream_unary").future(Requests())  # type: ignore[attr-defined]
        call.cancel()
        assert call.code() is grpc.StatusCode.CANCELLED

    await interop.run(case)


async def test_a_call_that_is_cancelled_after_a_response_ends_on_the_server(interop: InteropServer) -> None:
    def case() -> None:
        requests = Requests()
        responses = interop.stub("FullDuplexCall", "stream_stream")(requests)
        requests.send(payload(27_182) | {"sizes": [31_415]})
        assert len(next(responses)["payload"]) == 31_415
        responses.cancel()
        assert responses.code() is grpc.StatusCode.CANCELLED
        requests.close()

    await interop.run(case)
    await asyncio.wait_for(interop.servicer.ended.wait(), WAIT_S)


async def test_a_deadline_ends_the_call_on_both_sides(interop: InteropServer) -> None:
    def case() -> None:
        # The call must arrive before the timeout, even if the machine stalls.
        call = interop.stub("FullDuplexCall", "stream_stream")(Requests(), timeout=2)
        assert _code_of(lambda: list(call)) is grpc.StatusCode.DEADLINE_EXCEEDED
        unary = interop.stub("SleepingCall")
        assert _code_of(lambda: unary({}, timeout=0.2)) is grpc.StatusCode.DEADLINE_EXCEEDED

    await interop.run(case)
    await asyncio.wait_for(interop.servicer.ended.wait(), WAIT_S)


async def test_messages_over_the_limit_are_refused_and_others_are_served(interop: InteropServer) -> None:
    def case() -> None:
        unary = interop.stub("UnaryCall")
        assert _code_of(lambda: unary(payload(MAX_MESSAGE_BYTES))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        compressed = {"compression": grpc.Compression.Gzip}
        too_large = payload(MAX_MESSAGE_BYTES)
        assert _code_of(lambda: unary(too_large, **compressed)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert unary(payload(10))["received"] == 10

    await interop.run(case)


async def test_many_calls_share_a_connection(interop: InteropServer) -> None:
    def case() -> None:
        unary, stream = interop.stub("UnaryCall"), interop.stub("StreamingOutputCall", "unary_stream")
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            calls = [pool.submit(unary, payload(20_000 + number) | {"size": 30_000 + number}) for number in range(64)]
            streams = [pool.submit(lambda: list(stream({"sizes": [50_000] * 20}))) for _ in range(16)]
            for number, call in enumerate(calls):
                response = call.result()
                assert (len(response["payload"]), response["received"]) == (30_000 + number, 20_000 + number)
            for call in streams:
                assert [len(response["payload"]) for response in call.result()] == [50_000] * 20

    await interop.run(case)


async def test_a_reader_that_stands_still_does_not_delay_other_calls(interop: InteropServer) -> None:
    def case() -> None:
        stopped = interop.stub("StreamingOutputCall", "unary_stream")({"sizes": [100_000] * 200})
        next(stopped)
        for _ in range(20):
            assert len(interop.stub("UnaryCall")({"size": 10_000})["payload"]) == 10_000
        assert [len(response["payload"]) for response in stopped] == [100_000] * 199

    await interop.run(case)


async def test_a_thousand_calls_in_a_row_are_answered(interop: InteropServer) -> None:
    def case() -> None:
        unary = interop.stub("UnaryCall")
        for _ in range(1_000):
            assert unary({"size": 10})["payload"] == "\0" * 10

    await interop.run(case)


async def test_calls_end_when_the_client_closes_its_connection(interop: InteropServer) -> None:
    def case() -> None:
        with grpc.insecure_channel(
            f"127.0.0.1:{interop.port}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as other:
            sleeping: Any = other.unary_unary(f"/{SERVICE}/SleepingCall", request_serializer=encode)
            call = sleeping.future({})
            deadline = time.monotonic() + WAIT_S
            while not interop.servicer.num_running:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert call.code() is grpc.StatusCode.CANCELLED

    await interop.run(case)
    await asyncio.wait_for(interop.servicer.ended.wait(), WAIT_S)


@pytest.mark.skipif("TEST_NODE_MODULES" not in os.environ, reason="TEST_NODE_MODULES is not set")
async def test_another_implementation_passes_its_cases(interop: InteropServer) -> None:
    script = Path(__file__).with_name("interop_client.mjs")
    node = await asyncio.create_subprocess_exec("node", script, str(interop.port), stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(node.communicate(), 2 * WAIT_S)
    assert node.returncode == 0
    assert len(output.splitlines()) == 10


class Requests(Iterator[JsonObject]):
    """Requests that are sent one at a time."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[JsonObject | None] = queue.SimpleQueue()

    def send(self, request: JsonObject) -> None:
        """Send a request."""
        self._queue.put(request)

    def close(self) -> None:
        """End the stream of requests."""
        self._queue.put(None)

    def __next__(self) -> JsonObject:
        request = self._queue.get()
        if request is None:
            raise StopIteration
        return request


def _equal(left: object, right: object) -> None:
    assert left == right


def _code_of(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error = raised.value
    assert isinstance(error, grpc.Call)
    return error.code()
