"""A gRPC channel with a bearer token, and with certificates that may be replaced while it is open. gRPC's own channels
keep the certificates with which they were opened. This one opens a new underlying channel when the files change: new
calls use it, and calls in progress finish on the old one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

_LOOK_INTERVAL_S = 1.0

Open = Callable[[], grpc.aio.Channel]


class SecureChannel(grpc.aio.Channel):
    """Opens channels as certificates change, and adds a token to each call.

    Attributes:
        num_rotations: Number of times that certificates were replaced.
    """

    def __init__(self, open_channel: Open, refresh: Callable[[], int], token: str = "") -> None:
        """Open the first channel.

        Args:
            open_channel: Opens an underlying channel with the newest certificates.
            refresh: Returns a number that changes when the certificates change.
            token: Bearer token; empty if there is none.
        """
        self._open = open_channel
        self._refresh = refresh
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._version = refresh()
        self.num_rotations = 0
        self._looked_at = time.monotonic()
        self._channel = open_channel()
        self._retired: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> SecureChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for channel in (self._channel, self._retired):
            if channel is not None:
                await channel.close(grace)
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the newest channel is connected."""
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("stream_stream", args, kwargs)

    def _method(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        known: tuple[grpc.aio.Channel, Callable[..., Any]] | None = None

        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            nonlocal known
            channel = self._newest()
            if known is None or known[0] is not channel:
                known = channel, getattr(channel, kind)(*args, **kwargs)
            if self._metadata:
                call_kwargs["metadata"] = (*(call_kwargs.get("metadata") or ()), *self._metadata)
            return known[1](*call_args, **call_kwargs)

        return call

    def _newest(self) -> grpc.aio.Channel:
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_INTERVAL_S:
            self._looked_at = now
            version = self._refresh()
            if version != self._version:
                self._version = version
                self.num_rotations += 1
                # Calls may still run on the previous channel; those that outlive two rotations are cancelled and
                # retried.
                if self._retired is not None:
                    task = asyncio.ensure_future(self._retired.close())
                    self._closing.add(task)
                    task.add_done_callback(self._closing.discard)
                self._retired, self._channel = self._channel, self._open()
        return self._channel
