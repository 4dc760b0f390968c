"""Measure the cost of HTTP compared with native gRPC: `python -m benchmarks.http_cost [--fake] [--streams 64] [--rounds
4]`.

Starts one service and sends requests over native gRPC and as OpenAI completions (SSE), in alternating order. Prints
output tokens per second of each way, and the processor time that router and client spent on a token. With `--fake` the
worker has no model, so that only the control plane is measured.

Both clients are in this process and parse what they get: protobuf by gRPC, JSON by the standard library.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.control_plane import cpu_seconds, wait_until_whole
from midstream.cli.bench.measure import run_workload
from midstream.cli.bench.workloads import BenchRequest, Workload
from midstream.client import AsyncClient
from midstream.model.folder import open_model_folder
from tests.integration.parts import free_ports

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Target:
    """A router: its addresses and process."""

    grpc: str
    http_port: int
    process: psutil.Process


# Send prompts with this many tokens to generate, and read all output.
Way = Callable[[Target, list[tuple[int, ...]], int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one protocol; processor times in µs per token."""

    tokens_per_s: float
    router_us: float
    client_us: float


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true", help="A worker without a model.")
    parser.add_argument("--step-ms", type=float, default=0.0, help="Duration of a fake step. [0]")
    parser.add_argument("--streams", type=int, default=64, help="Concurrent requests. [64]")
    parser.add_argument("--tokens", type=int, default=32, help="Output tokens of each. [32]")
    parser.add_argument("--rounds", type=int, default=4, help="Runs per protocol. [4]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, start_service(Path(folder), arguments) as target:
        runs = asyncio.run(measure(target, arguments))
    report(runs, Console())
    return 0


@contextlib.contextmanager
def start_service(folder: Path, arguments: argparse.Namespace) -> Iterator[Target]:
    """Run one router, scheduler, detokenizer and worker as processes on this machine."""
    scheduler, worker, detokenizer, grpc_port, http_port = free_ports(5)
    model = open_model_folder("smollm2")
    fake = f"--model-fingerprint {model.fingerprint} --vocab-size {model.vocab_size} --num-blocks 65536"
    fake += f" --step-ms {arguments.step_ms}"
    commands = {
        "scheduler": f"-m scheduler --port {scheduler} --worker-port {worker} --journal-path {folder}/journal.sqlite "
        "--log-level warning",
        "worker": f"-m tests.fakes.worker --scheduler tcp://127.0.0.1:{worker} {fake}"
        if arguments.fake
        else f"-m gpu_worker --scheduler tcp://127.0.0.1:{worker} --log-level warning",
        "detokenizer": f"-m detokenizer --port {detokenizer} --schedulers 127.0.0.1:{scheduler} --log-level warning",
        "router": f"-m router --port {grpc_port} --http-port {http_port} --schedulers 127.0.0.1:{scheduler} "
        f"--detokenizers 127.0.0.1:{detokenizer} --log-level warning",
    }
    processes: dict[str, psutil.Popen] = {}
    try:
        for name, command in commands.items():
            processes[name] = psutil.Popen([sys.executable, *command.split()], cwd=ROOT)
        yield Target(f"127.0.0.1:{grpc_port}", http_port, psutil.Process(processes["router"].pid))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


async def measure(target: Target, arguments: argparse.Namespace) -> dict[str, list[Run]]:
    """Return the runs of each protocol."""
    async with AsyncClient([target.grpc]) as client:
        await wait_until_whole(client)
    generator = random.Random(0)
    ways: dict[str, Way] = {"native gRPC": native, "HTTP": http}
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(-1, arguments.rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            # New prompts each time, to avoid hits in the prefix cache.
            prompts = [
                tuple(generator.randrange(300, 49_000) for _ in range(16 if number >= 0 else 4))
                for _ in range(arguments.streams)
            ]
            run = await timed(target, ways[name], prompts, arguments.tokens if number >= 0 else 4)
            if number >= 0:
                runs[name].append(run)
                print(f"{name}: {run.tokens_per_s:,.0f} tok/s", flush=True)
    return runs


async def timed(target: Target, way: Way, prompts: list[tuple[int, ...]], max_tokens: int) -> Run:
    """One run."""
    client = psutil.Process(os.getpid())
    before = time.perf_counter(), cpu_seconds(target.process), cpu_seconds(client)
    await way(target, prompts, max_tokens)
    after = time.perf_counter(), cpu_seconds(target.process), cpu_seconds(client)
    num_tokens = len(prompts) * max_tokens
    seconds, router, own = (b - a for a, b in zip(before, after, strict=True))
    return Run(num_tokens / seconds, router / num_tokens * 1e6, own / num_tokens * 1e6)


async def native(target: Target, prompts: list[tuple[int, ...]], max_tokens: int) -> None:
    """Generate streams of one channel."""
    requests = tuple(BenchRequest(prompt, max_tokens) for prompt in prompts)
    result = await run_workload([target.grpc], Workload("http cost", requests, len(requests)))
    counts = [sum(count for _, count in request.arrivals) for request in result.requests]
    if counts != [max_tokens] * len(prompts):
        raise RuntimeError(f"wrong numbers of tokens: {counts}")


async def http(target: Target, prompts: list[tuple[int, ...]], max_tokens: int) -> None:
    """Completions as server-sent events, a connection each."""
    counts = await asyncio.gather(*(_complete(target.http_port, prompt, max_tokens) for prompt in prompts))
    if counts != [max_tokens] * len(prompts):
        raise RuntimeError(f"wrong numbers of tokens: {counts}")


async def _complete(port: int, prompt: tuple[int, ...], max_tokens: int) -> int:
    """Runs one request; the number of its tokens, as the response's usage has it."""
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    num_tokens = 0
    while not (line := await reader.readline()).startswith(b"data: [DONE]"):
        if not line:
            raise RuntimeError("the stream broke")
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    writer.close()
    return num_tokens


def report(runs: dict[str, list[Run]], console: Console) -> None:
    """Print medians, and the cost of HTTP."""
    table = Table("way", "tok/s", "each run", "router µs/token", "client µs/token")
    for name, items in runs.items():
        each = " ".join(f"{run.tokens_per_s:,.0f}" for run in items)
        figures = [statistics.median(getattr(run, field) for run in items) for field in Run.__slots__]
        table.add_row(name, f"{figures[0]:,.0f}", each, f"{figures[1]:.1f}", f"{figures[2]:.1f}")
    console.print(table)
    medians = {name: statistics.median(run.tokens_per_s for run in items) for name, items in runs.items()}
    console.print(f"HTTP costs [bold]{1 - medians['HTTP'] / medians['native gRPC']:+.1%}[/bold] of throughput.")


if __name__ == "__main__":
    sys.exit(main())
