"""How the HTTP port ends connections while its process leaves: no request is lost, and no stream announces the end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.protocols.http_server import HttpPort

SIZED = b"GET /sized HTTP/1.1\r\nhost: x\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"


class App:
    """Answers /sized with a body of known size, and everything else with a stream that waits for `release`."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.release = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_sized = scope["path"] == "/sized"
        self.is_asked.set()
        headers = [(b"content-length", b"2")] if is_sized else [(b"content-type", b"text/event-stream")]
        if not is_sized:
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
async def port(app: App) -> AsyncIterator[HttpPort]:
    port = HttpPort(app, "127.0.0.1", 0)
    port.start()
    async with asyncio.timeout(240):
        while not hasattr(port._server, "servers"):  # noqa: ASYNC110 (nothing signals it)
            await asyncio.sleep(0)
    yield port
    await port.stop(0)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(port: HttpPort) -> Connection:
    return await asyncio.open_connection("127.0.0.1", port.port)


async def head_of(reader: asyncio.StreamReader) -> str:
    async with asyncio.timeout(240):
        return (await reader.readuntil(b"\r\n\r\n")).decode().lower()


async def rest_of(connection: Connection) -> bytes:
    """Return what is sent until the server closes the connection."""
    async with asyncio.timeout(240):
        rest = await connection[0].read()
    connection[1].close()
    return rest


async def test_the_last_response_announces_the_end_unless_it_is_a_stream(port: HttpPort, app: App) -> None:
    sized, stream = await connect(port), await connect(port)
    for connection in (sized, stream):
        connection[1].write(SIZED)
        assert "connection: close" not in await head_of(connection[0])
        await connection[0].readexactly(2)
    port.leave()
    sized[1].write(SIZED)
    assert "connection: close" in await head_of(sized[0])
    assert await rest_of(sized) == b"ok"
    stream[1].write(STREAM)
    app.release.set()
    assert "connection" not in await head_of(stream[0])
    assert await rest_of(stream) == b"2\r\nok\r\n0\r\n\r\n"


async def test_a_stream_that_runs_when_the_port_closes_does_not_announce_the_end(port: HttpPort, app: App) -> None:
    stream, asks_for_it = await connect(port), await connect(port)
    stream[1].write(STREAM)
    asks_for_it[1].write(STREAM.replace(b"host: x", b"host: x\r\nconnection: close"))
    await app.is_asked.wait()
    stopping = asyncio.create_task(port.stop(60))
    await asyncio.sleep(0.2)  # more than uvicorn needs to notice
    app.release.set()
    assert "connection" not in await head_of(stream[0])
    assert "connection: close" in await head_of(asks_for_it[0])
    for connection in (stream, asks_for_it):
        assert await rest_of(connection) == b"2\r\nok\r\n0\r\n\r\n"
    await stopping


async def test_a_stream_to_a_client_that_has_closed_its_side_does_not_announce_the_end(
    port: HttpPort, app: App
) -> None:
    stream = await connect(port)
    stream[1].write(STREAM)
    stream[1].write_eof()
    await app.is_asked.wait()
    app.release.set()
    assert "connection" not in await head_of(stream[0])
    assert await rest_of(stream) == b"2\r\nok\r\n0\r\n\r\n"


async def test_requests_that_follow_on_a_connection_are_answered_before_its_end(port: HttpPort, app: App) -> None:
    connection = await connect(port)
    connection[1].write(STREAM + SIZED)
    await app.is_asked.wait()
    stopping = asyncio.create_task(port.stop(60))
    app.release.set()
    assert "connection" not in await head_of(connection[0])
    assert await connection[0].readexactly(12) == b"2\r\nok\r\n0\r\n\r\n"
    assert "connection: close" in await head_of(connection[0])
    assert await rest_of(connection) == b"ok"
    await stopping


async def test_a_connection_that_waits_to_be_accepted_when_the_port_closes_is_served(port: HttpPort) -> None:
    client = socket.create_connection(("127.0.0.1", port.port))
    client.sendall(SIZED)
    stopping = asyncio.create_task(port.stop(60))  # before the event loop accepts the connection
    connection = await asyncio.open_connection(sock=client)
    assert "connection: close" in await head_of(connection[0])
    assert await rest_of(connection) == b"ok"
    await stopping
    with pytest.raises(ConnectionRefusedError):
        await connect(port)


async def test_a_request_on_a_new_connection_is_served_while_idle_ones_are_closed(port: HttpPort) -> None:
    used, new, silent = [await connect(port) for _ in range(3)]
    used[1].write(SIZED)
    await head_of(used[0])
    assert await used[0].readexactly(2) == b"ok"
    stopping = asyncio.create_task(port.stop(60))
    assert await rest_of(used) == b""
    new[1].write(SIZED)
    assert "connection: close" in await head_of(new[0])
    assert await rest_of(new) == b"ok"
    assert (await rest_of(silent)).startswith(b"HTTP/1.1 408 ")
    await asyncio.wait_for(stopping, 240)
