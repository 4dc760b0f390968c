"""The router's HTTP port, served on its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from midstream.rpc.serving import MAX_METADATA_BYTES
from midstream.security.tls import Tls

_LOOK_INTERVAL_S = 1.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the gRPC server's to take; both drain together."""
        yield


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with a limit on what is not body, and the names of the client's certificate."""

    _num_held_bytes = 0  # received, and neither a whole head nor body
    _is_too_large = False

    def data_received(self, data: bytes) -> None:
        """Cuts a connection whose head (or trailer) does not end within the limit."""
        self._num_held_bytes += len(data)
        super().data_received(data)
        if self._num_held_bytes > MAX_METADATA_BYTES and not self.transport.is_closing():
            self._is_too_large = True
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_METADATA_BYTES:
            self._is_too_large = True
            raise ValueError("the head is too large")
        self._num_held_bytes = 0
        certificate = self.transport.get_extra_info("peercert") or {}
        subject = certificate.get("subject", ())
        names = [value for part in subject for key, value in part if key == "commonName"]
        cast("dict[str, object]", self.scope)["certificate_names"] = names
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._num_held_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._num_held_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP, or too much of it."""
        if not self._is_too_large:
            super().send_400_response(msg)
            return
        self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
        self.transport.close()


class HttpPort:
    """An ASGI application on a port."""

    def __init__(self, app: ASGIApp, host: str, port: int, tls: Tls | None = None) -> None:
        """Binds the port; 0 takes a free one, in `self.port`. With `tls` it speaks HTTPS.

        Raises:
            OSError: It is taken.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=2048)
        self.port: int = self._socket.getsockname()[1]
        self._tls = tls
        config = uvicorn.Config(
            app,
            http=_Protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            log_level="warning",
            ssl_context_factory=(lambda *_: tls.http_context()) if tls is not None else None,
        )
        self._server = _Server(config)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to answer."""
        self._tasks.append(asyncio.create_task(self._server.serve([self._socket]), name="http"))
        if self._tls is not None:
            self._tasks.append(asyncio.create_task(_keep_fresh(self._tls), name="certificates"))

    async def stop(self, drain_timeout_s: float) -> None:
        """Takes nothing new, and gives what runs up to `drain_timeout_s`."""
        self._server.config.timeout_graceful_shutdown = max(int(drain_timeout_s), 0)
        self._server.should_exit = True
        for task in self._tasks[1:]:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._socket.close()


async def _keep_fresh(tls: Tls) -> None:
    while True:
        await asyncio.sleep(_LOOK_INTERVAL_S)
        tls.refresh()
