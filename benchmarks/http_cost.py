"""Measure the cost of each API compared with native gRPC.

python -m benchmarks.http_cost [--all] [--fake] [--streams 64] [--rounds 4]

Starts one service and sends requests over native gRPC and as OpenAI completions (SSE), with `--all` over every
streaming API, in alternating order. Prints output tokens per second of each API, and the CPU time per token of router
and client. With `--fake` the worker has no model, so that only the control plane is measured.

The clients run in this process and parse the responses: protobuf with gRPC, JSON with the standard library.
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
from typing import TYPE_CHECKING, Any, cast

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.control_plane import cpu_seconds, wait_until_whole
from midstream.cli.bench.measure import run_workload
from midstream.cli.bench.workloads import BenchRequest, Workload
from midstream.client import AsyncClient
from midstream.model.folder import open_model_folder
from midstream.rpc.serving import open_channel
from protos import kserve_pb2, kserve_pb2_grpc, openengine_pb2_grpc
from protos import openengine_pb2 as oe
from tests.ports import free_ports

if TYPE_CHECKING:
    from protos.kserve_pb2_grpc import GRPCInferenceServiceAsyncStub
    from protos.openengine_pb2_grpc import InferenceAsyncStub

ROOT = Path(__file__).parent.parent
NATIVE = "native gRPC"
_RARE_ID = 1  # in place of the end id


@dataclass(frozen=True, slots=True)
class Target:
    """A router: its addresses and process."""

    grpc: str
    http_port: int
    process: psutil.Process


Prompt = tuple[int, ...]
# Finds the usage in an event.
Usage = Callable[[dict[str, Any]], dict[str, int] | None]
# Sends prompts with this many tokens to generate, and reads all output; returns the numbers of output tokens.
Way = Callable[[Target, list[Prompt], int], Awaitable[list[int]]]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one protocol; CPU times in µs per token."""

    tokens_per_s: float
    router_us: float
    client_us: float


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="Measure all APIs.")
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
    ways: dict[str, Way] = {NATIVE: native, "completions": completions}
    if arguments.all:
        ways |= {"chat": chat, "responses": responses, "messages": messages, "KServe": kserve, "openengine": openengine}
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(-1, arguments.rounds):
        order = list(ways)
        for name in reversed(order) if number % 2 else order:
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


async def timed(target: Target, way: Way, prompts: list[Prompt], max_tokens: int) -> Run:
    """Measure one run."""
    client = psutil.Process(os.getpid())
    before = time.perf_counter(), cpu_seconds(target.process), cpu_seconds(client)
    num_tokens = sum(await way(target, prompts, max_tokens))
    after = time.perf_counter(), cpu_seconds(target.process), cpu_seconds(client)
    if num_tokens < len(prompts):
        raise RuntimeError(f"{way.__name__}: {num_tokens} tokens of {len(prompts)} requests")
    seconds, router, own = (b - a for a, b in zip(before, after, strict=True))
    return Run(num_tokens / seconds, router / num_tokens * 1e6, own / num_tokens * 1e6)


async def native(target: Target, prompts: list[Prompt], max_tokens: int) -> list[int]:
    """Call the native Generate on one channel."""
    requests = tuple(BenchRequest(prompt, max_tokens) for prompt in prompts)
    result = await run_workload([target.grpc], Workload("http cost", requests, len(requests)))
    return [sum(count for _, count in request.arrivals) for request in result.requests]


async def openengine(target: Target, prompts: list[Prompt], max_tokens: int) -> list[int]:
    """Call openengine's Generate on one channel."""

    async def one(stub: InferenceAsyncStub, prompt: Prompt) -> int:
        stopping = oe.StoppingOptions(max_tokens=max_tokens, ignore_eos=True)
        greedy = oe.SamplingParams(temperature=0)
        request = oe.GenerateRequest(token_ids=oe.TokenIds(ids=prompt), stopping=stopping, sampling=greedy)
        return sum([len(event.token.tokens) async for event in stub.Generate(request)])

    async with open_channel(target.grpc) as channel:
        stub = cast("InferenceAsyncStub", openengine_pb2_grpc.InferenceStub(channel))
        return await asyncio.gather(*(one(stub, prompt) for prompt in prompts))


async def kserve(target: Target, prompts: list[Prompt], max_tokens: int) -> list[int]:
    """Call ModelStreamInfer on one channel; its responses do not contain token counts."""

    async def one(stub: GRPCInferenceServiceAsyncStub, prompt: Prompt) -> int:
        request = kserve_pb2.ModelInferRequest(model_name="ensemble")
        for name, datatype, field, value in (
            ("text_input", "BYTES", "bytes_contents", _text(prompt).encode()),
            ("max_tokens", "INT32", "int_contents", max_tokens),
            ("end_id", "INT32", "int_contents", _RARE_ID),
            ("stream", "BOOL", "bool_contents", True),
        ):
            item = request.inputs.add(name=name, datatype=datatype, shape=(1, 1))
            getattr(item.contents, field).append(value)
        async for answer in stub.ModelStreamInfer(iter([request])):
            if answer.error_message:
                raise RuntimeError(answer.error_message)
        return max_tokens

    async with open_channel(target.grpc) as channel:
        stub = cast("GRPCInferenceServiceAsyncStub", kserve_pb2_grpc.GRPCInferenceServiceStub(channel))
        return await asyncio.gather(*(one(stub, prompt) for prompt in prompts))


async def completions(target: Target, prompts: list[Prompt], max_tokens: int) -> list[int]:
    """Stream OpenAI completions as server-sent events, one connection each."""
    fixed = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    bodies = [{"prompt": prompt, **fixed} for prompt in prompts]
    return await _all_counts(target, "/v1/completions", bodies, lambda event: event.get("usage"), "completion_tokens")


async def chat(target: Target, prompts: list[Prompt], max_tokens: int) -> list[int]:
    """Stream chat completions in the same way."""
    fixed = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    bodies = [{"messages": _turn(prompt), **fixed} for prompt in prompts]
    path = "/v1/chat/completions"
    return await _all_counts(target, path, bodies, lambda event: event.get("usage"), "completion_tokens")


async def responses(target: Target, prompts: list[Prompt], max_tokens: int) -> list[int]:
    """Stream responses without storing them."""
    fixed = {"max_output_tokens": max_tokens, "temperature": 0, "store": False}
    bodies = [{"input": _text(prompt), **fixed} for prompt in prompts]
    usage: Usage = lambda event: event.get("response", {}).get("usage")  # noqa: E731
    return await _all_counts(target, "/v1/responses", bodies, usage, "output_tokens")


async def messages(target: Target, prompts: list[Prompt], max_tokens: int) -> list[int]:
    """Stream Anthropic messages."""
    bodies = [{"messages": _turn(prompt), "max_tokens": max_tokens, "temperature": 0} for prompt in prompts]
    return await _all_counts(target, "/v1/messages", bodies, lambda event: event.get("usage"), "output_tokens")


async def _all_counts(target: Target, path: str, bodies: list[dict[str, object]], usage: Usage, name: str) -> list[int]:
    return await asyncio.gather(
        *(_count(target.http_port, path, {**body, "stream": True}, usage, name) for body in bodies)
    )


async def _count(port: int, path: str, body: dict[str, object], usage: Usage, name: str) -> int:
    """Return the number of a request's output tokens, from the last usage in its events."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nanthropic-version: 2023-06-01\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    if b" 200 " not in await reader.readline():
        raise RuntimeError(f"{path}: {(await reader.read())[-500:].decode()}")
    num_tokens = 0
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            found = usage(json.loads(line[6:]))
            num_tokens = found[name] if found else num_tokens
    writer.close()
    return num_tokens


def _text(prompt: Prompt) -> str:
    return " ".join(map(str, prompt))


def _turn(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": _text(prompt)}]


def report(runs: dict[str, list[Run]], console: Console) -> None:
    """Print medians, and the cost of each API."""
    table = Table("way", "tok/s", "each run", "router µs/token", "client µs/token")
    for name, items in runs.items():
        each = " ".join(f"{run.tokens_per_s:,.0f}" for run in items)
        figures = [statistics.median(getattr(run, field) for run in items) for field in Run.__slots__]
        table.add_row(name, f"{figures[0]:,.0f}", each, f"{figures[1]:.1f}", f"{figures[2]:.1f}")
    console.print(table)
    medians = {name: statistics.median(run.tokens_per_s for run in items) for name, items in runs.items()}
    for name in medians.keys() - {NATIVE}:
        console.print(f"{name} costs [bold]{1 - medians[name] / medians[NATIVE]:+.1%}[/bold] of throughput.")


if __name__ == "__main__":
    sys.exit(main())
