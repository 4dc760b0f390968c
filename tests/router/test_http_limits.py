"""Limits per client on the HTTP port of a router: connections, time and bytes; and the accepted host names."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from midstream.errors import InvalidArgumentError, OverloadedError
from midstream.model.folder import ModelFolder
from midstream.rpc import serving
from midstream.rpc.http2 import GrpcServer
from midstream.rpc.open_files import raise_open_files_limit
from midstream.security.host_header import AllowedHosts
from router.authentication import Authenticator, TokenFile
from router.protocols import body_budget
from router.protocols.body_budget import BodyBudget, max_body_bytes, max_request_bytes
from router.protocols.body_reader import BodyReader
from router.protocols.http_server import ConnectionLimits, HostCheckedApp, HttpPort, for_pages
from router.protocols.openai.body import Body
from tests.router.conftest import Cluster


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer in three pieces, a quarter of a second apart, once the request body is complete."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if not message.get("more_body", False):
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for more in (True, True, False):
        await asyncio.sleep(0.25)
        await send({"type": "http.response.body", "body": b"piece", "more_body": more})


async def exchange(port: int, data: bytes, source: str = "127.0.0.1") -> tuple[bytes, float]:
    """Return all data received until the connection closes, and the seconds until then."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    writer.write(data)
    async with asyncio.timeout(240):
        answer = await reader.read()
    writer.close()
    return answer, time.monotonic() - began


async def open_and_send(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and send `data` before the server, which runs in the same event loop, accepts the connection. Otherwise,
    if the machine stalled in between, the server's time limit for the data could expire.
    """
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(data)
    return await asyncio.open_connection(sock=client)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nhost: x\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhalf",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ],
)
async def test_a_lost_request_is_not_awaited(sent: bytes) -> None:
    port = HttpPort(echo, "127.0.0.1", 0, head_timeout_s=0.3, body_timeout_s=0.3)
    port.start()
    answer, elapsed = await exchange(port.port, sent)
    await port.stop(0)
    assert answer.split()[1:2] == [b"408"]
    assert elapsed > 0.2


@pytest.mark.parametrize("kind", ["HTTP", "gRPC"])
async def test_connections_that_arrive_together_leave_turns_to_others(kind: str) -> None:
    http_port, grpc_server = HttpPort(echo, "127.0.0.1", 0), GrpcServer()
    grpc_port = grpc_server.add_port("127.0.0.1", 0)
    http_port.start()
    await grpc_server.start()
    await exchange(http_port.port, b"invalid\r\n\r\n")  # when it is answered, the port is serving
    waiting, most = [], 0
    with contextlib.ExitStack() as opened:
        for _ in range(64):
            client = opened.enter_context(
                socket.create_connection(("127.0.0.1", http_port.port if kind == "HTTP" else grpc_port))
            )
            client.sendall(b"invalid\r\n\r\n")
            waiting.append(client)
        async with asyncio.timeout(240):
            while waiting:
                await asyncio.sleep(0)
                answered, _, _ = select.select(waiting, [], [], 0)
                most = max(most, len(answered))
                waiting = [client for client in waiting if client not in answered]
    assert most <= 8
    await http_port.stop(0)
    await grpc_server.stop(None)


async def asked_without_end(*, has_begun: bool) -> tuple[HttpPort, asyncio.Task[tuple[bytes, float]]]:
    """Return a port, and the task of a client whose request never ends; with `has_begun`, the response has begun."""
    running = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"piece", "more_body": True})
        running.set()
        await asyncio.Event().wait()

    port = HttpPort(wait, "127.0.0.1", 0)
    port.start()
    asked = asyncio.create_task(exchange(port.port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"))
    await running.wait()
    return port, asked


@pytest.mark.parametrize("has_begun", [False, True])
async def test_requests_that_outlast_the_drain_time_are_rejected(
    has_begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    port, asked = await asked_without_end(has_begun=has_begun)
    await port.stop(0)
    answer, _ = await asked
    assert answer.split()[1:2] == ([b"200"] if has_begun else [b"503"])
    assert (b"retry-after: 1\r\n" in answer) is not has_begun
    assert not answer.endswith(b"\r\n0\r\n\r\n")  # the client must not mistake the response for a complete one
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("times_s", [(60, 0), (0, 60)])
async def test_of_several_drain_times_the_shortest_applies(times_s: tuple[int, int]) -> None:
    port, asked = await asked_without_end(has_begun=False)
    first = asyncio.create_task(port.stop(times_s[0]))
    await asyncio.sleep(0.2 if times_s[0] else 0)
    assert not first.done()
    async with asyncio.timeout(240):
        await port.stop(times_s[1])
        await first
        answer, _ = await asked
    assert answer.split()[1:2] == [b"503"]


async def bodies(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the method and the body of the request."""
    body, is_complete = b"", False
    while not is_complete:
        message = await receive()
        body += message.get("body", b"")
        is_complete = not message.get("more_body", False)
    answer = scope["method"].encode() + b" " + body
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]})
    await send({"type": "http.response.body", "body": answer})


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
async def test_a_request_that_offers_another_protocol_keeps_its_body(offer: bytes, framing: str) -> None:
    """Java's HTTP client and curl offer an upgrade to HTTP/2 in a request. The body of this request must not be parsed
    as another request.
    """
    offers = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nUpgrade: " + offer + b"\r\n"
    text = b"GET /inner HTTP/1.1\r\nhost: x\r\n\r\n"
    if framing == "length":
        head, body = offers + b"content-length: %d\r\n\r\n" % len(text), text
    else:
        head, body = offers + b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text)
    last = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    port = HttpPort(bodies, "127.0.0.1", 0)
    port.start()
    try:
        whole, _ = await exchange(port.port, head + body + head + body + last)
        reader, writer = await open_and_send(port.port, head[:-2])
        for part in (head[-2:], body, last):
            await asyncio.sleep(0)
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(240):
            parts = await reader.read()
        writer.close()
    finally:
        await port.stop(0)
    for answer, count in ((whole, 2), (parts, 1)):
        assert answer.count(b"HTTP/1.1 200") == count + 1
        assert answer.count(b"POST " + text) == count


async def test_an_aborted_port_answers_nobody() -> None:
    port, asked = await asked_without_end(has_begun=False)
    port.abort()
    answer, _ = await asked
    assert answer == b""
    with pytest.raises(ConnectionRefusedError):
        await exchange(port.port, b"")
    await port.stop(0)


async def test_an_answer_may_take_longer_than_its_request() -> None:
    sent = b"GET / HTTP/1.1\r\nhost: x\r\n"
    port = HttpPort(echo, "127.0.0.1", 0, head_timeout_s=0.3, body_timeout_s=0.3)
    port.start()
    # The incomplete header of a pipelined request must not time out before the first request has been answered.
    reader, writer = await open_and_send(port.port, sent + b"\r\n" + sent)
    async with asyncio.timeout(240):
        answer = await reader.read()
    writer.close()
    await port.stop(0)
    assert answer.count(b"piece") == 3


async def test_a_request_that_waits_for_an_earlier_answer_does_not_end_it() -> None:
    port = HttpPort(echo, "127.0.0.1", 0, body_timeout_s=0.1)
    port.start()
    last = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhalf"
    answer, _ = await exchange(port.port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + last)
    assert answer.count(b"piece") == 3
    assert answer.index(b"\r\n0\r\n\r\n") < answer.index(b"HTTP/1.1 408 ")
    await port.stop(0)


async def test_a_further_request_of_a_connection_has_the_same_time_limit() -> None:
    port = HttpPort(echo, "127.0.0.1", 0, head_timeout_s=0.3)
    port.start()
    reader, writer = await open_and_send(port.port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(240):
        assert (await reader.readuntil(b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET / HTTP/1.1\r\nho")
        assert (await reader.read()).startswith(b"HTTP/1.1 408")
    writer.close()
    await port.stop(0)


def test_connections_are_limited_per_address_and_in_total() -> None:
    limits = ConnectionLimits(4)
    assert [limits.enter(address) for address in ("a", "a", "a", "b", "b", "c")] == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    limits.leave("a")
    assert limits.enter("c")


def test_the_connections_of_both_ports_leave_open_files_in_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "raise_open_files_limit", lambda: 1000)
    assert serving.max_connections() == 250
    limits = ConnectionLimits(1000 // 2)
    assert limits.max_connections + serving.max_connections() == 750


async def test_connections_of_one_address_leave_room_for_others() -> None:
    port = HttpPort(echo, "127.0.0.1", 0, max_open_files=16)  # at most 8 connections, and 4 from each address
    port.start()
    held = [await asyncio.open_connection("127.0.0.1", port.port) for _ in range(4)]
    request = b"GET / HTTP/1.0\r\nhost: x\r\n\r\n"
    assert (await exchange(port.port, request))[0].startswith(b"HTTP/1.1 503")
    assert b"200 OK" in (await exchange(port.port, request, "127.0.0.2"))[0]
    held.pop()[1].close()
    async with asyncio.timeout(240):
        while b"200 OK" not in (await exchange(port.port, request))[0]:
            pass
    for _, writer in held:
        writer.close()
    await port.stop(0)


@pytest.mark.parametrize(
    ("bound", "names", "host", "status"),
    [
        ("127.0.0.1", "", "127.0.0.1:8000", 200),
        ("127.0.0.1", "", "LocalHost", 200),
        ("127.0.0.1", "", "[::1]:8000", 200),
        ("127.0.0.1", "", "rebound.example", 421),
        ("127.0.0.1", "", "localhost.rebound.example:8000", 421),
        ("127.0.0.1", "llm.example", "llm.example", 200),
        ("127.0.0.1", "*", "any.example", 200),
        ("0.0.0.0", "", "any.example", 200),
        ("0.0.0.0", "llm.example", "any.example", 421),
    ],
)
async def test_requests_for_the_host_of_another_site_are_rejected(
    bound: str, names: str, host: str, status: int
) -> None:
    port = HttpPort(HostCheckedApp(echo, AllowedHosts(bound, names)), "127.0.0.1", 0)
    port.start()
    answer, _ = await exchange(port.port, f"GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
    await port.stop(0)
    assert answer.split()[1] == str(status).encode()


async def test_a_request_with_several_hosts_is_rejected_unless_all_are_accepted() -> None:
    port = HttpPort(HostCheckedApp(echo, AllowedHosts("127.0.0.1")), "127.0.0.1", 0)
    port.start()
    head = b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: rebound.example\r\nconnection: close\r\n\r\n"
    answer, _ = await exchange(port.port, head)
    await port.stop(0)
    assert answer.split()[1] == b"421"


async def test_web_pages_may_call_the_port_if_their_origin_is_listed() -> None:
    """A preflight has no credentials, so it is answered before they are checked."""
    origin = "https://chat.example"
    for listed, method, status, is_allowed in (
        (f"https://a.example, {origin}", "OPTIONS", b"200", True),
        (origin, "GET", b"200", True),
        ("*", "GET", b"200", True),
        ("https://a.example", "OPTIONS", b"400", False),
        ("", "GET", b"200", False),
    ):
        port = HttpPort(for_pages(echo, listed), "127.0.0.1", 0)
        port.start()
        head = f"{method} / HTTP/1.1\r\nhost: x\r\norigin: {origin}\r\naccess-control-request-method: POST\r\n"
        answer, _ = await exchange(port.port, f"{head}connection: close\r\n\r\n".encode())
        await port.stop(0)
        assert (answer.split()[1], b"access-control-allow-origin: " in answer) == (status, is_allowed)


async def test_web_pages_of_other_sites_cannot_send_calls() -> None:
    """A browser would send a POST request with plain text from such a page without a preflight."""
    own, other = "origin: http://x\r\n", "origin: https://chat.example\r\n"
    for listed, method, headers, status in (
        ("", "POST", "", b"200"),
        ("", "POST", own, b"200"),
        ("", "POST", other, b"403"),
        ("", "DELETE", "origin: null\r\n", b"403"),
        ("", "GET", other, b"200"),
        ("", "POST", f"sec-fetch-site: same-origin\r\n{other}", b"200"),
        ("", "POST", f"sec-fetch-site: cross-site\r\n{other}", b"403"),
        ("", "POST", "sec-fetch-site: none\r\n", b"200"),
        ("https://chat.example", "POST", f"sec-fetch-site: cross-site\r\n{other}", b"200"),
        ("https://other.example", "POST", other, b"403"),
        ("*", "POST", other, b"200"),
    ):
        port = HttpPort(for_pages(echo, listed), "127.0.0.1", 0)
        port.start()
        head = f"{method} / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n{headers}"
        answer, _ = await exchange(port.port, f"{head}connection: close\r\n\r\n".encode())
        await port.stop(0)
        assert answer.split()[1] == status, (listed, method, headers)


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    program = (
        "import resource; from midstream.rpc.open_files import raise_open_files_limit as r;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 900)); print(r(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["900", "(900,", "900)"]
    assert raise_open_files_limit() <= resource.getrlimit(resource.RLIMIT_NOFILE)[1]


async def test_the_bytes_of_a_body_are_counted_once_and_released() -> None:
    budget = BodyBudget(100)
    with budget.hold("a") as held:
        await held.reserve(60)
        held.grow_to(50)
        assert budget.num_bytes == 60
        held.grow_to(100)
        assert budget.num_bytes == 100
    assert budget.num_bytes == 0


async def test_bodies_wait_for_earlier_ones_of_their_client_only() -> None:
    budget = BodyBudget(100)
    budget.add("a", 350)
    first, second = (asyncio.create_task(budget.reserve("a", size)) for size in (100, 10))
    await asyncio.wait_for(budget.reserve("b", 400), 240)
    assert budget.num_bytes == 750
    budget.remove("a", 40)  # still too little room for the first body, which the second must not overtake
    await asyncio.sleep(0)
    assert not first.done() and not second.done()  # noqa: PT018
    budget.remove("a", 10)
    await asyncio.wait_for(first, 240)
    assert not second.done()
    budget.remove("a", 10)
    await asyncio.wait_for(second, 240)
    assert budget.num_bytes == 800


async def test_a_body_that_waits_in_vain_or_no_longer_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "WAIT_S", 0.01)
    budget = BodyBudget(100)
    budget.add("a", 400)
    with pytest.raises(OverloadedError):
        await budget.reserve("a", 1)
    monkeypatch.setattr(body_budget, "WAIT_S", 60.0)
    waiting = asyncio.create_task(budget.reserve("a", 300))
    await asyncio.sleep(0)
    behind = asyncio.create_task(budget.reserve("a", 5))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    budget.remove("a", 5)
    await asyncio.wait_for(behind, 240)
    budget.remove("a", 400)
    assert budget.num_bytes == 0


def test_each_client_and_all_together_have_a_budget_of_bodies() -> None:
    budget = BodyBudget(100)
    for client in "abcd":
        budget.add(client, 400)
        with pytest.raises(OverloadedError):
            budget.add(client, 1)
    with pytest.raises(OverloadedError):
        budget.add("e", 1)
    budget.remove("d", 400)
    budget.add("e", 400)


def test_the_size_of_a_request_is_limited_by_the_context(folder: ModelFolder) -> None:
    assert max_request_bytes(folder, 64 << 20) == (4 << 20) + (4 * 576 + 128) * 8192
    assert max_request_bytes(folder, 1 << 20) == 1 << 20


def test_the_size_of_a_body_is_limited_by_the_context(folder: ModelFolder) -> None:
    assert max_body_bytes(folder, 0, 64 << 20) == (2 << 20) + 128 * 8192
    assert max_body_bytes(folder, 100, 64 << 20) == 100
    assert max_body_bytes(folder, 0, 1 << 20) == 1 << 20


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_that_is_too_large_is_refused_before_it_has_arrived(*, is_chunked: bool) -> None:
    num_read = 0

    async def receive() -> Any:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b" " * 60, "more_body": True}

    headers = [] if is_chunked else [(b"content-length", b"101")]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
    budget = BodyBudget(100)
    with pytest.raises(InvalidArgumentError, match="more than 100 bytes"):
        await BodyReader(budget).read(request, lambda body: body)
    assert (num_read, budget.num_bytes) == (2 if is_chunked else 0, 0)


async def test_unfinished_bodies_of_one_client_do_not_block_others(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("token-of-a-hoarder hoarder\ntoken-of-the-probe probe\n")
    authenticator = Authenticator(tokens=TokenFile(str(tmp_path / "tokens")))
    part = await cluster.add_router(await cluster.add_detokenizer(), authenticator=authenticator)
    assert part.http is not None
    size = 4 << 20  # the maximum size of a body
    token = "authorization: Bearer token-of-a-hoarder"
    head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\n{token}\r\ncontent-length: {size}\r\n\r\n"
    opened = [await asyncio.open_connection("127.0.0.1", part.http.port) for _ in range(6)]
    for _, writer in opened:
        writer.write(head.encode() + b" " * (size - 1))
    refused = [asyncio.ensure_future(reader.readuntil(b"\r\n")) for reader, _ in opened]
    async with asyncio.timeout(240):
        done, _ = await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
    assert all(b" 429 " in task.result() for task in done)
    status, answer = await asyncio.to_thread(tokenize, part.http.port, b'{"prompt": "hello"}')
    assert (status, answer["count"] > 0) == (200, True)
    for task in refused:
        task.cancel()
    await asyncio.gather(*refused, return_exceptions=True)
    for _, writer in opened:
        writer.close()


def tokenize(port: int, body: bytes) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    connection.request("POST", "/tokenize", body, {"authorization": "Bearer token-of-the-probe"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


async def test_large_bodies_of_a_client_are_parsed_one_at_a_time_beside_the_event_loop() -> None:
    reader = BodyReader(BodyBudget(4 << 20))
    may_go_on, two_at_once = threading.Event(), threading.Event()
    running: list[str] = []
    threads = set()

    def make(body: Body) -> int:
        running.append(threading.current_thread().name)
        threads.add(running[-1])
        if len(running) > 1:
            two_at_once.set()
        may_go_on.wait(240)
        two_at_once.wait(0.02)  # enough time for another body's parser to start
        running.pop()
        return len(body.fields)

    def read(content: bytes) -> asyncio.Task[int]:
        messages = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> Any:
            return messages.pop()

        request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)
        return asyncio.create_task(reader.read(request, make if len(content) > 100 else lambda body: len(body.fields)))

    large = [read(b'{"prompt": [' + b"1," * (1 << 16) + b"1]}") for _ in range(3)]
    async with asyncio.timeout(240):
        while not running:  # noqa: ASYNC110 (a thread appends)
            await asyncio.sleep(0.001)
        # While one body is parsed in a thread, the event loop reads other bodies.
        assert await read(b'{"prompt": "hello", "n": 1}') == 2
        assert not any(task.done() for task in large)
        may_go_on.set()
        assert await asyncio.gather(*large) == [1, 1, 1]
    assert not two_at_once.is_set()
    assert threading.main_thread().name not in threads


async def test_a_response_without_a_length_ends_with_the_connection_in_http_1_0() -> None:
    port = HttpPort(echo, "127.0.0.1", 0)
    port.start()
    try:
        answer, _ = await exchange(port.port, b"GET / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert body == b"piecepiecepiece"
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        chunked, _ = await exchange(port.port, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert b"transfer-encoding: chunked" in chunked
    finally:
        await port.stop(0)


@pytest.mark.parametrize(
    ("given", "repeated"),
    [
        (b"X-Request-Id: 7f/a=b", b"7f/a=b"),
        (b"x-request-id: " + b"i" * 128, b"i" * 128),
        (b"X-Request-Id: " + b"i" * 129, None),
        (b"X-Request-Id: two words", None),
        (b"X-Request-Id: caf\xc3\xa9", None),
        (b"X-Request-Id: a\r\nX-Request-Id: b", None),
        (b"X-Other: a", None),
    ],
)
async def test_the_id_that_a_call_brings_is_that_of_its_response(given: bytes, repeated: bytes | None) -> None:
    async def own_id(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"0"), (b"X-Request-ID", b"own")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    port = HttpPort(own_id, "127.0.0.1", 0)
    port.start()
    try:
        answer, _ = await exchange(port.port, b"GET / HTTP/1.0\r\nHost: a\r\n%s\r\n\r\n" % given)
    finally:
        await port.stop(0)
    lines = [line for line in answer.split(b"\r\n") if line.lower().startswith(b"x-request-id:")]
    assert [line.partition(b": ")[2] for line in lines] == [repeated or b"own"]
