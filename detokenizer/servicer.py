"""The detokenizer's service: one frame connection per router, which carries the text of all its requests."""

from __future__ import annotations

import asyncio
import itertools
import logging

from detokenizer.feed import FeedPool
from detokenizer.streams import OutputStream, RouterConnection
from midstream.errors import UnavailableError
from midstream.rpc.connection import Connection
from midstream.rpc.frames import FrameServer, Pump
from midstream.text.incremental import DecoderFactory
from protos import detokenizer_pb2 as pb
from protos import detokenizer_pb2_grpc
from protos.frames_pb2 import FramesOffer, OpenFramesRequest

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 1.0


class _FramesHandler:
    """A router's connection."""

    message_class = pb.StreamCommand

    def __init__(self, servicer: DetokenizerServicer, connection: Connection) -> None:
        self._servicer = servicer
        self._pump = Pump(connection, self._collect, servicer.check_drained)
        self._router = servicer.connect(self._pump)
        self.resume = self._pump.run
        self._router.begin()

    def _collect(self) -> pb.StreamBatch | None:
        return self._router.collect()

    def take(self, command: pb.StreamCommand) -> None:
        self._servicer.obey(command, self._router)

    def lose(self, error: Exception | None) -> None:
        """Handle the end of the router's connection."""
        self._servicer.disconnect(self._router)


class DetokenizerServicer(detokenizer_pb2_grpc.DetokenizerServicer):
    """Implements protos/detokenizer.proto."""

    def __init__(
        self,
        pool: FeedPool,
        decoders: DecoderFactory,
        max_pending_bytes: int,
        frames: FrameServer,
        *,
        tokenizer_fingerprint: str = "",
    ) -> None:
        """`frames` accepts the routers' connections. Each router is told `tokenizer_fingerprint`."""
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._frames = frames
        self._pool = pool
        self._decoders = decoders
        self._max_pending_bytes = max_pending_bytes
        self._connections: dict[RouterConnection, None] = {}
        self._numbers = itertools.count(1)
        self._is_draining = False
        self._drained = asyncio.Event()

    @property
    def num_attached(self) -> int:
        """Number of open streams."""
        return sum(len(connection.streams) for connection in self._connections)

    def report_progress(self) -> None:
        """Tell routers how many tokens wait for the end of their sequence."""
        for connection in self._connections:
            connection.report_progress()

    async def keep_reporting(self) -> None:
        """Report progress once a second, until cancelled."""
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
            self.report_progress()

    async def drain(self) -> None:
        """Reject new streams, and return once all open streams have ended."""
        self._is_draining = True
        self.check_drained()
        await self._drained.wait()

    def connect(self, pump: Pump) -> RouterConnection:
        """Add a router whose output `pump` writes."""
        connection = RouterConnection(
            lambda: self._pool.wake_router(pump), self._pool.detach, self._tokenizer_fingerprint
        )
        self._connections[connection] = None
        return connection

    def disconnect(self, connection: RouterConnection) -> None:
        if self._connections.pop(connection, self) is None:
            for stream in connection.streams.values():
                self._pool.detach(stream)
            self.check_drained()

    async def OpenStream(self, request: OpenFramesRequest, context: object) -> FramesOffer:
        return self._frames.offer(lambda connection: _FramesHandler(self, connection))

    def obey(self, command: pb.StreamCommand, connection: RouterConnection) -> None:
        """Handle a router's command."""
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
                attach.scheduler,
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
                self.check_drained()

    def check_drained(self) -> None:
        """Set the drained event if no stream is open."""
        if self._is_draining and not self.num_attached:
            self._drained.set()
