"""Client side of a frame connection that many requests share: it sends commands and receives batches.

It is reopened whenever it breaks; subclasses then send their state again, or report a failure.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeVar

import grpc.aio
from google.protobuf.message import Message

from midstream.config import DetokenizerConfig, RouterConfig
from midstream.rpc import frames
from midstream.rpc.channel import open_channel
from midstream.rpc.connection import Connection
from midstream.security.tls import Tls
from protos import frames_pb2

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.1
_ASK_S = 1.0
# After this number of consecutive failed attempts to connect, a firewall or a service mesh seems to block the port.
_MAX_FAILURES = 3
# For this long it is not tried again, because an attempt may take seconds, for which streams would stand still.
_BLOCKED_S = 60.0

CommandT = TypeVar("CommandT", bound=Message)
BatchT = TypeVar("BatchT", bound=Message)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How this process connects to other services of the system.

    Attributes:
        max_message_bytes: Maximum size of a message in either direction.
        tls: Credentials; None for plain text.
    """

    max_message_bytes: int
    tls: Tls | None = None

    @classmethod
    def from_config(cls, config: RouterConfig | DetokenizerConfig, tls: Tls | None) -> Self:
        return cls(config.max_message_bytes, tls)

    def open_channel(self, target: str, server_name: str) -> grpc.aio.Channel:
        """Return a channel; `server_name` is the name that the certificate must contain, empty if it is the address."""
        return open_channel(target, max_message_bytes=self.max_message_bytes, tls=self.tls, server_name=server_name)


class FrameLink(ABC, Generic[CommandT, BatchT]):
    """The frame connection to one service.

    Attributes:
        is_open: Whether commands reach the service.
    """

    message_class: ClassVar[type[Message]]

    def __init__(
        self, kind: str, target: str, settings: LinkSettings, server_name: str, silence_s: float = 0.0
    ) -> None:
        """Create the stream without opening it.

        Args:
            kind: Kind of the service, for the log.
            server_name: Name that the service's certificate must contain; empty means its address.
            silence_s: Maximum time without a message before the stream is closed; 0 means that only keepalive closes
                it.
        """
        self.target = target
        self.is_open = False
        self._kind = kind
        self._settings = settings
        self._server_name = server_name
        self._silence_s = silence_s
        self._connection: Connection | None = None
        self._lost: asyncio.Future[Exception | None] | None = None
        self._num_failures = 0
        self._blocked_until = -math.inf

    @abstractmethod
    def _ask_for_frames(self, channel: grpc.aio.Channel) -> Awaitable[frames_pb2.FramesOffer]:
        """Request a frame connection."""

    @abstractmethod
    def _take(self, batch: BatchT) -> None:
        """Handle a batch."""

    def _finish_read(self) -> None:
        """Complete the work for the batches that were read together over frames."""

    @abstractmethod
    def _lose(self) -> None:
        """Handle the end of a stream that broke, or the failure to open one."""

    def _hello(self) -> CommandT | None:
        """Return the first command to send, if there is one."""
        return None

    def _greet(self) -> None:
        """Send the initial state over a newly opened stream."""

    def _send(self, command: CommandT) -> None:
        if self._connection is not None:
            self._connection.post(command)

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        async with self._settings.open_channel(self.target, self._server_name) as channel:
            while True:
                try:
                    await self._run_frames(await self._connect(channel))
                except* (grpc.aio.AioRpcError, OSError) as group:
                    level = logging.INFO if self.is_open else logging.DEBUG
                    extra = {self._kind: self.target, "reason": str(group.exceptions[0])[:200]}
                    logger.log(level, "cannot open the stream to %s %s", self._kind, self.target, extra=extra)
                except* Exception:
                    # A bug on either side must not stall the stream.
                    logger.exception("the stream to %s %s failed", self._kind, self.target)
                finally:
                    self.is_open = False
                    self._lose()
                if _is_cancelled():
                    raise asyncio.CancelledError
                await asyncio.sleep(_RECONNECT_S)

    async def _connect(self, channel: grpc.aio.Channel) -> Connection:
        """Open a frame connection; while its port seems to be blocked, within a gRPC call."""
        offer, loop = await self._ask_for_frames(channel), asyncio.get_running_loop()
        limits: dict[str, float] = {"keepalive_s": _ASK_S, "timeout_s": self._silence_s} if self._silence_s else {}
        max_message_bytes, tls = self._settings.max_message_bytes, self._settings.tls
        self._lost = loop.create_future()
        if loop.time() >= self._blocked_until:
            try:
                connection = await frames.connect(
                    offer,
                    self.target,
                    self,
                    max_message_bytes=max_message_bytes,
                    tls=tls,
                    server_name=self._server_name,
                    **limits,
                )
            except OSError as error:
                self._num_failures += 1
                if self._num_failures < _MAX_FAILURES:
                    raise
                self._blocked_until = loop.time() + _BLOCKED_S
                logger.warning("no frame connection to %s %s; using its gRPC port: %s", self._kind, self.target, error)
            else:
                self._num_failures = 0
                return connection
        return await frames.connect_within(channel, offer, self, max_message_bytes=max_message_bytes, **limits)

    async def _run_frames(self, connection: Connection) -> None:
        assert self._lost is not None
        try:
            self._connection = connection
            connection.on_read = self._finish_read
            self.is_open = True
            hello = self._hello()
            if hello is not None:
                connection.post(hello)
            self._greet()
            error = await self._lost
            if error is not None:
                raise error
        finally:
            self._connection = None
            connection.fail(ConnectionAbortedError("the stream has ended"))

    def take(self, batch: BatchT) -> None:
        """Handle a batch received over frames."""
        self._take(batch)

    def resume(self) -> None:
        """Do nothing: commands are few, so they are sent without waiting until the connection is writable."""

    def lose(self, error: Exception | None) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(error)


def _is_cancelled() -> bool:
    """Return whether this task was cancelled, even if an error came first: a task group then raises only the error."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
