"""vLLM's HTTP server, measured by clients with streamed completions of token ids."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .peer import Figures, Paths, Request, Runner, Workload
from .streams import Stream, stream_figures
from .vllm_environment import MAX_SEQUENCE_LENGTH, SETTINGS, Vllm

if TYPE_CHECKING:
    from aiohttp import ClientSession

START_TIMEOUT_S, STOP_TIMEOUT_S = 600.0, 60.0
_POLL_INTERVAL_S = 0.5
_DATA = b"data: "


@dataclass(frozen=True, slots=True)
class VllmServer(Vllm):
    """vLLM's HTTP server with one number format for weights and computation."""

    @property
    def name(self) -> str:
        return f"vllm-server-{self.dtype}"

    @property
    def label(self) -> str:
        return f"vLLM, {self.dtype}, its HTTP server"

    @contextmanager
    def open(self, paths: Paths) -> Iterator[Runner]:
        port = _free_port()
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"),
                *("--port", str(port), "--model", str(paths.bf16), "--served-model-name", "model"),
                *("--dtype", self.dtype, "--max-model-len", str(MAX_SEQUENCE_LENGTH), "--max-num-seqs", "64"),
            ],
            env=os.environ | SETTINGS,
        )
        try:
            _wait_until_healthy(server, port)
            yield lambda workload: asyncio.run(_run(f"http://127.0.0.1:{port}/v1/completions", workload))
        finally:
            server.terminate()
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_healthy(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with exit status {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(_POLL_INTERVAL_S)
    raise RuntimeError(f"the server was not healthy within {START_TIMEOUT_S:.0f} s")


async def _run(url: str, workload: Workload) -> Figures:
    import aiohttp

    places = asyncio.Semaphore(workload.concurrency)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        start = time.perf_counter()

        async def send(request: Request) -> Stream:
            async with places:
                return await _stream(session, url, request)

        streams = await asyncio.gather(*(send(request) for request in workload.requests))
        return stream_figures(workload, streams, time.perf_counter() - start)


async def _stream(session: ClientSession, url: str, request: Request) -> Stream:
    body = {
        "model": "model",
        "prompt": list(request.token_ids),
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    stream = Stream(started=time.perf_counter(), arrivals=[])
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(_DATA) or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[len(_DATA) :])
            if chunk["choices"] and chunk["choices"][0]["token_ids"]:
                stream.arrivals.append((time.perf_counter(), len(chunk["choices"][0]["token_ids"])))
    return stream
