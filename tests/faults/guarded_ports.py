"""A gRPC and an HTTP server in this process that return the name of the caller, and clients for them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

from midstream.rpc.errors import Admit
from midstream.rpc.health import Progress
from midstream.rpc.serving import Server
from midstream.security.tls import Tls
from router.authentication import AuthenticatedApp, Authenticator, current_caller
from router.protocols.http_server import HttpPort
from router.protocols.openai.app import refuse

# These are names of the real service, so that the roles of its methods apply.
SERVICE = "midstream.v1.Midstream"


@contextlib.asynccontextmanager
async def serving(
    tls: Tls | None,
    authenticator: Authenticator | None = None,
    admit: Admit | None = None,
) -> AsyncIterator[str]:
    """Run a server whose method `GetModelInfo` returns the name of the caller."""
    if authenticator is not None:
        admit = authenticator.admit
    server = Server(SERVICE, "127.0.0.1", 0, Progress(), tls=tls, admit=admit)

    async def answer(request: bytes, context: object) -> bytes:
        return current_caller.get().name.encode()

    async def stream(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield current_caller.get().name.encode()
        await asyncio.Event().wait()

    methods: dict[str, Any] = {
        "GetModelInfo": grpc.unary_unary_rpc_method_handler(cast("Any", answer)),
        "GetStatus": grpc.unary_stream_rpc_method_handler(cast("Any", stream)),
    }
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    await server.start()
    yield f"127.0.0.1:{server.port}"
    await server.stop()


def who_am_i(channel: grpc.aio.Channel) -> Any:
    return channel.unary_unary(f"/{SERVICE}/GetModelInfo")


def stream_of(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(f"/{SERVICE}/GetStatus")


async def ask(channel: grpc.aio.Channel) -> str:
    return bytes(await who_am_i(channel)(b"", timeout=240)).decode()


def fetch(url: str, context: ssl.SSLContext | None = None, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=240, context=context) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def _page(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": current_caller.get().name.encode()})


@contextlib.asynccontextmanager
async def http_port(authenticator: Authenticator, tls: Tls | None = None) -> AsyncIterator[int]:
    port = HttpPort(AuthenticatedApp(_page, authenticator, refuse), "127.0.0.1", 0, tls)
    port.start()
    yield port.port
    await port.stop(0)


def replace(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_bytes(data)
    temporary.replace(path)
