"""`midstream demo`: starts every part, streams a few answers at once, says how fast each was, and stops."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from midstream.cli.demo_view import DemoView
from midstream.cli.display import RunDisplay
from midstream.cli.pace import Pace
from midstream.cli.run_dir import RunDir, RunState, default_run_dir
from midstream.cli.supervisor import Supervisor
from midstream.cli.topology import Topology, plan_processes
from midstream.cli.up import prepare_model
from midstream.client import AsyncClient, SamplingParams
from midstream.model.folder import EMBEDDED_MODEL

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Tell a very short story about a lighthouse keeper.",
    "Write a Python function that reverses a string.",
    "Write a haiku about a river.",
)
_MAX_TOKENS = 120


@dataclass(slots=True)
class Answer:
    """One prompt and what has come back so far."""

    prompt: str
    text: str = ""
    pace: Pace = field(default_factory=Pace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--model", default=EMBEDDED_MODEL, metavar="PATH", help="Model folder or .gguf file. [smollm2]")
    parser.add_argument("--routers", type=int, default=2, metavar="N", help="[2]")
    parser.add_argument("--detokenizers", type=int, default=2, metavar="N", help="[2]")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="[1]")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    console = Console(highlight=False)
    topology = Topology(arguments.model, arguments.routers, arguments.detokenizers, arguments.workers)
    begin = time.monotonic()
    prepare_model(topology.model, console)
    asyncio.run(_demo(topology, console, begin))
    console.print(
        "\nNow yours:  . .venv/bin/activate  &&  midstream up --detach  &&  midstream chat", style="dim", markup=False
    )
    return 0


async def _demo(topology: Topology, console: Console, begin: float) -> None:
    run_dir = RunDir(default_run_dir().with_name("demo"))
    stop, ready = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with RunDisplay(console) as display:

        def show(state: RunState) -> None:
            if not stop.is_set():
                display.show(state)

        supervisor = Supervisor(
            run_dir, topology.model, plan_processes(topology, journal_path=run_dir.journal_path), show
        )
        running = asyncio.create_task(supervisor.run(stop, ready))
        started = asyncio.create_task(ready.wait())
        await asyncio.wait((running, started), return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    if ready.is_set():
        console.print(f"{_parts(supervisor.state)}: ready after {time.monotonic() - begin:.1f} s\n")
        streaming = asyncio.create_task(_stream_all(supervisor.state, console))
        await asyncio.wait((running, streaming), return_when=asyncio.FIRST_COMPLETED)
        if not streaming.done():
            streaming.cancel()
        stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            _summarize(await streaming, console)
    with console.status("Stopping"):
        await running


async def _stream_all(state: RunState, console: Console) -> list[Answer]:
    routers = [router.addresses["grpc"] for router in state.of_kind("router")]
    answers = [Answer(prompt) for prompt in PROMPTS]
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient([address])) for address in routers]
        view = stack.enter_context(DemoView(answers, console))
        async with asyncio.TaskGroup() as tasks:
            for index, answer in enumerate(answers):
                tasks.create_task(_stream(clients[index % len(clients)], answer, index, view))
    return answers


async def _stream(client: AsyncClient, answer: Answer, index: int, view: DemoView) -> None:
    answer.pace = Pace()
    messages = [{"role": "user", "content": answer.prompt}]
    sampling = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0)
    async for chunk in client.generate(messages=messages, sampling=sampling):
        answer.text += chunk.text
        answer.pace.note(chunk)
        view.advance(index)
    view.finish(index)


def _summarize(answers: list[Answer], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stream")
    for column in ("tokens", "tok/s", "first text after"):
        table.add_column(column, justify="right")
    for number, answer in enumerate(answers, 1):
        pace = answer.pace
        table.add_row(str(number), str(pace.num_tokens), f"{pace.tokens_per_s:.0f}", f"{pace.first_s or 0:.2f} s")
    total, longest = sum(answer.pace.num_tokens for answer in answers), max(answer.pace.last_s for answer in answers)
    table.add_row("together", str(total), f"{total / longest:.0f}" if longest else "-", "", style="bold")
    console.print(table)


def _parts(state: RunState) -> str:
    counts = [(len(state.of_kind(kind)), kind.replace("gpu_", "")) for kind in _KINDS]
    return ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for count, kind in counts)


_KINDS = ("router", "scheduler", "gpu_worker", "detokenizer")
