"""`midstream demo`: start all processes, stream several answers concurrently, print their speed, and stop.

With `--kill`, processes are killed while answers stream (kill_demo.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

from rich.console import Console
from rich.table import Table

from midstream.chunk import Chunk
from midstream.cli.demo_view import Answer, DemoView
from midstream.cli.display import RunDisplay
from midstream.cli.kill_demo import MAX_TOKENS, SEED, KillDemo
from midstream.cli.kill_view import KillView, summarize
from midstream.cli.pace import Pace
from midstream.cli.recording import SvgRecording
from midstream.cli.run_dir import RunDir, RunState, default_run_dir
from midstream.cli.supervisor import Supervisor
from midstream.cli.topology import Topology, plan_processes
from midstream.cli.up import MODEL_HELP, prepare_model
from midstream.client import AsyncClient, SamplingParams
from midstream.model.folder import EMBEDDED_MODEL

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Tell a very short story about a lighthouse keeper.",
    "Write a Python function that reverses a string.",
    "Write a haiku about a river.",
)
_MAX_TOKENS = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=EMBEDDED_MODEL, metavar="MODEL", help=f"{MODEL_HELP} [smollm2, embedded]")
    parser.add_argument("--routers", type=int, default=2, metavar="N", help="[2]")
    parser.add_argument("--detokenizers", type=int, default=2, metavar="N", help="[2]")
    parser.add_argument("--workers", type=int, metavar="N", help="Number of workers. [1, with --kill 2]")
    parser.add_argument(
        "--kill",
        action="store_true",
        help="Kill processes while answers stream, and compare every token with an undisturbed run.",
    )
    parser.add_argument("--kills", type=int, default=8, metavar="N", help="With --kill: number of kills. [8]")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="With --kill: write the view to this file as an animated SVG."
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 1 if an answer differs or a kill was not made."""
    console = Console(highlight=False)
    num_workers = arguments.workers or (2 if arguments.kill else 1)
    topology = Topology(arguments.model, arguments.routers, arguments.detokenizers, num_workers)
    begin = time.monotonic()
    topology = dataclasses.replace(topology, model=prepare_model(topology.model, console))
    if arguments.kill:
        kill = functools.partial(_kill, arguments.kills, arguments.record, console)
        return asyncio.run(_demo(topology, console, begin, kill))
    status = asyncio.run(_demo(topology, console, begin, functools.partial(_answer, console)))
    console.print(
        "\nTry it:  . .venv/bin/activate  &&  midstream up --detach  &&  midstream chat", style="dim", markup=False
    )
    return status


async def _demo(
    topology: Topology,
    console: Console,
    begin: float,
    present: Callable[[Supervisor, asyncio.Event], Coroutine[None, None, int]],
) -> int:
    """Start the service, run `present` on it, and stop it. Return the exit status, which is 1 after an interruption.

    `present` gets the supervisor and an event that is set whenever its state changes.
    """
    run_dir = RunDir(default_run_dir().with_name("demo"))
    stop, ready, changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with RunDisplay(console) as display:

        def show(state: RunState) -> None:
            changed.set()
            if not ready.is_set() and not stop.is_set():
                display.show(state)

        supervisor = Supervisor(
            run_dir, topology.model, plan_processes(topology, journal_path=run_dir.journal_path), show
        )
        running = asyncio.create_task(supervisor.run(stop, ready))
        started = asyncio.create_task(ready.wait())
        await asyncio.wait((running, started), return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    status = 1
    if ready.is_set():
        console.print(f"{_parts(supervisor.state)}: ready after {time.monotonic() - begin:.1f} s\n")
        presenting = asyncio.create_task(present(supervisor, changed))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((running, stopped, presenting), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not presenting.done():
            presenting.cancel()
        stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            status = await presenting
    with console.status("Stopping"):
        await running
    return status


async def _answer(console: Console, supervisor: Supervisor, _: asyncio.Event) -> int:
    _summarize(await _stream_all(supervisor.state, console), console)
    return 0


async def _kill(
    num_kills: int, record: Path | None, console: Console, supervisor: Supervisor, changed: asyncio.Event
) -> int:
    routers = [router.addresses["grpc"] for router in supervisor.state.of_kind("router")]
    async with AsyncClient(routers) as client:
        recording = SvgRecording() if record is not None else None
        view = KillView(console, lambda: supervisor.state, recording)

        def generate(prompt: str, temperature: float) -> AsyncIterator[Chunk]:
            sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=SEED)
            return client.generate(messages=[{"role": "user", "content": prompt}], sampling=sampling)

        demo = view.demo = KillDemo(
            generate, lambda: supervisor.state, changed, num_kills=num_kills, changed=view.changed
        )
        with view:
            is_good = await demo.run()
    summarize(demo, console)
    if recording is not None and record is not None:
        recording.write(record)
    return 0 if is_good else 1


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
