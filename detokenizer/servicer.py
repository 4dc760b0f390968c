"""The detokenizer's gRPC service: one stream per router, over which all its requests' text goes."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import grpc
import grpc.aio

from detokenizer.feed import FeedPool
from detokenizer.incremental import DecoderFactory
from detokenizer.streams import OutputStream
from midstream.errors import UnavailableError
from protos import detokenizer_pb2 as pb
from protos import detokenizer_pb2_grpc

logger = logging.getLogger(__name__)

# Of one message to a router, less those of the last request in it.
_MAX_TENSOR_BYTES = 8 << 20


class RouterConnection:
    """What one router has attached. Streams mark themselves ready; the writer takes everything ready in one batch."""

    def __init__(self) -> None:
        self.streams: dict[int, OutputStream] = {}
        self._ready: dict[int, OutputStream] = {}
        self._wake = asyncio.Event()

    def mark_ready(self, stream: OutputStream) -> None:
        """The stream has something to take."""
        self._ready[stream.number] = stream
        self._wake.set()

    async def wait_ready(self) -> None:
        """Returns when some stream is ready."""
        await self._wake.wait()

    def take(self, pool: FeedPool) -> pb.StreamBatch:
        """Everything ready, one chunk per sequence; streams that are done are forgotten."""
        self._wake.clear()
        ready, self._ready = self._ready, {}
        batch, batch_bytes = pb.StreamBatch(), 0
        add = batch.chunks.add
        for number, stream in ready.items():
            if batch_bytes >= _MAX_TENSOR_BYTES:
                self.mark_ready(stream)
                continue
            for chunk in stream.take():
                batch_bytes += chunk.extras.num_tensor_bytes if chunk.extras is not None else 0
                item = add()
                item.stream = number
                item.response.SetInParent()
                chunk.fill(item.response)
            if stream.error is not None and not stream.is_done:
                logger.info("a stream failed: %s", stream.error, extra={"request_id": stream.request_id})
                add(stream=number, error=stream.error.to_proto())
            if stream.is_done or stream.error is not None:
                self.streams.pop(number, None)
                pool.detach(stream)
        return batch

    def detach(self, number: int) -> OutputStream | None:
        """Forgets a stream."""
        self._ready.pop(number, None)
        return self.streams.pop(number, None)


class DetokenizerServicer(detokenizer_pb2_grpc.DetokenizerServicer):
    """Implements protos/detokenizer.proto."""

    def __init__(self, pool: FeedPool, decoders: DecoderFactory, max_pending_bytes: int) -> None:
        self._pool = pool
        self._decoders = decoders
        self._max_pending_bytes = max_pending_bytes
        self._connections: set[RouterConnection] = set()
        self._numbers = itertools.count(1)
        self._is_draining = False
        self._drained = asyncio.Event()

    @property
    def num_attached(self) -> int:
        """Streams that are open now."""
        return sum(len(connection.streams) for connection in self._connections)

    async def drain(self) -> None:
        """Takes no new streams and returns when those that are open have ended."""
        self._is_draining = True
        self._check_drained()
        await self._drained.wait()

    async def Stream(  # type: ignore[override]  # noqa: N802 (it writes to the context)
        self, request_iterator: object, context: grpc.aio.ServicerContext[pb.StreamCommand, pb.StreamBatch]
    ) -> None:
        """Serves one router until it leaves."""
        connection = RouterConnection()
        self._connections.add(connection)
        # Tells the router that the stream is open, before there is anything to send.
        await context.send_initial_metadata(())
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(connection, context))
                while isinstance(command := await context.read(), pb.StreamCommand):
                    self._obey(command, connection)
                writer.cancel()
        finally:
            self._connections.discard(connection)
            for stream in connection.streams.values():
                self._pool.detach(stream)
            self._check_drained()

    async def _write(self, connection: RouterConnection, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            await connection.wait_ready()
            batch = connection.take(self._pool)
            if batch.chunks:
                await context.write(batch)
            self._check_drained()

    def _obey(self, command: pb.StreamCommand, connection: RouterConnection) -> None:
        kind = command.WhichOneof("command")
        if kind == "attach":
            attach = command.attach
            stream = OutputStream(
                attach.stream,
                attach.request_id,
                next(self._numbers),
                attach.from_token,
                attach.from_token_by_sequence[:],
                connection,
                self._decoders,
                self._max_pending_bytes,
            )
            connection.streams[attach.stream] = stream
            logger.debug("a router attached", extra={"request_id": attach.request_id, "from_token": attach.from_token})
            if self._is_draining:
                stream.fail(UnavailableError("the detokenizer is draining"))
            else:
                self._pool.attach(stream)
        elif kind == "detach":
            left = connection.detach(command.detach.stream)
            if left is not None:
                self._pool.detach(left)
                self._check_drained()

    def _check_drained(self) -> None:
        if self._is_draining and not self.num_attached:
            self._drained.set()
