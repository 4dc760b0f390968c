"""One side of a stream that many requests share: commands go up, batches come down.

It is opened again whenever it breaks, so whoever builds on it says what hangs on it anew, or gives it up.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar, cast

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from midstream.rpc.serving import open_channel
from midstream.security.tls import Tls

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.1
_ASK_S = 1.0

CommandT = TypeVar("CommandT")
BatchT = TypeVar("BatchT")


class CommandStream(ABC, Generic[CommandT, BatchT]):
    """The stream to one service.

    Attributes:
        target: Its address.
        is_open: Whether commands reach it.
    """

    def __init__(
        self,
        kind: str,
        target: str,
        max_message_bytes: int,
        tls: Tls | None,
        server_name: str,
        silence_s: float = 0.0,
    ) -> None:
        """Opens nothing yet.

        Args:
            kind: What is there, for the log.
            target: Its address.
            max_message_bytes: Largest message, each way.
            tls: Certificates; None: plain text.
            server_name: Name that its certificate must carry; empty: its address.
            silence_s: How long it may leave a question after its health unanswered before the stream is given up; 0: it
                is not asked, and only a closed connection or keepalive ends the stream.
        """
        self.target = target
        self.is_open = False
        self._kind = kind
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._server_name = server_name
        self._silence_s = silence_s
        self._commands: deque[CommandT] = deque()
        self._wake = asyncio.Event()

    @abstractmethod
    def _call(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[CommandT, BatchT]:
        """Calls the method."""

    @abstractmethod
    async def _begin(self, call: grpc.aio.StreamStreamCall[CommandT, BatchT]) -> None:
        """Makes sure that the other side is there, and may send what it is to know first."""

    @abstractmethod
    def _take(self, batch: BatchT) -> None:
        """Takes what came."""

    @abstractmethod
    def _lose(self) -> None:
        """Notes that the stream broke, or did not open."""

    def _send(self, command: CommandT) -> None:
        self._commands.append(command)
        self._wake.set()

    async def run(self) -> None:
        """Keeps the stream open until cancelled."""
        async with open_channel(
            self.target, max_message_bytes=self._max_message_bytes, tls=self._tls, server_name=self._server_name
        ) as channel:
            while True:
                try:
                    await self._run_once(channel)
                except* (grpc.aio.AioRpcError, TimeoutError):
                    level = logging.INFO if self.is_open else logging.DEBUG
                    logger.log(level, "no stream to %s %s", self._kind, self.target, extra={self._kind: self.target})
                except* Exception:
                    # A defect here or there; the stream must not stand still for it.
                    logger.exception("the stream to %s %s failed", self._kind, self.target)
                finally:
                    self.is_open = False
                    self._lose()
                if _is_cancelled():
                    raise asyncio.CancelledError
                await asyncio.sleep(_RECONNECT_S)

    async def _run_once(self, channel: grpc.aio.Channel) -> None:
        self._commands.clear()
        call = self._call(channel)
        try:
            await self._begin(call)
            self.is_open = True
            self._wake.set()
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(call))
                asking = group.create_task(self._ask(channel)) if self._silence_s else None
                while (batch := await call.read()) is not grpc.aio.EOF:
                    self._take(cast("BatchT", batch))
                writer.cancel()
                if asking is not None:
                    asking.cancel()
        finally:
            call.cancel()

    async def _ask(self, channel: grpc.aio.Channel) -> None:
        """Raise TimeoutError once the other side answers nothing: it may stand still behind an open connection."""
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            await asyncio.sleep(_ASK_S)
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._silence_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise TimeoutError from None

    async def _write(self, call: grpc.aio.StreamStreamCall[CommandT, BatchT]) -> None:
        while True:
            while self._commands:
                await call.write(self._commands.popleft())
            self._wake.clear()
            await self._wake.wait()


def _is_cancelled() -> bool:
    """Whether this task is to end, though what it met first was an error: a task group raises its errors alone."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
