"""A detokenizer's session on the token feed: it takes commands and sends batches of tokens."""

from __future__ import annotations

import asyncio

from midstream.errors import InvalidArgumentError, MidstreamError
from midstream.rpc.connection import Connection
from midstream.rpc.frames import Pump
from protos import scheduler_pb2
from scheduler.core.events import StopWordFound
from scheduler.edge.engine import Engine
from scheduler.edge.feed import DetokenizerFeed
from scheduler.edge.kept_requests import KeptRequests


class FeedSession:
    """A session of one detokenizer, from its hello to its disconnection."""

    message_class = scheduler_pb2.FeedCommand

    def __init__(self, engine: Engine, kept: KeptRequests, connection: Connection) -> None:
        """Feed the requests of `engine` and `kept`."""
        self._pump = Pump(connection, self._collect)
        self.resume = self._pump.run
        self._kept = kept
        self._finding: dict[int, asyncio.Task[None]] = {}
        self._engine = engine
        self._feed: DetokenizerFeed | None = None

    def take(self, command: scheduler_pb2.FeedCommand) -> None:
        """Carry out a command. Raises InvalidArgumentError if it is out of order, or conflicts with an earlier one."""
        kind, feed = command.WhichOneof("command"), self._feed
        if feed is None:
            if kind != "hello":
                raise InvalidArgumentError("the first command of a feed must be hello", field="command")
            hello = command.hello
            self._feed = self._engine.hub.connect(
                hello.detokenizer_id, self._pump.wake, hello.tokenizer_fingerprint, flush=self._pump.run
            )
        elif kind == "attach":
            self._attach(command.attach, feed)
        elif kind == "detach":
            if command.detach.stream in self._finding:
                self._finding[command.detach.stream].cancel()
            feed.detach(command.detach.stream)
        elif kind == "stop":
            self._stop(command.stop, feed)
        else:
            raise InvalidArgumentError(
                "hello must be sent only once, and every command must have one field set", field="command"
            )

    def lose(self, error: Exception | None) -> None:
        """Handle the detokenizer's disconnection."""
        for task in list(self._finding.values()):
            task.cancel()
        if self._feed is not None:
            self._feed.close()

    def _collect(self) -> scheduler_pb2.FeedBatch | None:
        return self._feed.collect() if self._feed is not None else None

    def _attach(self, attach: scheduler_pb2.FeedAttach, feed: DetokenizerFeed) -> None:
        if attach.request_id in self._engine.hub.logs:
            feed.attach(attach.stream, attach.request_id)
            return
        task = asyncio.create_task(self._find(attach, feed))
        self._finding[attach.stream] = task
        task.add_done_callback(lambda _: self._finding.pop(attach.stream, None))

    async def _find(self, attach: scheduler_pb2.FeedAttach, feed: DetokenizerFeed) -> None:
        """Attach to a request, which may have to be restored first."""
        try:
            await self._kept.find(attach.request_id)
            feed.attach(attach.stream, attach.request_id)
        except MidstreamError as error:
            feed.refuse(attach.stream, attach.request_id, error)

    def _stop(self, stop: scheduler_pb2.FeedStop, feed: DetokenizerFeed) -> None:
        request = feed.request_of(stop.stream)
        if request is not None:
            now_ns = self._engine.now_ns()
            self._engine.handle(
                StopWordFound(now_ns, request.request_id, stop.sequence_index, stop.num_tokens, stop.stop_word)
            )
