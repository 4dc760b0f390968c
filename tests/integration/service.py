"""A real service on this machine, started by `midstream up`, and helpers that call it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from midstream.cli.health import probe_health
from midstream.cli.run_dir import RunDir
from midstream.rpc.channel import open_channel
from protos import generation_pb2 as pb
from protos import service_pb2_grpc, stats_pb2

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

START_TIMEOUT_S = 400

T = TypeVar("T")


def midstream(
    *arguments: str, timeout: float = 240, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command; return its exit status and output."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "midstream.cli", *arguments],
        check=False,
        capture_output=True,
        text=True,
        input=stdin,
        timeout=timeout,
        env=os.environ | environment,
    )


@dataclass(frozen=True)
class Service:
    """A running service."""

    run_dir: Path

    @classmethod
    def start(cls, run_dir: Path, *flags: str, **environment: str) -> Service:
        """Start a service, by default with a process for each part, so that each can be killed alone."""
        if "--shared-process" not in flags:
            flags = ("--shared-process", "off", *flags)
        up = ("up", "--detach", "--port", "0", "--http-port", "0", "--run-dir", str(run_dir), *flags)
        result = midstream(*up, timeout=START_TIMEOUT_S, **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        return cls(run_dir)

    def stop(self) -> None:
        result = midstream("down", "--run-dir", str(self.run_dir))
        assert result.returncode == 0, result.stderr

    def status(self) -> dict[str, Any]:
        result = midstream("status", "--json", "--run-dir", str(self.run_dir))
        status: dict[str, Any] = json.loads(result.stdout)
        return status

    def status_once_serving(self) -> dict[str, Any]:
        """Return the status as soon as every process serves, or at a time limit; on a busy machine, a process may be
        slow to answer.
        """
        deadline = time.monotonic() + 240
        while True:
            status = self.status()
            serves = {process["health"] for process in status["processes"]} == {"serving"}
            if serves or time.monotonic() > deadline:
                return status

    def processes(self, kind: str) -> list[dict[str, Any]]:
        """Return the supervisor's state entries for the processes of this kind."""
        state = RunDir(self.run_dir).read_state()
        assert state is not None
        return [asdict(process) for process in state.of_kind(kind)]

    async def all_serving(self, kind: str) -> list[dict[str, Any]]:
        """Return the processes of this kind, by name, as soon as all of them are healthy."""
        count = len(self.processes(kind))
        serving = await eventually(lambda: self.serving(kind), lambda parts: len(parts) == count, 60)
        assert len(serving) == count
        return serving

    async def serving(self, kind: str) -> list[dict[str, Any]]:
        """Return the healthy processes of this kind, by name."""
        parts = sorted(self.processes(kind), key=lambda part: str(part["name"]))
        problems = [await probe_health(part["addresses"]["http"]) for part in parts]
        return [part for part, problem in zip(parts, problems, strict=True) if problem is None]

    def routers(self) -> list[str]:
        return [process["addresses"]["grpc"] for process in self.processes("router")]


@asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[Stub]:
    async with open_channel(address) as channel:
        yield cast("Stub", service_pb2_grpc.MidstreamStub(channel))


@dataclass(frozen=True)
class Answer:
    text: str
    token_ids: list[int]
    final: pb.GenerateResponse


async def collect(stub: Stub, request: pb.GenerateRequest, timeout_s: float = 120) -> Answer:
    """Run `request` to its end, checking that its chunks cover its tokens exactly once and in order."""
    text, tokens, last = "", list[int](), None
    async for response in stub.Generate(request, timeout=timeout_s):
        assert response.token_offset == len(tokens)
        assert last is None or not last.is_final
        tokens += response.token_ids
        text += response.text
        last = response
    assert last is not None
    assert last.is_final
    return Answer(text, tokens, last)


async def latest_stats(stub: Stub) -> stats_pb2.IterationStats:
    async for stats in stub.GetIterationStats(stats_pb2.GetIterationStatsRequest(), timeout=240):
        return stats
    raise AssertionError("no statistics")


async def eventually_idle(stub: Stub, limit_s: float = 240) -> stats_pb2.IterationStats:
    """Return the statistics once no request is left, or the latest statistics at the time limit."""
    return await eventually(
        lambda: latest_stats(stub),
        lambda stats: (
            not (stats.num_active_requests or stats.num_queued_requests or stats.kv_cache_stats.used_num_blocks)
        ),
        limit_s,
    )


async def eventually(ask: Callable[[], Awaitable[T]], holds: Callable[[T], bool], limit_s: float) -> T:
    """Return the result of `ask` as soon as `holds` accepts it, or the latest result at the time limit."""
    deadline = time.monotonic() + limit_s
    while True:
        value = await ask()
        if holds(value) or time.monotonic() > deadline:
            return value
        await asyncio.sleep(0.05)


def chat(text: str, **fields: Any) -> pb.GenerateRequest:
    """Return a greedy request with one user message."""
    message = pb.ChatMessage(role="user", content=text)
    sampling = pb.SamplingConfig(temperature=0)
    return pb.GenerateRequest(**{"chat": pb.ChatInput(messages=[message]), "sampling": sampling} | fields)


def tokens(values: Sequence[int], **fields: Any) -> pb.GenerateRequest:
    """Return a greedy request for token ids that ignores the end id."""
    base = {"sampling": pb.SamplingConfig(temperature=0), "stopping": pb.StoppingConfig(ignore_eos=True)}
    return pb.GenerateRequest(**{"token_ids": pb.TokenIds(values=values)} | base | fields)
