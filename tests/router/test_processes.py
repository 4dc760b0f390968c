"""`python -m router` and `python -m detokenizer` as processes: they drain on SIGTERM, and killing them loses no
output.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from midstream.client import AsyncClient, Result
from midstream.config import RouterConfig
from midstream.model.tokenizer import Tokenizer
from midstream.rpc.channel import open_channel
from protos import generation_pb2, loads_pb2, service_pb2_grpc
from router import __main__ as router
from tests.detokenizer.scripted_scheduler import ScriptedScheduler, scripted_scheduler
from tests.ports import free_ports

TEXT = "Every part may die 🫠 and the text goes on: 日本語, naïve, done."


@dataclass
class Process:
    """A running component."""

    process: asyncio.subprocess.Process
    port: int
    http_port: int
    log: list[bytes]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def ready(self) -> None:
        """Wait until the process reports SERVING."""
        async with asyncio.timeout(240), open_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            async for response in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return

    def get(self, path: str) -> str:
        """Return a page from the HTTP port of the process."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=240) as response:
            return str(response.read().decode())


Start = Callable[..., "asyncio.Future[Process]"]


@pytest.fixture
async def scheduler() -> AsyncIterator[tuple[ScriptedScheduler, str]]:
    scheduler = scripted_scheduler()
    yield scheduler, await scheduler.start()
    await scheduler.stop()


@pytest.fixture
async def start(scheduler: tuple[ScriptedScheduler, str]) -> AsyncIterator[Start]:
    processes: list[Process] = []
    readers: list[asyncio.Task[None]] = []

    async def run(service: str, *flags: str) -> Process:
        port, http_port = free_ports(2)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", service, "--port", str(port), "--http-port", str(http_port),
            "--schedulers", scheduler[1], *flags, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        log: list[bytes] = []

        async def read() -> None:
            assert process.stderr is not None
            async for line in process.stderr:
                log.append(line)  # noqa: PERF401 (it is read while it grows)

        readers.append(asyncio.create_task(read()))
        part = Process(process, port, http_port, log)
        processes.append(part)
        await part.ready()
        return part

    def begin(service: str, *flags: str) -> asyncio.Future[Process]:
        return asyncio.ensure_future(run(service, *flags))

    yield begin
    for item in processes:
        with contextlib.suppress(ProcessLookupError):
            item.process.kill()
        await item.process.wait()
    await asyncio.gather(*readers)


async def test_any_part_may_die_or_drain(
    scheduler: tuple[ScriptedScheduler, str], start: Start, tokenizer: Tokenizer
) -> None:
    feed, _ = scheduler
    detokenizers = list(await asyncio.gather(start("detokenizer"), start("detokenizer")))
    targets = ",".join(item.address for item in detokenizers)
    flags = ("--detokenizers", targets)
    routers = list(await asyncio.gather(start("router", *flags), start("router", *flags)))
    ids = tokenizer.encode(TEXT)
    async with AsyncClient([router.address for router in routers]) as client:
        stream = client.generate(token_ids=[5], request_id="r")
        result = Result("r")

        async def read_to(count: int) -> None:
            feed.emit("r", ids[len(feed.requests["r"].tokens.get(0, [])) : count])
            while len(result.token_ids) < count:
                result.add(await asyncio.wait_for(anext(stream), 240))

        opening = asyncio.ensure_future(anext(stream))
        await feed.until(lambda: "r" in feed.requests)
        feed.emit("r", ids[:2])
        result.add(await opening)

        serving = await attached_part(detokenizers)
        serving.process.kill()
        await read_to(8)
        serving = await attached_part([item for item in detokenizers if item is not serving])
        router = await attached_part(routers)
        router.process.kill()
        await read_to(12)

        survivor = next(item for item in routers if item is not router)
        survivor.process.send_signal(signal.SIGTERM)
        await read_to(16)
        serving.process.send_signal(signal.SIGTERM)
        await read_to(len(ids))
        feed.end("r")
        async for chunk in stream:
            result.add(chunk)
        assert (result.text, result.token_ids) == (TEXT, ids)
        assert feed.aborts == []
        assert await asyncio.wait_for(survivor.process.wait(), 240) == 0
        assert await asyncio.wait_for(serving.process.wait(), 240) == 0
    for item in (survivor, serving):
        lines = [json.loads(line) for line in item.log if line.startswith(b"{")]
        assert {"draining", "stopped"} <= {line["message"] for line in lines}
        assert [line for line in lines if line["level"] == "error"] == []


async def attached_part(parts: list[Process]) -> Process:
    """Return the process that serves the stream, found by its metrics: relayed tokens on a router, attached streams on
    a detokenizer.
    """
    async with asyncio.timeout(240):
        while True:
            for part in parts:
                lines = (await asyncio.to_thread(part.get, "/metrics")).splitlines()
                values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("midstream:"))
                name = "midstream:num_attached_streams"
                if float(values.get(name, values.get("midstream:relayed_tokens_total", 0))) > 0:
                    return part
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("service", "flags", "message"),
    [
        ("router", ("--model", "/nowhere"), "/nowhere"),
        ("detokenizer", ("--schedulers", "host"), "schedulers"),
        ("router", ("--detokenizers", ""), "detokenizers"),
    ],
)
async def test_a_wrong_setting_ends_the_process_with_its_name(
    service: str, flags: tuple[str, ...], message: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", service, "--port", "0", "--http-port", "0", *flags, stderr=asyncio.subprocess.PIPE
    )
    _, log = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 2
    assert message in log.decode()


async def test_the_port_of_a_router_cannot_be_shared() -> None:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", "--port", port, "--http-port", "0", stderr=asyncio.subprocess.PIPE
        )
        _, log = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 2
    assert "cannot listen" in log.decode()


async def test_routers_share_ports(start: Start) -> None:
    """The kernel distributes connections among the routers; after a router's death, new connections go to the other
    one.
    """
    shared = free_ports(2)
    detokenizer = await start("detokenizer")
    ports = ("--shared-port", str(shared[0]), "--shared-http-port", str(shared[1]))
    flags = ("--detokenizers", detokenizer.address, *ports)
    routers = list(await asyncio.gather(start("router", *flags), start("router", *flags)))
    for port in shared:
        with contextlib.ExitStack() as opened:
            for _ in range(40):
                opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            await accepted_by_all(routers, port)
    routers[0].process.kill()
    await routers[0].process.wait()
    survivor = dataclasses.replace(routers[1], port=shared[0], http_port=shared[1])
    for _ in range(8):
        assert "midstream" in await asyncio.to_thread(survivor.get, "/metrics")
        await survivor.ready()


async def test_a_draining_router_leaves_the_shared_ports_at_once(
    scheduler: tuple[ScriptedScheduler, str], start: Start
) -> None:
    """While the router still serves its own ports, new connections to the shared ports and the next calls of idle ones
    go to other routers.
    """
    feed, _ = scheduler
    shared = free_ports(2)
    ports = ("--shared-port", str(shared[0]), "--shared-http-port", str(shared[1]))
    delay = ("--drain-delay-s", "120", "--drain-timeout-s", "120")
    leaving = await start("router", "--detokenizers", (await start("detokenizer")).address, *ports, *delay)
    async with AsyncClient([leaving.address]) as client, contextlib.AsyncExitStack() as opened:
        running = asyncio.ensure_future(client.generate(token_ids=[5], request_id="r").result())
        await feed.until(lambda: "r" in feed.requests)
        idle, new = [await open_http(opened, port) for port in (shared[1], shared[1])]
        assert "connection: close" not in await ask(*idle)
        leaving.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(idle[0].read(), 240) == b""
        assert "connection: close" in await ask(*new)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            await asyncio.to_thread(leaving.get, "/health")
        found = psutil.Process(leaving.process.pid).net_connections("tcp")
        listening = {entry.laddr.port for entry in found if entry.status == psutil.CONN_LISTEN}
        assert listening == {leaving.port, leaving.http_port}
        async with AsyncClient([leaving.address]) as other:
            late = asyncio.ensure_future(other.generate(token_ids=[5], request_id="late").result())
            await feed.until(lambda: "late" in feed.requests)
            for request_id in ("r", "late"):
                feed.end(request_id)
            await asyncio.gather(running, late)
    leaving.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(leaving.process.wait(), 240) == 0


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def open_http(opened: contextlib.AsyncExitStack, port: int) -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    opened.callback(writer.close)
    return reader, writer


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Send a request; return the status line and headers of the response in lower case."""
    writer.write(b"HEAD /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 240)).decode().lower()


async def accepted_by_all(processes: list[Process], port: int) -> None:
    """Wait until each process has open connections on the port."""
    async with asyncio.timeout(240):
        while True:
            found = [psutil.Process(item.process.pid).net_connections("tcp") for item in processes]
            if all(any(_is_open(entry, port) for entry in entries) for entries in found):
                return
            await asyncio.sleep(0.02)


def _is_open(entry: Any, port: int) -> bool:
    return bool(entry.laddr.port == port and entry.status == psutil.CONN_ESTABLISHED)


async def test_a_router_receives_no_larger_messages_than_its_model_needs() -> None:
    (port,) = free_ports(1)
    serving = asyncio.create_task(router.serve(RouterConfig(port=port, http_port=0)))
    # The limit allows float32 embeddings for the whole context of 8,192 tokens, plus some megabytes.
    request = generation_pb2.GenerateRequest(prompt="a" * (32 << 20))
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call: Any = service_pb2_grpc.MidstreamStub(channel).Generate(request, wait_for_ready=True, timeout=240)
        with pytest.raises(grpc.aio.AioRpcError, match="the message is larger than max") as raised:
            await call.read()
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(serving, 240)


async def test_requests_that_arrive_before_schedulers_are_discovered_wait(
    scheduler: tuple[ScriptedScheduler, str],
) -> None:
    """The other scheduler does not answer whether it is the active one."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port, http_port = free_ports(2)
        targets = f"one-of:{scheduler[1]}|127.0.0.1:{other.getsockname()[1]}"
        serving = asyncio.create_task(router.serve(RouterConfig(port=port, http_port=http_port, schedulers=targets)))
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = service_pb2_grpc.MidstreamStub(channel)
            info = await stub.GetModelInfo(loads_pb2.GetModelInfoRequest(), wait_for_ready=True, timeout=240)
        assert info.model == "smollm2"
        signal.raise_signal(signal.SIGINT)
        await asyncio.wait_for(serving, 240)
