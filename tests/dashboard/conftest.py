from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.client import AsyncClient, SamplingParams
from tests.dashboard.webdriver import Browser, chromium
from tests.integration.service import Service
from tests.ports import free_ports

HOSTILE = "<img src=x onerror=document.title='broken'>"
TOKEN = "a-token-that-somebody-knows"
# Number of concurrent requests. Their prompts have a common prefix, so that they share blocks.
_NUM_CLIENTS = 10
_BEGINNING = "You know the rivers of Europe, their towns, their bridges and their ships. Answer in full sentences. "


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Start two processes of each component, with a KV cache that is small enough to fill visibly."""
    flags = ("--routers", "2", "--detokenizers", "2", "--workers", "2")
    settings = {"MIDSTREAM_MAX_KV_TOKENS": "4096", "MIDSTREAM_MAX_BATCH_SIZE": "4"}
    service = Service.start(tmp_path_factory.mktemp("service"), *flags, **settings)
    yield service
    service.stop()


@pytest.fixture(scope="session")
def load(service: Service) -> Iterator[None]:
    """Run clients that send requests continuously."""
    running = threading.Thread(target=asyncio.run, args=(_ask(service.routers(), stop := threading.Event()),))
    running.start()
    yield
    stop.set()
    running.join()


async def _ask(routers: list[str], stop: threading.Event) -> None:
    async def ask(number: int, client: AsyncClient) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            text = f"{_BEGINNING}Tell me about river number {number * 100 + turn}."
            sampling = SamplingParams(max_tokens=80 + 8 * number, temperature=0.8)
            async for _ in client.generate(messages=[{"role": "user", "content": text}], sampling=sampling):
                if stop.is_set():
                    return

    async with AsyncClient(routers) as client, asyncio.TaskGroup() as group:
        for number in range(_NUM_CLIENTS):
            group.create_task(ask(number, client))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@contextlib.contextmanager
def running(module: str, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run another process of the service; yield the process and its HTTP port."""
    port, http_port = free_ports(2)
    command = [sys.executable, "-m", module, "--port", str(port), "--http-port", str(http_port), *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield process, http_port
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def hostile(service: Service) -> Iterator[subprocess.Popen[bytes]]:
    """Start a detokenizer whose name is HTML markup."""
    (scheduler,) = service.processes("scheduler")
    with running("detokenizer", "--name", HOSTILE, "--schedulers", scheduler["addresses"]["grpc"]) as (process, _):
        yield process


@pytest.fixture
def locked(service: Service, tmp_path: Path) -> Iterator[str]:
    """Start a router that requires a token; return its address."""
    (scheduler,) = service.processes("scheduler")
    detokenizers = ",".join(item["addresses"]["grpc"] for item in service.processes("detokenizer"))
    (tmp_path / "tokens").write_text(f"{TOKEN} somebody\n")
    auth = ("--auth", "token", "--auth-tokens", str(tmp_path / "tokens"), "--name", "locked")
    links = ("--schedulers", scheduler["addresses"]["grpc"], "--detokenizers", detokenizers)
    with running("router", *links, *auth) as (_, http_port):
        yield f"127.0.0.1:{http_port}"
