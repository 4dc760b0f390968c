"""Kill processes of a service with SIGKILL, and check every output.

python -m benchmarks.kills [streams rows gaps soak]

streams   64 streams; one process is killed every 2 s for a minute, each kind in turn
rows      8 clients with 100 requests each, for each kind of process, which is killed once in the middle
gaps      8 streams; the time without tokens after each kill, one kind after the other. Before each kill everything
          is ready, and each of two workers has at least three streams
soak      ten minutes at saturation with faults, disconnecting clients and expired deadlines; checks memory and KV
          blocks

Every output is compared byte for byte with that of a run without kills.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.kills.load import (
    Ledger,
    Question,
    ask,
    expectations,
    is_identical,
    longest_gap,
    make_questions,
    stream_until,
)
from benchmarks.kills.service import KilledService, running_service
from benchmarks.kills.soak import run_soak
from midstream.client import AsyncClient

KINDS = ("gpu_worker", "scheduler", "detokenizer", "router")
_WHOLE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Row:
    """One row of the public comparison; `theirs` is how many of the 800 requests NVIDIA Dynamo completed."""

    name: str
    kind: str
    routers: int = 1
    detokenizers: int = 1
    workers: int = 1
    theirs: str = "–"


ROWS = (
    Row("the only frontend (router) killed", "router", theirs="656"),
    Row("the only worker killed", "gpu_worker", theirs="520"),
    Row("one of four workers killed", "gpu_worker", workers=4, theirs="796"),
    Row("the only scheduler killed", "scheduler"),
    Row("the only detokenizer killed", "detokenizer"),
)


def main() -> int:
    """Run the experiments; fail if a request failed or an output differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", choices=["streams", "rows", "gaps", "soak"], metavar="EXPERIMENT")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="streams: seconds during which processes are killed. [60]"
    )
    parser.add_argument("--streams", type=int, default=64, help="streams: number of streams. [64]")
    parser.add_argument("--tokens", type=int, default=128, help="streams: output tokens per request. [128]")
    parser.add_argument("--rows", default="", help="rows: indexes of the rows, starting at 0, comma-separated. [all]")
    parser.add_argument("--row-tokens", type=int, default=16, help="rows: output tokens per request. [16]")
    parser.add_argument("--kills", type=int, default=5, help="gaps: number of kills of each kind. [5]")
    parser.add_argument(
        "--kinds", nargs="*", default=KINDS, choices=KINDS, help="gaps: kinds of process to kill. [all]"
    )
    parser.add_argument(
        "--soak-seconds", type=float, default=600.0, help="soak: duration of the load in seconds. [600]"
    )
    parser.add_argument("--clients", type=int, default=64, help="soak: concurrent requests. [64]")
    parser.add_argument("--fault-interval", type=float, default=20.0, help="soak: seconds between faults. [20]")
    parser.add_argument("--run-dir", type=Path, default=None, help="Folder for state and logs. [temporary]")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the service is also stopped on SIGTERM
    console = Console(width=120)
    is_good = True
    for experiment in arguments.experiments or ("streams", "rows", "gaps"):
        if experiment == "streams":
            is_good &= asyncio.run(run_streams(arguments, console))
        elif experiment == "rows":
            is_good &= run_rows(arguments, console)
        elif experiment == "soak":
            limits = (arguments.soak_seconds, arguments.clients, arguments.fault_interval)
            is_good &= asyncio.run(run_soak(arguments.model, *limits, console))
        else:
            is_good &= asyncio.run(run_gaps(arguments, console))
    return 0 if is_good else 1


async def run_streams(arguments: argparse.Namespace, console: Console) -> bool:
    """Run concurrent streams while a process is killed every two seconds."""
    questions = make_questions(arguments.streams, arguments.tokens)
    with running_service(arguments.model, 2, 2, 2, folder=arguments.run_dir) as service:
        async with AsyncClient(service.routers, unavailable_timeout_s=120) as client:
            expected = await expectations(client, questions, len(questions))
            ledger, is_over = Ledger(), asyncio.Event()
            started = time.monotonic()
            asking = asyncio.create_task(stream_until(client, questions, expected, is_over.is_set, ledger))
            turn = 0
            while time.monotonic() - started < arguments.seconds:
                await asyncio.sleep(2.0)
                await asyncio.to_thread(service.kill, KINDS[turn % len(KINDS)])
                turn += 1
            is_over.set()
            await asking
    kills = ", ".join(f"{kind} {count}" for kind, count in service.num_kills.items())
    console.print(f"{arguments.streams} streams, {turn} kills in {arguments.seconds:.0f} s ({kills}), ")
    console.print(
        f"{time.monotonic() - started:.0f} s until all had ended; {ledger.num_resumes} resumes by clients; "
        f"[bold]{ledger.num_complete} of {ledger.num_started} requests complete, {ledger.num_identical} identical"
    )
    _print_failures(ledger, console)
    return ledger.num_identical == ledger.num_started


def run_rows(arguments: argparse.Namespace, console: Console) -> bool:
    """Run 8 clients with 100 requests each and one kill per row."""
    numbers = [int(number) for number in arguments.rows.split(",")] if arguments.rows else range(len(ROWS))
    table = Table("killed in the middle", "complete of 800", "identical", "seconds", "NVIDIA Dynamo, complete of 800")
    is_good = True
    for number in numbers:
        ledger, seconds = asyncio.run(_run_row(ROWS[number], arguments))
        is_good &= ledger.num_identical == 800
        cells = (str(ledger.num_complete), str(ledger.num_identical), f"{seconds:.0f}")
        table.add_row(ROWS[number].name, *cells, ROWS[number].theirs)
        console.print(f"{ROWS[number].name}: {ledger.num_complete} of 800, {ledger.num_identical} identical")
        _print_failures(ledger, console)
    console.print(table)
    return is_good


async def _run_row(row: Row, arguments: argparse.Namespace) -> tuple[Ledger, float]:
    questions = make_questions(32, arguments.row_tokens, prompt_tokens=(16, 48))
    parts = (row.routers, row.detokenizers, row.workers)
    with running_service(arguments.model, *parts, folder=arguments.run_dir) as service:
        async with AsyncClient(service.routers, unavailable_timeout_s=120) as client:
            expected = await expectations(client, questions, 8)
            ledger = Ledger()
            started = time.monotonic()

            async def one(number: int) -> None:
                for count in range(100):
                    index = (number * 100 + count) % len(questions)
                    result = await ask(client, questions[index], number, ledger)
                    ledger.num_identical += result is not None and is_identical(result, expected[index])

            asking = [asyncio.create_task(one(number)) for number in range(8)]
            while ledger.num_complete < 400 and not all(task.done() for task in asking):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.to_thread(service.kill, row.kind)
            await asyncio.gather(*asking)
    return ledger, time.monotonic() - started


async def run_gaps(arguments: argparse.Namespace, console: Console) -> bool:
    """Measure the time without tokens after each kill."""
    questions = make_questions(8, 200)
    table = Table("killed", "kills", "streams", "median s", "p99 s", "worst s")
    with running_service(arguments.model, 2, 2, 2, folder=arguments.run_dir) as service:
        async with AsyncClient(service.routers, unavailable_timeout_s=120) as client:
            expected = await expectations(client, questions, len(questions))
            ledger, is_over = Ledger(), asyncio.Event()
            asking = asyncio.create_task(stream_until(client, questions, expected, is_over.is_set, ledger))
            await asyncio.sleep(3)
            windows = {"nothing": [(time.monotonic() - 2, time.monotonic())]}
            for kind in arguments.kinds:
                windows[kind] = [await _kill_once(service, client, kind) for _ in range(arguments.kills)]
            is_over.set()
            await asking
    # Gaps are computed after all streams have ended, since the token that ends a gap may arrive after the kill's
    # window.
    for kind, times in windows.items():
        table.add_row(kind, str(len(times)), *_quantiles(_gaps(ledger, questions, times)))
    console.print(table)
    console.print(f"{ledger.num_complete} of {ledger.num_started} requests complete, {ledger.num_identical} identical")
    _print_failures(ledger, console)
    return ledger.num_identical == ledger.num_started


async def _is_ready(service: KilledService, client: AsyncClient) -> bool:
    """Return whether every component is ready and both workers have streams; a restarted worker has none at first."""
    if not await asyncio.to_thread(service.is_whole):
        return False
    groups = (await client.server_info()).worker_groups
    return len(groups) == 2 and min(group.num_active_sequences for group in groups) >= 3


async def _kill_once(service: KilledService, client: AsyncClient, kind: str) -> tuple[float, float]:
    """Kill a process once everything is ready; return the window of four seconds that starts then."""
    give_up_at = time.monotonic() + _WHOLE_TIMEOUT_S
    while not await _is_ready(service, client) and time.monotonic() < give_up_at:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    killed_at = time.monotonic()
    await asyncio.to_thread(service.kill, kind)
    await asyncio.sleep(4.0)
    return killed_at, time.monotonic()


def _gaps(ledger: Ledger, questions: list[Question], windows: list[tuple[float, float]]) -> list[float]:
    found = [
        longest_gap(ledger.arrivals[number], start, end) for start, end in windows for number in range(len(questions))
    ]
    return sorted(gap for gap in found if gap is not None)


def _quantiles(gaps: list[float]) -> tuple[str, str, str, str]:
    at = [gaps[min(int(share * len(gaps)), len(gaps) - 1)] for share in (0.5, 0.99)]
    return str(len(gaps)), f"{at[0]:.2f}", f"{at[1]:.2f}", f"{gaps[-1]:.2f}"


def _print_failures(ledger: Ledger, console: Console) -> None:
    for failure in sorted(set(ledger.failures)):
        console.print(f"[red]{ledger.failures.count(failure)} × {failure}")


if __name__ == "__main__":
    sys.exit(main())
