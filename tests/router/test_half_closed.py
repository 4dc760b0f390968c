"""Clients that close their side of an HTTP connection after their request, and still read the answer."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time
from typing import Any

import pytest

from midstream.model.tokenizer import Tokenizer
from router.protocols import http_server
from router.protocols.http_server import HttpPort
from tests.router.adapters.test_openai import answer
from tests.router.conftest import Cluster, Part

STREAMING = [pytest.param(False, id="complete"), pytest.param(True, id="streaming")]


@pytest.fixture
async def router(cluster: Cluster) -> Part:
    return await cluster.add_router(await cluster.add_detokenizer())


def connect(port: int, *requests: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"".join(requests))
    return client


async def rest_of(client: socket.socket) -> bytes:
    """Close the client's side; return everything up to the end of the connection."""
    client.shutdown(socket.SHUT_WR)
    reader, writer = await asyncio.open_connection(sock=client)
    async with asyncio.timeout(240):
        data = await reader.read()
    writer.close()
    return data


def completion(request_id: str, *, stream: bool, version: str = "1.1") -> bytes:
    body = json.dumps({"prompt": "Hi", "stream": stream, "request_id": request_id}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("stream", STREAMING)
@pytest.mark.parametrize("is_slow", [False, True], ids=["quick", "slow"])
async def test_the_answer_arrives_and_the_connection_ends(
    cluster: Cluster, router: Part, tokenizer: Tokenizer, stream: bool, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits, a client of a slow answer gets data without a meaning."""
    monkeypatch.setattr(http_server, "_PROBE_AFTER_S", 0.0 if is_slow else 60.0)
    assert router.http is not None
    client = connect(router.http.port, completion("r", stream=stream))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    head = await received(client, b"\r\n\r\n") if stream else b""
    client.shutdown(socket.SHUT_WR)
    if is_slow:
        meaningless = b"3\r\n:\n\n\r\n" if stream else b"HTTP/1.1 100 Continue\r\n\r\n"
        assert await received(client, meaningless) == meaningless
    await answer(cluster, "r", tokenizer.encode("Once upon a time"))
    data = head + await rest_of(client)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    if stream:
        events = re.findall(rb"^data: (\{.*\})$", body, re.MULTILINE)
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "Once upon a time"
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert b"connection: close" in head
        assert json.loads(body)["choices"][0]["text"] == "Once upon a time"


async def received(client: socket.socket, end: bytes) -> bytes:
    """Return what was received up to `end`."""
    client.setblocking(False)
    data = b""
    async with asyncio.timeout(240):
        while not data.endswith(end):
            data += await asyncio.get_running_loop().sock_recv(client, 1)
    return data


@pytest.mark.parametrize("stream", STREAMING)
@pytest.mark.parametrize("how", ["close", "reset", "half-close, then close"])
async def test_the_request_of_a_client_that_leaves_is_aborted_within_a_second(
    cluster: Cluster, router: Part, stream: bool, how: str
) -> None:
    assert router.http is not None
    client = connect(router.http.port, completion("r", stream=stream))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif how != "close":
        client.shutdown(socket.SHUT_WR)
    left_at = time.monotonic()
    client.close()
    await cluster.scheduler.until(lambda: cluster.scheduler.aborts == ["r"])
    assert time.monotonic() - left_at < 1.0


async def test_all_requests_that_were_sent_at_once_are_answered() -> None:
    port = HttpPort(path_of, "127.0.0.1", 0)
    port.start()
    requests = [b"GET /path-%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(3)]
    data = await rest_of(connect(port.port, *requests))
    await port.stop(0)
    assert re.findall(rb"/path-\d", data) == [b"/path-0", b"/path-1", b"/path-2"]


async def path_of(scope: Any, receive: Any, send: Any) -> None:
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.request":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})


@pytest.mark.parametrize(
    ("sent", "num_answers"),
    [
        (b"", 0),
        (b"GET / HTTP/1.1\r\nhost", 0),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhalf", 0),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", 1),
    ],
)
async def test_a_connection_without_a_request_that_waits_is_closed(sent: bytes, num_answers: int) -> None:
    port = HttpPort(path_of, "127.0.0.1", 0)
    port.start()
    client = connect(port.port, sent)
    head = await received(client, b"\r\n\r\n") if num_answers else b""
    async with asyncio.timeout(3):
        data = head + await rest_of(client)
    await port.stop(0)
    assert data.count(b"HTTP/1.1 200") == num_answers
