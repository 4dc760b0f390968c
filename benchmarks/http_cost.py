"""Measure the cost of each API compared with native gRPC.

python -m benchmarks.http_cost [--all] [--only chat,responses] [--fake] [--streams 64] [--tokens 128] [--rounds 4]

Starts one service and sends requests over native gRPC and as OpenAI completions (SSE), or with `--all` over every
streaming API, in alternating order. Prints the output tokens per second of each API, and the CPU time per token of the
service, its router and the client. With `--fake` the worker has no model, so only the control plane is measured.

Every API gets the same work: a prompt is a chat of random words, given as messages, as its rendered text or as its
token ids, and each stream has the same length, since the service's copy of the model has no usual end token.

The clients run in this process. They read every gRPC message and every line of server-sent events, but parse only the
usage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
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
from midstream.model.folder import ModelFolder, open_model_folder
from midstream.model.tokenizer import Tokenizer
from midstream.rpc.channel import open_channel
from protos import kserve_pb2, kserve_pb2_grpc, openengine_pb2_grpc
from protos import openengine_pb2 as oe
from tests.ports import free_ports

if TYPE_CHECKING:
    from protos.kserve_pb2_grpc import GRPCInferenceServiceAsyncStub
    from protos.openengine_pb2_grpc import InferenceAsyncStub

ROOT = Path(__file__).parent.parent
NATIVE = "native gRPC"
_WARM_UP_TOKENS = 4
_MESSAGE = "MESSAGE"


@dataclass(frozen=True, slots=True)
class Target:
    """A service: the addresses of its router, and its processes by name."""

    grpc: str
    http_port: int
    processes: Mapping[str, psutil.Process]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in each of its forms.

    Attributes:
        words: The only message of the chat.
        text: The rendered chat.
        ids: Token ids of the rendered chat.
    """

    words: str
    text: str
    ids: tuple[int, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat as a list of messages."""
        return [{"role": "user", "content": self.words}]


# Matches the usage in an event.
Usage = Callable[[dict[str, Any]], dict[str, int] | None]
# A function that sends prompts to a service, each with the given number of tokens to generate, reads all output, and
# returns the number of output tokens of each.
Way = Callable[[Target, list[Prompt], int], Awaitable[list[int]]]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one protocol: the output rate, and the CPU time of each component and the client in µs per token."""

    tokens_per_s: float
    scheduler_us: float
    worker_us: float
    detokenizer_us: float
    router_us: float
    client_us: float


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="Measure every API.")
    parser.add_argument("--only", default="", help="Measure only these APIs (comma-separated) and native gRPC.")
    parser.add_argument("--fake", action="store_true", help="Use a worker without a model.")
    parser.add_argument("--step-ms", type=float, default=0.0, help="Duration of a fake step in ms. [0]")
    parser.add_argument("--streams", type=int, default=64, help="Concurrent requests. [64]")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="Tokens of each prompt. [64]")
    parser.add_argument("--tokens", type=int, default=128, help="Output tokens of each request. [128]")
    parser.add_argument("--rounds", type=int, default=4, help="Runs per protocol. [4]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, start_service(Path(folder), arguments) as target:
        runs = asyncio.run(measure(target, arguments))
    report(runs, Console())
    return 0


@contextlib.contextmanager
def start_service(folder: Path, arguments: argparse.Namespace, router_flags: str = "") -> Iterator[Target]:
    """Run one router, scheduler, detokenizer and worker as processes on this machine."""
    scheduler, worker, detokenizer, grpc_port, http_port = free_ports(5)
    model = _without_end(folder / "smollm2")
    fake = f"--model-fingerprint {model.fingerprint} --vocab-size {model.vocab_size} --num-blocks 65536"
    fake += f" --step-ms {arguments.step_ms}"
    commands = {
        "scheduler": f"-m scheduler --port {scheduler} --worker-port {worker} --model {model.path} "
        f"--journal-path {folder}/journal --log-level warning",
        "worker": f"-m tests.fakes.worker --scheduler tcp://127.0.0.1:{worker} {fake}"
        if arguments.fake
        else f"-m gpu_worker --scheduler tcp://127.0.0.1:{worker} --model {model.path} --log-level warning",
        "detokenizer": f"-m detokenizer --port {detokenizer} --schedulers 127.0.0.1:{scheduler} --model {model.path} "
        "--log-level warning",
        "router": f"-m router --port {grpc_port} --http-port {http_port} --schedulers 127.0.0.1:{scheduler} "
        f"--model {model.path} --detokenizers 127.0.0.1:{detokenizer} --log-level warning {router_flags}",
    }
    processes: dict[str, psutil.Popen] = {}
    try:
        for name, command in commands.items():
            processes[name] = psutil.Popen([sys.executable, *command.split()], cwd=ROOT)
        yield Target(f"127.0.0.1:{grpc_port}", http_port, dict(processes))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _without_end(folder: Path) -> ModelFolder:
    """Return a copy of the embedded model whose only end token is a rare token."""
    model = open_model_folder("smollm2")
    folder.mkdir()
    for file in model.path.iterdir():
        (folder / file.name).symlink_to(file)
    settings = json.loads((model.path / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink()
    settings["eos_token_id"] = model.vocab_size - 1
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return open_model_folder(str(folder))


async def measure(target: Target, arguments: argparse.Namespace) -> dict[str, list[Run]]:
    """Return the runs of each protocol."""
    async with AsyncClient([target.grpc]) as client:
        await wait_until_whole(client)
    prompts = Prompts(await rendered_chat(target.http_port), arguments.prompt_tokens)
    ways: dict[str, Way] = {"completions": completions}
    if arguments.all or arguments.only:
        ways |= {"chat": chat, "responses": responses, "messages": messages, "KServe": kserve, "openengine": openengine}
    if arguments.only:
        ways = {name: ways[name] for name in arguments.only.split(",")}
    ways = {NATIVE: native, **ways}
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(-1, arguments.rounds):
        order = list(ways)
        for name in reversed(order) if number % 2 else order:
            # Each run has new prompts: only the first tokens of the template are in the prefix cache.
            drawn = [prompts.draw() for _ in range(arguments.streams)]
            run = await timed(target, ways[name], drawn, arguments.tokens if number >= 0 else _WARM_UP_TOKENS)
            if number >= 0:
                runs[name].append(run)
                print(f"{name}: {run.tokens_per_s:,.0f} tok/s", flush=True)
    return runs


class Prompts:
    """Draws prompts of random words, all with the same number of tokens.

    Attributes:
        num_words: Number of words in each prompt.
    """

    def __init__(self, template: str, num_tokens: int) -> None:
        """Count the tokens of `template`, which is a rendered chat whose message is `_MESSAGE`.

        Raises:
            ValueError: The template alone has more than `num_tokens` tokens.
        """
        self._template = template
        self._num_tokens = num_tokens
        self._tokenizer = Tokenizer(open_model_folder("smollm2").path)
        self._random = random.Random(0)
        spelled = (self._tokenizer.token(token) or "" for token in range(self._tokenizer.vocab_size))
        self._words = [token[1:] for token in spelled if re.fullmatch("Ġ[a-z]{4,}", token)]
        self.num_words = num_tokens - len(self._tokenizer.encode(template.replace(_MESSAGE, "")))
        if self.num_words < 1:
            raise ValueError(f"{num_tokens} tokens are too few for the chat template")

    def draw(self) -> Prompt:
        """Return a new prompt."""
        while True:
            # Each word is one token, except for some words at the start of the message.
            words = " ".join(self._random.choices(self._words, k=self.num_words))
            text = self._template.replace(_MESSAGE, words)
            ids = self._tokenizer.encode(text)
            if len(ids) == self._num_tokens:
                return Prompt(words, text, tuple(ids))


async def rendered_chat(port: int) -> str:
    """Return a rendered chat with the message `_MESSAGE`."""
    reader, writer = await _post(port, "/tokenize", {"messages": [{"role": "user", "content": _MESSAGE}]})
    head_and_body = await reader.read()
    writer.close()
    ids = json.loads(head_and_body.partition(b"\r\n\r\n")[2])["tokens"]
    return Tokenizer(open_model_folder("smollm2").path).decode(ids, skip_special_tokens=False)


async def timed(target: Target, way: Way, prompts: list[Prompt], max_tokens: int) -> Run:
    """Measure one run."""
    processes = (*target.processes.values(), psutil.Process(os.getpid()))
    before = time.perf_counter(), *map(cpu_seconds, processes)
    num_tokens = sum(await way(target, prompts, max_tokens))
    after = time.perf_counter(), *map(cpu_seconds, processes)
    if num_tokens != len(prompts) * max_tokens:
        raise RuntimeError(f"{way.__name__}: {num_tokens} tokens, not {max_tokens} for each of {len(prompts)} prompts")
    seconds, *parts, own = (b - a for a, b in zip(before, after, strict=True))
    cpu_us = {f"{part}_us": cpu / num_tokens * 1e6 for part, cpu in zip(target.processes, parts, strict=True)}
    return Run(num_tokens / seconds, **cpu_us, client_us=own / num_tokens * 1e6)


async def native(target: Target, prompts: list[Prompt], max_tokens: int) -> list[int]:
    """Call the native Generate on one channel."""
    requests = tuple(BenchRequest(prompt.ids, max_tokens) for prompt in prompts)
    result = await run_workload([target.grpc], Workload("http cost", requests, len(requests)))
    return [sum(count for _, count in request.arrivals) for request in result.requests]


async def openengine(target: Target, prompts: list[Prompt], max_tokens: int) -> list[int]:
    """Call openengine's Generate on one channel."""

    async def one(stub: InferenceAsyncStub, prompt: Prompt) -> int:
        stopping = oe.StoppingOptions(max_tokens=max_tokens)
        greedy = oe.SamplingParams(temperature=0)
        request = oe.GenerateRequest(token_ids=oe.TokenIds(ids=prompt.ids), stopping=stopping, sampling=greedy)
        return sum([len(event.token.tokens) async for event in stub.Generate(request)])

    async with open_channel(target.grpc) as channel:
        stub = cast("InferenceAsyncStub", openengine_pb2_grpc.InferenceStub(channel))
        return await asyncio.gather(*(one(stub, prompt) for prompt in prompts))


async def kserve(target: Target, prompts: list[Prompt], max_tokens: int) -> list[int]:
    """Call ModelStreamInfer on one channel; its responses do not contain token counts."""

    async def one(stub: GRPCInferenceServiceAsyncStub, prompt: Prompt) -> int:
        request = kserve_pb2.ModelInferRequest(model_name="ensemble")
        for name, datatype, field, value in (
            ("text_input", "BYTES", "bytes_contents", prompt.text.encode()),
            ("max_tokens", "INT32", "int_contents", max_tokens),
            ("temperature", "FP32", "fp32_contents", 0.0),
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
    """Stream OpenAI completions as server-sent events, with one connection per request."""
    fixed = {"max_tokens": max_tokens, "temperature": 0, "stream_options": {"include_usage": True}}
    bodies = [{"prompt": prompt.ids, **fixed} for prompt in prompts]
    return await _all_counts(target, "/v1/completions", bodies, lambda event: event.get("usage"), "completion_tokens")


async def chat(target: Target, prompts: list[Prompt], max_tokens: int) -> list[int]:
    """Stream chat completions as server-sent events, with one connection per request."""
    fixed = {"max_tokens": max_tokens, "temperature": 0, "stream_options": {"include_usage": True}}
    bodies = [{"messages": prompt.messages, **fixed} for prompt in prompts]
    path = "/v1/chat/completions"
    return await _all_counts(target, path, bodies, lambda event: event.get("usage"), "completion_tokens")


async def responses(target: Target, prompts: list[Prompt], max_tokens: int) -> list[int]:
    """Stream responses without storing them."""
    fixed = {"max_output_tokens": max_tokens, "temperature": 0, "store": False}
    bodies = [{"input": prompt.words, **fixed} for prompt in prompts]
    usage: Usage = lambda event: event.get("response", {}).get("usage")  # noqa: E731
    return await _all_counts(target, "/v1/responses", bodies, usage, "output_tokens")


async def messages(target: Target, prompts: list[Prompt], max_tokens: int) -> list[int]:
    """Stream Anthropic messages."""
    bodies = [{"messages": prompt.messages, "max_tokens": max_tokens, "temperature": 0} for prompt in prompts]
    return await _all_counts(target, "/v1/messages", bodies, lambda event: event.get("usage"), "output_tokens")


async def _all_counts(target: Target, path: str, bodies: list[dict[str, object]], usage: Usage, name: str) -> list[int]:
    return await asyncio.gather(
        *(_count(target.http_port, path, {**body, "stream": True}, usage, name) for body in bodies)
    )


async def _count(port: int, path: str, body: dict[str, object], usage: Usage, name: str) -> int:
    """Return the number of a request's output tokens, from the last usage in its events."""
    reader, writer = await _post(port, path, body)
    num_tokens = 0
    while line := await reader.readline():
        if line.startswith(b"data: {") and name.encode() in line:
            found = usage(json.loads(line[6:]))
            num_tokens = found[name] if found else num_tokens
    writer.close()
    return num_tokens


async def _post(port: int, path: str, body: Mapping[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request on a new connection, and read the status line.

    Raises:
        RuntimeError: The status is not 200.
    """
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nanthropic-version: 2023-06-01\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    if b" 200 " not in await reader.readline():
        raise RuntimeError(f"{path}: {(await reader.read())[-500:].decode()}")
    return reader, writer


def report(runs: dict[str, list[Run]], console: Console) -> None:
    """Print the medians, and the cost of each API relative to native gRPC."""
    parts = [field.removesuffix("_us") for field in Run.__slots__[1:]]
    table = Table("way", "tok/s", "each run", *(f"{part} µs/token" for part in parts))
    for name, items in runs.items():
        each = " ".join(f"{run.tokens_per_s:,.0f}" for run in items)
        figures = [statistics.median(getattr(run, field) for run in items) for field in Run.__slots__]
        table.add_row(name, f"{figures[0]:,.0f}", each, *(f"{figure:.1f}" for figure in figures[1:]))
    console.print(table)
    medians = {name: statistics.median(run.tokens_per_s for run in items) for name, items in runs.items()}
    for name in medians.keys() - {NATIVE}:
        console.print(f"{name} costs [bold]{1 - medians[name] / medians[NATIVE]:+.1%}[/bold] of throughput.")


if __name__ == "__main__":
    sys.exit(main())
