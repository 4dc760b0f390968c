from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from grpc.aio import Metadata

from midstream.rpc.command_stream import CommandStream, LinkSettings
from midstream.rpc.health import Progress
from midstream.rpc.serving import Server
from protos import detokenizer_pb2 as pb
from protos.detokenizer_pb2_grpc import DetokenizerServicer, DetokenizerStub, add_DetokenizerServicer_to_server
from protos.frames_pb2 import FramesOffer

if TYPE_CHECKING:
    from protos.detokenizer_pb2_grpc import DetokenizerAsyncStub


class Stream(CommandStream[pb.StreamCommand, pb.StreamBatch]):
    """A stream whose peer disconnects at the moment at which the stream is closed."""

    def __init__(self) -> None:
        super().__init__("service", "127.0.0.1:1", LinkSettings(1 << 20), "")
        self.begins = asyncio.Event()

    async def _run_once(self, channel: grpc.aio.Channel) -> None:
        is_first = not self.begins.is_set()
        self.begins.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if is_first:
                raise TimeoutError from None
            raise

    def _ask_for_frames(self, channel: grpc.aio.Channel) -> Awaitable[FramesOffer]:
        raise AssertionError

    def _call(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[pb.StreamCommand, pb.StreamBatch]:
        raise AssertionError

    def _take(self, batch: pb.StreamBatch) -> None:
        raise AssertionError

    def _lose(self) -> None:
        pass


async def test_a_stream_cancelled_while_it_breaks_ends() -> None:
    stream = Stream()
    running = asyncio.create_task(stream.run())
    await stream.begins.wait()
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=60)
    assert done
    assert running.cancelled()


class Numbers(CommandStream[pb.StreamCommand, pb.StreamBatch]):
    """Records for each message whether it came over frames, and counts the offers of frames; the offered port has no
    listener.
    """

    batch_class = pb.StreamBatch

    def __init__(self, target: str, offered_port: int, transport: str = "frames") -> None:
        super().__init__("service", target, LinkSettings(1 << 20, transport=transport), "")
        self.came: asyncio.Queue[bool] = asyncio.Queue()
        self.num_offers = 0
        self._offered_port = offered_port

    def _call(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[pb.StreamCommand, pb.StreamBatch]:
        stub: DetokenizerAsyncStub = DetokenizerStub(channel)  # type: ignore[assignment]
        return stub.Stream()

    async def _ask_for_frames(self, channel: grpc.aio.Channel) -> FramesOffer:
        self.num_offers += 1
        return FramesOffer(port=self._offered_port, token=b"x" * 16)

    def _take(self, batch: pb.StreamBatch) -> None:
        self.came.put_nowait(self._connection is not None)

    def _greet(self) -> None:
        self._send(pb.StreamCommand(attach=pb.StreamAttach(stream=1, request_id="a")))

    def _lose(self) -> None:
        pass


class Echo(DetokenizerServicer):
    """Answers every command."""

    async def Stream(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        await context.send_initial_metadata(())
        async for command in request_iterator:
            yield pb.StreamBatch(chunks=[pb.StreamChunk(stream=command.attach.stream)])

    async def OpenStream(self, request: Any, context: Any) -> FramesOffer:  # noqa: N802
        return FramesOffer()


async def test_grpc_is_used_if_frames_are_unavailable() -> None:
    server = Server("midstream.v1.Detokenizer", "127.0.0.1", 0, Progress())
    add_DetokenizerServicer_to_server(Echo(), server.grpc)
    await server.start()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        stream = Numbers(f"127.0.0.1:{server.port}", closed.getsockname()[1])
        running = asyncio.create_task(stream.run())
        assert await asyncio.wait_for(stream.came.get(), 60) is False
        assert stream.num_offers == 3
        running.cancel()
        await asyncio.wait({running})
    await server.stop()


class BrokenCall:
    """A gRPC call that ends before its first command is written."""

    async def wait_for_connection(self) -> None:
        pass

    async def write(self, command: pb.StreamCommand) -> None:
        raise asyncio.InvalidStateError("RPC already finished.")

    async def read(self) -> pb.StreamBatch:
        await asyncio.sleep(0)
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "the peer died")

    def cancel(self) -> None:
        pass


class Broken(Numbers):
    """A stream whose calls fail at once."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", 1, "grpc")
        self.is_lost = asyncio.Event()

    def _call(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[pb.StreamCommand, pb.StreamBatch]:
        return BrokenCall()  # type: ignore[return-value]

    def _lose(self) -> None:
        self.is_lost.set()


async def test_a_command_for_a_call_that_has_ended_is_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="midstream.rpc.command_stream")
    stream = Broken()
    running = asyncio.create_task(stream.run())
    await asyncio.wait_for(stream.is_lost.wait(), 60)
    running.cancel()
    await asyncio.wait({running})
    (record,) = caplog.records
    assert (record.levelname, vars(record)["reason"].count("the peer died")) == ("INFO", 1)
