"""The detokenizers that this router uses, one stream to each.

A request's output comes from one of them, the one with the fewest attached. When a detokenizer dies, every ClientStream
on it is failed with UNAVAILABLE, and whoever runs the request attaches it to another at the offset it has reached.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque

import grpc.aio

from midstream.chunk import Chunk
from midstream.discovery import Discovery
from midstream.errors import UnavailableError, from_proto
from midstream.serving import open_channel
from midstream.transport_security import Tls
from protos import detokenizer_pb2 as pb
from protos import detokenizer_pb2_grpc
from router.streams import ClientStream

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.1
_CONNECT_TIMEOUT_S = 2.0
_REFUSAL_S = 0.5


class DetokenizerLink:
    """The stream to one detokenizer.

    Attributes:
        target: Its address.
        is_live: Whether requests can be attached.
        streams: What is attached, by number.
        refuses_until: Loop time until which it is the last choice.
    """

    def __init__(
        self,
        target: str,
        max_message_bytes: int,
        on_live: asyncio.Event,
        tls: Tls | None = None,
        server_name: str = "",
    ) -> None:
        self.target = target
        self.is_live = False
        self.streams: dict[int, ClientStream] = {}
        self.refuses_until = 0.0
        self._max_message_bytes = max_message_bytes
        self._on_live = on_live
        self._tls = tls
        self._server_name = server_name
        self._commands: deque[pb.StreamCommand] = deque()
        self._wake = asyncio.Event()
        self._numbers = itertools.count(1)

    def attach(self, stream: ClientStream) -> int:
        """Asks for a request's output from where `stream` is; returns the number to detach it by."""
        number = next(self._numbers)
        self.streams[number] = stream
        attach = pb.StreamAttach(
            stream=number,
            request_id=stream.request_id,
            from_token=stream.from_token,
            from_token_by_sequence=stream.offsets,
        )
        self._send(pb.StreamCommand(attach=attach))
        return number

    def detach(self, number: int) -> None:
        """Asks for no more."""
        if self.streams.pop(number, None) is not None and self.is_live:
            self._send(pb.StreamCommand(detach=pb.StreamDetach(stream=number)))

    async def run(self) -> None:
        """Keeps the stream open until cancelled."""
        async with open_channel(
            self.target, max_message_bytes=self._max_message_bytes, tls=self._tls, server_name=self._server_name
        ) as channel:
            while True:
                try:
                    await self._run_once(channel)
                except* (grpc.aio.AioRpcError, TimeoutError):
                    level = logging.INFO if self.is_live else logging.DEBUG
                    logger.log(level, "no link to detokenizer %s", self.target, extra={"detokenizer": self.target})
                except* Exception:
                    # A defect here or there; the link must not stand still for it.
                    logger.exception("the link to detokenizer %s failed", self.target)
                finally:
                    self._lose()
                await asyncio.sleep(_RECONNECT_S)

    async def _run_once(self, channel: grpc.aio.Channel) -> None:
        stub: detokenizer_pb2_grpc.DetokenizerAsyncStub = detokenizer_pb2_grpc.DetokenizerStub(channel)  # type: ignore[assignment]
        call = stub.Stream()
        try:
            # The detokenizer answers with its headers as soon as the stream is open.
            await asyncio.wait_for(call.wait_for_connection(), _CONNECT_TIMEOUT_S)
            self.is_live = True
            self._on_live.set()
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(call))
                while isinstance(batch := await call.read(), pb.StreamBatch):
                    self._dispatch(batch)
                writer.cancel()
        finally:
            call.cancel()

    def _dispatch(self, batch: pb.StreamBatch) -> None:
        streams = self.streams
        for item in batch.chunks:
            stream = streams.get(item.stream)
            if stream is None:
                continue
            if item.HasField("response"):
                chunk = Chunk.from_proto(item.response)
                if chunk.is_final:
                    del streams[item.stream]
                stream.push(chunk)
            else:
                del streams[item.stream]
                error = from_proto(item.error)
                if isinstance(error, UnavailableError):
                    # It drains, or has lost its scheduler: others go first for a while.
                    self.refuses_until = asyncio.get_running_loop().time() + _REFUSAL_S
                stream.fail(error)

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.StreamCommand, pb.StreamBatch]) -> None:
        while True:
            while self._commands:
                await call.write(self._commands.popleft())
            self._wake.clear()
            await self._wake.wait()

    def _send(self, command: pb.StreamCommand) -> None:
        self._commands.append(command)
        self._wake.set()

    def _lose(self) -> None:
        self.is_live = False
        self._commands.clear()
        lost, self.streams = self.streams, {}
        for stream in lost.values():
            stream.fail(UnavailableError(f"the detokenizer at {self.target} was lost"))


class Attachment:
    """Where a ClientStream's output comes from."""

    __slots__ = ("_number", "link")

    def __init__(self, link: DetokenizerLink, number: int) -> None:
        self.link = link
        self._number = number

    def detach(self) -> None:
        """Asks for no more; harmless when it has ended."""
        self.link.detach(self._number)


class DetokenizerPool:
    """All detokenizers that can be found."""

    def __init__(self, targets: str, max_message_bytes: int, tls: Tls | None = None) -> None:
        self.links: dict[str, DetokenizerLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._live = asyncio.Event()
        self._turn = 0
        self._discovery = Discovery(targets, field="detokenizers", on_change=self._set_targets)

    @property
    def num_live(self) -> int:
        """Detokenizers that can be used now."""
        return sum(link.is_live for link in self.links.values())

    async def run(self) -> None:
        """Keeps the links until cancelled."""
        try:
            await self._discovery.run()
            await asyncio.Event().wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def attach(self, stream: ClientStream, *, avoid: DetokenizerLink | None = None) -> Attachment:
        """Attaches to the live detokenizer with the fewest streams, waiting until there is one.

        Args:
            stream: What to attach, at the offsets it has reached.
            avoid: A detokenizer to take only where there is no other.
        """
        while True:
            live = [link for link in self.links.values() if link.is_live]
            now = asyncio.get_running_loop().time()
            live = [link for link in live if link is not avoid and link.refuses_until <= now] or live
            if live:
                # Equals take turns.
                self._turn += 1
                start = self._turn % len(live)
                link = min(live[start:] + live[:start], key=lambda link: len(link.streams))
                return Attachment(link, link.attach(stream))
            self._live.clear()
            await self._live.wait()

    def _set_targets(self, targets: list[str]) -> None:
        for target in set(self.links) - set(targets):
            # What is attached there is failed as the task ends.
            del self.links[target]
            self._tasks.pop(target).cancel()
        for target in targets:
            if target not in self.links:
                name = self._discovery.name_of(target)
                link = DetokenizerLink(target, self._max_message_bytes, self._live, self._tls, name)
                self.links[target] = link
                self._tasks[target] = asyncio.create_task(link.run(), name=f"detokenizer-{target}")
